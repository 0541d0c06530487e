"""A consumer in a process of its own, so that it can be killed: plain PyMongo or saferetry, one message.

`python -m saferetry.lab.consumer PLAN`, see `Plan`; the connection string is in the variable LAB_CONSUMER_URI, since it may
hold a password and every user of the machine sees a command line. It tells "message" when it has one, "execution" for each
execution of its handler, "sent" for each command, and "done" with seconds and what it saw (see `saferetry.lab.processes`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import pymongo
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

import saferetry
from saferetry import Budget, RecordKey
from saferetry.kafka import PollBudget, kafka_key
from saferetry.lab.broker import SESSION_TIMEOUT
from saferetry.lab.consuming import Way, retry_of_the_handler
from saferetry.lab.processes import tell

URI_VARIABLE = "LAB_CONSUMER_URI"
_POLL = 0.1  # seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """What a consumer process is to do.

    Attributes:
        way: plain PyMongo or saferetry.
        app_name: the client's.
        database: name of the database that everything is written to.
        collection: name of the collection that the handler writes to.
        transactional: whether plain PyMongo puts the handler and an inbox document into one transaction, by hand.
        patience: seconds after which that gives up.
        bootstrap: address of the Kafka cluster; empty: there is one message at hand.
        topic: where the message is; the consumer group's name too.
        poll_interval: seconds that may pass between two polls of a Kafka consumer.
        pause: seconds between two executions of plain PyMongo's retry.
    """

    way: Way
    app_name: str
    database: str
    collection: str
    transactional: bool = False
    patience: float = 30.0
    bootstrap: str = ""
    topic: str = "orders"
    poll_interval: float = 300.0
    pause: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it for the command line."""
        return {**asdict(self), "way": self.way.value}


class _Telling(CommandListener):
    def started(self, event: CommandStartedEvent) -> None:
        tell("sent", command=event.command_name)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass


def _handle_order(database: Any, collection: str, session: ClientSession | None = None) -> None:
    tell("execution")
    database[collection].insert_one({"order": 1}, session=session)
    database[collection].update_one({"_id": "stock"}, {"$inc": {"taken": 1}}, session=session)


def _raw(plan: Plan, stack: ExitStack) -> Callable[[Any], None]:
    client = stack.enter_context(
        pymongo.MongoClient[dict[str, Any]](os.environ[URI_VARIABLE], appName=plan.app_name, event_listeners=[_Telling()])
    )
    database = client[plan.database]

    def in_transaction(session: ClientSession) -> None:
        database.inbox.insert_one({"_id": plan.topic}, session=session)
        _handle_order(database, plan.collection, session)

    def handle(message: Any) -> None:  # noqa: ARG001 - its content does not matter
        if not plan.transactional:
            retry_of_the_handler(plan.pause)(_handle_order, database, plan.collection)
            return
        with client.start_session() as session, pymongo.timeout(plan.patience):
            session.with_transaction(in_transaction)

    return handle


def _guarded(plan: Plan, stack: ExitStack) -> Callable[[Any], None]:
    client = stack.enter_context(
        saferetry.MongoClient[dict[str, Any]](
            os.environ[URI_VARIABLE],
            appName=plan.app_name,
            event_listeners=[_Telling()],
            saferetry=saferetry.Settings(marker_database=plan.database),
        )
    )
    at_hand = RecordKey(plan.topic, 0, 0, group=plan.topic, digest=b"1")

    @saferetry.handler(
        key=kafka_key(plan.topic) if plan.bootstrap else at_hand,
        guarantee="transaction",
        client=client,
        name="lab",
        budget=_budget_of(plan),
    )
    def handle(message: Any) -> None:  # noqa: ARG001 - its content does not matter
        _handle_order(client[plan.database], plan.collection)

    return handle


def _budget_of(plan: Plan) -> Callable[[Any], Budget] | None:
    """Return the budget of a Kafka consumer, which handles its message as soon as poll() has returned."""
    if not plan.bootstrap:
        return None
    interval = round(plan.poll_interval * 1000)
    poll = PollBudget(interval, 1, settings=saferetry.Settings(longest_execution_ms=1_000, max_executions=1))

    def of(message: Any) -> Budget:
        poll.start(1)
        return poll(message)

    return of


def _consume_from_kafka(plan: Plan, handle: Callable[[Any], None]) -> None:
    from confluent_kafka import Consumer, KafkaError  # noqa: PLC0415 - whoever plans this has it

    consumer = Consumer(
        {
            "bootstrap.servers": plan.bootstrap,
            "group.id": plan.topic,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": round(min(SESSION_TIMEOUT, plan.poll_interval) * 1000),
            "max.poll.interval.ms": round(plan.poll_interval * 1000),
            "log_level": 0,
            "heartbeat.interval.ms": 500,
        }
    )
    try:
        consumer.subscribe([plan.topic])
        while True:
            message = consumer.poll(_POLL)
            if message is not None and message.error() is None:
                break
        _handle_one(handle, message)
        next_one = consumer.poll(_POLL)
        error = next_one.error() if next_one is not None else None
        left_group = error is not None and error.code() == KafkaError._MAX_POLL_EXCEEDED
        tell("group", left=left_group)
        if not left_group:
            consumer.commit(message=message, asynchronous=False)
    finally:
        consumer.close()


def _handle_one(handle: Callable[[Any], None], message: Any) -> None:
    tell("message")
    begin = time.monotonic()
    seen = "done"
    try:
        handle(message)
    except PyMongoError as exc:
        seen = type(exc).__name__
    tell("done", seconds=time.monotonic() - begin, seen=seen)


def main() -> None:
    """Consume one message."""
    given = json.loads(sys.argv[1])
    plan = Plan(**{**given, "way": Way(given["way"])})
    with ExitStack() as stack:
        handle = (_guarded if plan.way is Way.SAFERETRY else _raw)(plan, stack)
        if plan.bootstrap:
            _consume_from_kafka(plan, handle)
        else:
            _handle_one(handle, None)


if __name__ == "__main__":
    main()
