"""Handlers and what befalls them: played on a real server and on one in memory, to the same end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from pymongo import DeleteMany, InsertOne, ReturnDocument
from pymongo.errors import DuplicateKeyError, ExecutionTimeout, OperationFailure, PyMongoError
from pymongo.write_concern import WriteConcern

import saferetry
from saferetry import RecordKey, Settings, current_record, repeatable
from tests.support.driving import QUICK, quick

Work = Callable[[Any], Any]
KEY = RecordKey("events", 0, 7, group="g", digest=b"content")


@dataclass(frozen=True)
class Lost:
    """Be messages that are lost.

    Attributes:
        method: The method they are of.
        command: The command that it sends.
        what: The server's reply, or the request.
        collection: Its collection; empty for a commit.
        sends: Commands that one call of the driver's makes before it gives up.
        times: Calls of the driver's that fail.
        after: Calls that go through before.
    """

    method: str
    command: str
    what: Literal["reply", "request"] = "reply"
    collection: str = "orders"
    sends: int = 2
    times: int = 1
    after: int = 0


@dataclass(frozen=True)
class Answered:
    """Be errors that the server answers with.

    Attributes:
        method: The method they are for.
        command: The command that it sends.
        code: The error's code.
        labels: Its labels.
        sends: Commands that one call of the driver's makes before it gives up.
        times: Calls of the driver's that fail.
    """

    method: str
    command: str
    code: int
    labels: Sequence[str] = ()
    sends: int = 1
    times: int = 1

    def error(self) -> OperationFailure:
        """Make it, as the driver does."""
        make = {50: ExecutionTimeout, 11000: DuplicateKeyError}.get(self.code, OperationFailure)
        return make("failed", self.code, {"ok": 0.0, "code": self.code, "errorLabels": list(self.labels)})


@dataclass(frozen=True)
class Script:
    """Be one handler, how often its record is delivered, and what is lost meanwhile."""

    name: str
    work: Work
    lost: Lost | Answered | None = None
    deliveries: Sequence[RecordKey] = (KEY,)
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = QUICK
    before: Work = lambda database: None

    def __str__(self) -> str:
        return self.name


TWICE = (KEY, KEY)
IN_TRANSACTION: dict[str, Any] = {"guarantee": "transaction"}


class ImpatientError(Exception):
    """What a handler raises."""


def execution() -> int:
    record = current_record()
    assert record is not None
    return record.execution


def insert(database: Any) -> Any:
    return database.orders.insert_one({"n": 1}).acknowledged


def increase(database: Any) -> Any:
    result = database.orders.update_one({"_id": 1}, {"$inc": {"n": 1}})
    return result.matched_count, result.modified_count


def one_order(database: Any) -> None:
    database.orders.insert_one({"_id": 1, "n": 0})


def two_orders(database: Any) -> None:
    database.orders.insert_many([{"_id": 1, "n": 0}, {"_id": 2, "n": 0}])


def unique_numbers(database: Any) -> None:
    database.orders.create_index("n", unique=True)
    two_numbers(database)


def two_numbers(database: Any) -> None:
    database.orders.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": 2}])


def insert_many(database: Any) -> Any:
    return len(database.orders.insert_many([{"n": 1}, {"n": 2}, {"n": 3}]).inserted_ids)


def insert_some(database: Any) -> Any:
    try:
        database.orders.insert_many([{"_id": 5}, {"_id": 1}, {"_id": 6}], ordered=False)
    except PyMongoError as exc:
        return type(exc).__name__
    return None


def bulk(database: Any) -> Any:
    return database.orders.bulk_write([InsertOne({"n": 1}), InsertOne({"n": 2})]).inserted_count


def bulk_with_multi(database: Any) -> Any:
    return database.orders.bulk_write([DeleteMany({"n": 0})]).deleted_count


def upsert(database: Any) -> Any:
    return database.orders.update_one({"_id": 9}, {"$inc": {"n": 1}}, upsert=True).upserted_id


def replace(database: Any) -> Any:
    return database.orders.replace_one({"_id": 1}, {"x": 2}).modified_count


def delete(database: Any) -> Any:
    return database.orders.delete_one({"n": 0}).deleted_count


def find_and_increase(database: Any) -> Any:
    after = ReturnDocument.AFTER
    return database.orders.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, return_document=after)


def find_and_delete(database: Any) -> Any:
    return database.orders.find_one_and_delete({"n": 0}, sort=[("_id", 1)])


def update_many(database: Any) -> Any:
    return database.orders.update_many({}, {"$inc": {"n": 1}}).modified_count


def update_many_repeatable(database: Any) -> Any:
    with repeatable():
        return database.orders.update_many({}, {"$set": {"n": 5}}).matched_count


def change_nothing(database: Any) -> Any:
    return database.orders.update_one({"_id": 77}, {"$inc": {"n": 1}}).matched_count


def insert_taken(database: Any) -> Any:
    try:
        database.orders.insert_one({"_id": 1})
    except DuplicateKeyError as exc:
        return exc.code
    return None


def fail_before_an_effect(database: Any) -> Any:
    if execution() == 1:
        raise ImpatientError
    return insert(database)


def fail_after_an_effect(database: Any) -> Any:
    insert(database)
    if execution() == 1:
        raise ImpatientError


def fail(database: Any) -> Any:
    insert(database)
    increase(database)
    raise ImpatientError


def repeat(database: Any) -> Any:
    for _ in range(3):
        try:
            return increase(database)
        except PyMongoError:
            continue
    return None


def swallow(database: Any) -> Any:
    try:
        increase(database)
    except PyMongoError as exc:
        return type(exc).__name__
    return None


def move(database: Any) -> Any:
    """Move between two documents, read in between, in the ways there are."""
    orders = database.orders
    insert(database)
    orders.update_one({"_id": 1}, {"$inc": {"n": 10}})
    orders.update_many({"n": {"$gt": 100}}, {"$set": {"high": True}})
    seen = sorted(document["n"] for document in orders.find({}))
    counted = orders.count_documents({}), sorted(orders.distinct("n"))
    grouped = list(orders.aggregate([{"$group": {"_id": None, "n": {"$sum": "$n"}}}]))
    orders.delete_many({"n": 0})
    return {"seen": seen, "counted": list(counted), "grouped": grouped, "left": orders.find_one({"_id": 2})}


def take_one_then_make_room(database: Any) -> Any:
    """A duplicate that the handler lives with."""
    try:
        database.orders.insert_one({"_id": 3, "n": 1})
    except DuplicateKeyError:
        database.orders.insert_one({"_id": 4, "n": 4})
    return sorted(document["_id"] for document in database.orders.find())


def update_to_taken(database: Any) -> Any:
    try:
        database.orders.update_one({"_id": 2}, {"$set": {"n": 1}})
    except DuplicateKeyError:
        return "taken"
    return "free"


def take_id(database: Any) -> Any:
    try:
        database.orders.insert_one({"_id": 1})
    except DuplicateKeyError:
        return update_one_other(database)
    return None


def update_one_other(database: Any) -> Any:
    return database.orders.update_one({"_id": 2}, {"$inc": {"n": 1}}).modified_count


def go_on_after_an_error(database: Any) -> Any:
    try:
        increase(database)
    except PyMongoError:
        return insert(database)
    return insert(database)


def nested(database: Any) -> Any:
    @saferetry.handler(key=("inner", 0, 1), name="inner", guarantee="transaction", digest=lambda _: b"inner")
    def inner(_: Any) -> Any:
        return increase(database)

    insert(database)
    inner(1)
    inner(1)
    if execution() == 1:
        raise ImpatientError


def make_an_index(database: Any) -> Any:
    insert(database)
    database.orders.create_index("n")


def make_a_collection(database: Any) -> Any:
    insert(database)
    database.create_collection("others")


def drop(database: Any) -> Any:
    insert(database)
    database.orders.drop()


def drop_the_database(database: Any) -> Any:
    insert(database)
    database.client.drop_database(database.name)


def command(database: Any) -> Any:
    insert(database)
    return database.command("ping")


def estimate(database: Any) -> Any:
    return database.orders.estimated_document_count()


def out(database: Any) -> Any:
    insert(database)
    return list(database.orders.aggregate([{"$match": {}}, {"$out": "others"}]))


def unacknowledged(database: Any) -> Any:
    orders = database.orders.with_options(write_concern=WriteConcern(0))
    orders.update_one({"_id": 1}, {"$inc": {"n": 1}})
    database.orders.find_one()  # on the same connection, hence after it


RETRYABLE = ("RetryableWriteError",)
TRANSIENT = ("TransientTransactionError",)
UNKNOWN_COMMIT = ("UnknownTransactionCommitResult",)
OTHER_CONTENT = RecordKey("events", 0, 7, group="g", digest=b"other content")
OTHER_POSITION = RecordKey("events", 0, 8, group="g", digest=b"content")
RETRIED: dict[str, Any] = {"retry_on": ImpatientError}
STORED: dict[str, Any] = {**IN_TRANSACTION, "store_result": True}
ONE_ATTEMPT = quick(max_attempts=1)
SINGLE = {
    "insert_one": (insert, "insert"),
    "insert_many": (insert_many, "insert"),
    "bulk_write": (bulk, "insert"),
    "update_one": (increase, "update"),
    "replace_one": (replace, "update"),
    "delete_one": (delete, "delete"),
    "find_one_and_update": (find_and_increase, "findAndModify"),
    "find_one_and_delete": (find_and_delete, "findAndModify"),
}

SCRIPTS = [
    *(
        Script(f"{method}: {what} lost", work, Lost(method, command, what), before=two_orders)
        for method, (work, command) in SINGLE.items()
        for what in ("reply", "request")
    ),
    Script("upsert: reply lost", upsert, Lost("update_one", "update")),
    Script("unordered insert with a refused member: reply lost", insert_some, Lost("insert_many", "insert"), before=one_order),
    Script("a no-op: reply lost", change_nothing, Lost("update_one", "update"), before=one_order),
    Script("a duplicate", insert_taken, before=one_order),
    Script("replies lost until given up", increase, Lost("update_one", "update", times=4), before=one_order),
    Script("update_many: reply lost", update_many, Lost("update_many", "update", sends=1), before=two_orders),
    Script("update_many: request lost", update_many, Lost("update_many", "update", "request", sends=1), before=two_orders),
    Script("update_many, repeatable", update_many_repeatable, Lost("update_many", "update", sends=1), before=two_orders),
    Script("bulk with a multi member", bulk_with_multi, Lost("bulk_write", "delete", sends=1), before=two_orders),
    Script("the application repeats", repeat, Lost("update_one", "update"), settings=ONE_ATTEMPT, before=one_order),
    Script("the application swallows", swallow, Lost("update_one", "update"), settings=ONE_ATTEMPT, before=one_order),
    Script("executed again before an effect", fail_before_an_effect, options=RETRIED),
    Script("refused after an effect", fail_after_an_effect, options=RETRIED),
    Script("redelivered", insert, deliveries=TWICE),
    Script("redelivered with derived ids", insert, deliveries=TWICE, options={"derive_ids": True}),
    Script("redelivered with many derived ids", insert_many, deliveries=TWICE, options={"derive_ids": True}),
    Script("redelivered bulk with derived ids", bulk, deliveries=TWICE, options={"derive_ids": True}),
    Script("unacknowledged", unacknowledged, before=one_order),
    *(
        Script(f"transaction: {name}", work, lost, before=two_orders, deliveries=TWICE, options=STORED)
        for name, work, lost in (
            ("redelivered", move, None),
            ("first reply lost", move, Lost("insert_one", "insert", sends=1)),
            ("later reply lost", move, Lost("delete_many", "delete", sends=1)),
            ("request lost", move, Lost("delete_many", "delete", "request", sends=1)),
            ("read lost", move, Lost("count_documents", "aggregate", sends=1)),
            ("commit's reply lost", move, Lost("commit_transaction", "commitTransaction", collection="")),
            ("commit's replies lost", move, Lost("commit_transaction", "commitTransaction", collection="", times=2)),
            ("commit lost", move, Lost("commit_transaction", "commitTransaction", "request", collection="")),
            ("the marker's reply lost", move, Lost("insert_one", "insert", collection="saferetry_records", sends=1)),
            ("an error swallowed", go_on_after_an_error, Lost("update_one", "update", sends=1)),
            ("findAndModify", find_and_increase, Lost("find_one_and_update", "findAndModify", sends=1)),
            ("insert_many", insert_many, Lost("insert_many", "insert", sends=1)),
        )
    ),
    *(
        Script(f"transaction: {work.__name__}", work, before=before, deliveries=TWICE, options=options)
        for work, before, options in (
            (fail, two_orders, IN_TRANSACTION),
            (fail_after_an_effect, two_orders, {**IN_TRANSACTION, **RETRIED}),
            (fail_before_an_effect, two_orders, {**STORED, **RETRIED}),
            (nested, two_orders, {**IN_TRANSACTION, **RETRIED}),
            (take_id, two_orders, STORED),
            (take_one_then_make_room, unique_numbers, STORED),
            (update_to_taken, unique_numbers, STORED),
            (make_an_index, two_orders, IN_TRANSACTION),
            (make_a_collection, two_orders, IN_TRANSACTION),
            (drop, two_orders, IN_TRANSACTION),
            (drop_the_database, two_orders, IN_TRANSACTION),
            (command, two_orders, IN_TRANSACTION),
            (estimate, two_orders, IN_TRANSACTION),
            (out, two_orders, IN_TRANSACTION),
            (unacknowledged, two_orders, IN_TRANSACTION),
        )
    ),
    *(
        Script(f"{work.__name__}: code {answered.code}", work, answered, before=two_orders)
        for work, answered in (
            (increase, Answered("update_one", "update", 112)),
            (increase, Answered("update_one", "update", 50)),
            (increase, Answered("update_one", "update", 50, times=9)),
            (increase, Answered("update_one", "update", 262, RETRYABLE, sends=2)),
            (increase, Answered("update_one", "update", 13)),
            (insert, Answered("insert_one", "insert", 14)),
            (insert, Answered("insert_one", "insert", 16500)),
            (insert_many, Answered("insert_many", "insert", 11601)),
            (delete, Answered("delete_one", "delete", 24)),
            (find_and_increase, Answered("find_one_and_update", "findAndModify", 8000)),
            (update_many, Answered("update_many", "update", 112)),
            (update_many, Answered("update_many", "update", 13)),
        )
    ),
    *(
        Script(f"transaction: {answered.command}: code {answered.code}", move, answered, before=two_orders, options=STORED)
        for answered in (
            Answered("update_one", "update", 112, TRANSIENT),
            Answered("delete_many", "delete", 50),
            Answered("delete_many", "delete", 251, TRANSIENT),
            Answered("count_documents", "aggregate", 11601),
            Answered("commit_transaction", "commitTransaction", 112, TRANSIENT),
            Answered("commit_transaction", "commitTransaction", 50, UNKNOWN_COMMIT),
            Answered("commit_transaction", "commitTransaction", 13),
        )
    ),
    Script("transaction: another content", insert, deliveries=(KEY, OTHER_CONTENT), options=STORED),
    Script("transaction: another position", insert, deliveries=(KEY, OTHER_POSITION), options=STORED),
    Script("transaction: nothing done", lambda _: 7, deliveries=TWICE, options=STORED),
]
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=str)
