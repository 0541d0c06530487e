"""A consumer of a group in a process of its own, to be killed or stopped: `python -m tests.proof.kafka_worker PLAN`.

It tells "record" for its first record, and "log" for each warning. SIGTERM ends it.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pymongo
from confluent_kafka import Consumer, KafkaException, TopicPartition
from pymongo.errors import PyMongoError

import saferetry
from saferetry.kafka import PollBudget, kafka_key, run
from saferetry.lab.consuming import retry_of_the_handler
from saferetry.lab.processes import tell

OPTIONS: dict[str, Any] = {
    "heartbeatFrequencyMS": 500,
    "serverMonitoringMode": "poll",
    "serverSelectionTimeoutMS": 1_500,
    "socketTimeoutMS": 1_000,
}
COMMIT_SECONDS = 1.0  # both consumers commit as often


class Telling(logging.Handler):
    """Tell the parent of warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        """Tell one."""
        tell("log", text=record.getMessage())


def order(database: Any, message: Any, session: Any = None) -> None:
    """Have two effects, which show when they were there twice."""
    database.orders.insert_one({"partition": message.partition(), "offset": message.offset()}, session=session)
    database.stock.update_one({"_id": message.partition()}, {"$inc": {"taken": 1}}, session=session)


def consume_guarded(plan: dict[str, Any]) -> None:
    """Consume with saferetry."""
    settings = saferetry.Settings(marker_database=plan["database"], backoff_base_ms=20)
    with saferetry.MongoClient[dict[str, Any]](plan["uri"], saferetry=settings, **OPTIONS) as client:
        database = client[plan["database"]]
        begun: list[Any] = []

        @saferetry.handler(key=kafka_key(plan["topic"]), guarantee="transaction", client=client, name="proof")
        def on_order(message: Any) -> None:
            if not begun:
                begun.append(message)
                tell("record")
            database.orders.insert_one({"partition": message.partition(), "offset": message.offset()})
            database.stock.update_one({"_id": message.partition()}, {"$inc": {"taken": 1}})

        run(
            Consumer(plan["config"]),
            on_order,
            topics=plan["topic"],
            group=plan["topic"],
            budget=PollBudget.from_config(plan["config"], client=client),
            commit_seconds=COMMIT_SECONDS,
        )


def consume_raw(plan: dict[str, Any]) -> None:
    """Consume with plain PyMongo, a retry of the handler, and a commit of what is done."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    consumer = Consumer(plan["config"])
    done: dict[int, int] = {}

    def commit() -> None:
        offsets = [TopicPartition(plan["topic"], number, offset) for number, offset in done.items()]
        done.clear()
        if offsets:
            try:
                consumer.commit(offsets=offsets, asynchronous=False)
            except KafkaException as exc:
                tell("log", text=f"not committed: {exc.args[0].name()}")

    with pymongo.MongoClient[dict[str, Any]](plan["uri"], **OPTIONS) as client:
        handle: Callable[..., Any] = retry_of_the_handler().wraps(order)
        consumer.subscribe([plan["topic"]], on_revoke=lambda *_: commit(), on_lost=lambda *_: done.clear())
        committed_at, is_first = time.monotonic(), True
        while not stopped:
            message: Any = consumer.poll(0.1)
            if message is not None and message.error() is not None:
                tell("log", text=f"the consumer reports {message.error().name()}")
            elif message is not None:
                if is_first:
                    tell("record")
                    is_first = False
                handle(client[plan["database"]], message)
                done[message.partition()] = message.offset() + 1
            if time.monotonic() - committed_at >= COMMIT_SECONDS:
                commit()
                committed_at = time.monotonic()
        commit()
        consumer.close()


def main() -> None:
    """Consume until told to stop."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    logging.getLogger("saferetry").addHandler(Telling(logging.WARNING))
    try:
        (consume_guarded if plan["way"] == "saferetry" else consume_raw)(plan)
    except PyMongoError as exc:
        tell("log", text=f"ended by {type(exc).__name__}")
        sys.exit(3)


if __name__ == "__main__":
    main()
