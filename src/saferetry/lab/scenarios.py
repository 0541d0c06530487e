"""The scenarios of the lab: each brings one fault upon one handler and counts what the database has in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pymongo import InsertOne, MongoClient, UpdateOne
from pymongo.collection import Collection

from saferetry.lab.consuming import Ending, Message
from saferetry.lab.failpoints import hold_inserts, hold_updates
from saferetry.lab.poll_interval import POLL_INTERVAL, poll_interval
from saferetry.lab.proxy import Proxy
from saferetry.lab.redelivery import TAKEOVER_SECONDS, crash_redelivery, takeover
from saferetry.lab.server import Server
from saferetry.lab.stage import FaultMissingError, Measurement, Stage

SOCKET_TIMEOUT = 0.5  # seconds; short, so that the lab is over soon
_LOST_REPLIES = 2  # one alone is hidden by the driver's own resend

Records = Collection[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault and one handler.

    Attributes:
        name: on the command line and in the file.
        about: one line for people: the fault, and what `effects` counts.
        commands: names of the write commands whose sends are counted.
        expected: the effects of a handler that did its work once.
        play: brings the fault about, lets the consumer handle its message and returns the effects.
        needs_failpoints: whether a write must be held in the engine.
        needs_javascript: whether a write must be slow by itself.
    """

    name: str
    about: str
    commands: tuple[str, ...]
    expected: int
    play: Callable[[Stage], int]
    needs_failpoints: bool = False
    needs_javascript: bool = False

    def obstacle(self, server: Server) -> str | None:
        """Return why it cannot be played on a server, or None."""
        if self.needs_failpoints and not server.has_failpoints:
            return "writes cannot be held in this server's engine: it needs mongod --setParameter enableTestCommands=1"
        if self.needs_javascript and not server.has_javascript:
            return "no write is slow enough on this server: it needs server-side JavaScript"
        return None

    def measure(self, server: Server, admin: MongoClient[dict[str, Any]], consume: Callable[[Message], Ending]) -> Measurement:
        """Play the scenario once in one way of consuming.

        Raises:
            FaultMissingError: the fault did not take place.
        """
        stage = Stage(server, admin, consume)
        try:
            effects = self.play(stage)
        finally:
            stage.clear()
        return Measurement(
            executions=stage.ending.executions,
            sends=stage.sends(*self.commands),
            peak_copies=stage.peak_copies,
            effects=effects,
            expected=self.expected,
            seconds=stage.ending.seconds,
            seen=stage.ending.seen,
            left_group=stage.ending.left_group,
        )


def _insert_order(records: Records) -> None:
    records.insert_one({"order": 1})


def _take_from_stock(records: Records) -> None:
    records.update_one({"_id": "stock"}, {"$inc": {"taken": 1}})


def _slow_insert(stage: Stage) -> int:
    with hold_inserts(stage.admin, stage.namespace) as release:
        # After three executions of a consumer whose executions take two socket timeouts each, in the fourth.
        timer = threading.Timer(6.5 * SOCKET_TIMEOUT, release)
        timer.start()
        stage.consume(_insert_order, socket_timeout=SOCKET_TIMEOUT)
        timer.cancel()
        timer.join()
    stage.settle()
    return stage.records.count_documents({})


def _lost_reply_inc(stage: Stage) -> int:
    stage.records.insert_one({"_id": "stock", "taken": 0})
    with _losing_replies(stage, "update") as proxy, stage.held_until_seen(hold_updates(stage.admin, stage.namespace)):
        stage.consume(_take_from_stock, proxy=proxy)
        _check(proxy)
    stage.settle()
    return _taken(stage)


def _lost_reply_insert(stage: Stage) -> int:
    with _losing_replies(stage, "insert") as proxy, stage.held_until_seen(hold_inserts(stage.admin, stage.namespace)):
        stage.consume(_insert_order, proxy=proxy)
        _check(proxy)
    stage.settle()
    return stage.records.count_documents({})


def _lost_reply_bulk(stage: Stage) -> int:
    def bulk(records: Records) -> None:
        records.bulk_write([InsertOne({"order": 1}), UpdateOne({"_id": "stock"}, {"$inc": {"taken": 1}})])

    stage.records.insert_one({"_id": "stock", "taken": 0})
    # The second command of the bulk loses its replies, the first was acknowledged.
    with _losing_replies(stage, "update") as proxy, stage.held_until_seen(hold_updates(stage.admin, stage.namespace)):
        stage.consume(bulk, proxy=proxy)
        _check(proxy)
    stage.settle()
    return max(stage.records.count_documents({"order": 1}), _taken(stage))


def _update_many(stage: Stage) -> int:
    def add_to_all(records: Records) -> None:
        records.update_many({"$where": "sleep(5)||true"}, {"$inc": {"changes": 1}})  # 5 ms for each document

    stage.records.insert_many([{"changes": 0} for _ in range(200)])
    stage.consume(add_to_all, socket_timeout=SOCKET_TIMEOUT)
    stage.settle()
    return stage.records.count_documents({"changes": {"$gt": 1}})


def _orphan(stage: Stage) -> int:
    with hold_inserts(stage.admin, stage.namespace):
        # As long as the four executions of two sends each take that people write.
        stage.consume(_insert_order, socket_timeout=SOCKET_TIMEOUT, budget=8 * SOCKET_TIMEOUT)
        when_it_gave_up = stage.records.count_documents({})
    stage.settle()
    return stage.records.count_documents({}) - when_it_gave_up


def _losing_replies(stage: Stage, command: str) -> Proxy:
    return stage.proxy(command, "close", _LOST_REPLIES)


def _check(proxy: Proxy) -> None:
    if proxy.hits != _LOST_REPLIES:
        raise FaultMissingError(f"{proxy.hits} replies were lost, not {_LOST_REPLIES}")


def _taken(stage: Stage) -> int:
    stock = stage.records.find_one({"_id": "stock"}) or {}
    return int(stock["taken"])


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "slow-insert",
        "an insert held in the engine past the socket timeout; effects are documents",
        ("insert",),
        1,
        _slow_insert,
        needs_failpoints=True,
    ),
    Scenario(
        "lost-reply-inc", "two replies to a $inc are lost; effects are the counter's value", ("update",), 1, _lost_reply_inc
    ),
    Scenario(
        "lost-reply-insert", "two replies to an insert are lost; effects are documents", ("insert",), 1, _lost_reply_insert
    ),
    Scenario(
        "lost-reply-bulk",
        "two replies to a bulk's second command are lost; effects are times the bulk was applied",
        ("insert", "update"),
        1,
        _lost_reply_bulk,
    ),
    Scenario(
        "update-many",
        "an update_many outlasts the socket timeout; effects are documents changed twice or more",
        ("update",),
        0,
        _update_many,
        needs_javascript=True,
    ),
    Scenario(
        "orphan",
        "an insert held until the consumer gives up; effects are documents that appear afterwards",
        ("insert",),
        0,
        _orphan,
        needs_failpoints=True,
    ),
    Scenario(
        "crash-redelivery",
        "a Kafka consumer is killed between two writes, the next one gets the record; effects are documents",
        ("insert", "update"),
        1,
        crash_redelivery,
    ),
    Scenario(
        "takeover",
        "a consumer is killed in a transaction, whose locks stay; effects are records that the next one has done after "
        f"{TAKEOVER_SECONDS:g} s",
        ("insert", "update"),
        1,
        takeover,
    ),
    Scenario(
        "poll-interval",
        f"the server refuses inserts for longer than max.poll.interval.ms ({POLL_INTERVAL:g} s here); effects are times that "
        "the consumer left its group",
        ("insert",),
        0,
        poll_interval,
        needs_failpoints=True,
    ),
)
