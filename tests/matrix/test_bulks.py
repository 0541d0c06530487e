"""Calls of several commands: losses at each of them, failing members, many and large documents, what cannot be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pymongo
import pytest
from pymongo import DeleteOne, IndexModel, InsertOne, ReplaceOne, UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

import saferetry
from saferetry import Outcome
from tests.matrix.rows import MULTI_PLACES, SEVERAL, raw
from tests.matrix.runner import (
    DRIVER_SENDS,
    LOST_TWICE,
    STOCK,
    WRITE_COMMANDS,
    Ground,
    Row,
    addresses,
    answer_of,
    report_of,
    seen,
)
from tests.support import CommandLog, app_name, fail_command
from tests.support.driving import done

MANY = 2_500
OF_SEVERAL_COMMANDS = [row for row in SEVERAL if len(row.commands) > 1 and row.name not in MULTI_PLACES]


def assert_right(run: Any, undisturbed: Any, row: Row, ground: Ground) -> None:
    """Check a run in which the replies of every command were lost twice."""
    assert run.seen == undisturbed
    (view,) = run.writes
    assert view.outcome is not Outcome.UNKNOWN
    if row.loses_errors and ground.server < (5, 0):
        return  # each statement is asked once more, alone
    assert view.sends == ground.log.sends(*WRITE_COMMANDS) == len(row.commands) * (1 + DRIVER_SENDS)
    assert view.calls == len(row.commands) * 2
    assert len(set(addresses(ground.log))) == len(row.commands)


@pytest.mark.parametrize("row", OF_SEVERAL_COMMANDS, ids=str)
async def test_the_replies_of_every_command_lost_twice(row: Row, ground: Ground) -> None:
    run = await ground.each_lost(row)

    assert_right(run, await ground.undisturbed(row), row, ground)


async def test_a_document_deleted_by_nobody_and_then_inserted_is_there(ground: Ground) -> None:
    """Sent again whole, the bulk would delete what it has inserted."""
    row = Row(
        "delete-insert",
        lambda c: c.bulk_write([DeleteOne({"_id": 10}), InsertOne({"_id": 10, "x": 1})]),
        ("delete", "insert"),
    )
    run = await ground.each_lost(row)

    assert ground.left.c.find_one({"_id": 10}) == {"_id": 10, "x": 1}
    assert (run.answer.deleted_count, run.answer.inserted_count) == (0, 1)


# --- many documents: three commands ----------------------------------------------------------------------------------------


def documents(count: int = MANY, duplicate: int | None = None) -> list[dict[str, Any]]:
    """Return documents without `_id`, but for one that is there already."""
    return [{"_id": 1} if place == duplicate else {"x": place} for place in range(count)]


THREE = ("insert",) * 3
MANY_ROWS = (
    Row("insert_many", lambda c: c.insert_many(documents()), THREE),
    Row("insert_many-unordered", lambda c: c.insert_many(documents(), ordered=False), THREE),
    Row("insert_many-generator", lambda c: c.insert_many({"x": place} for place in range(MANY)), THREE),
    Row("insert_many-raw", lambda c: c.insert_many([raw({"_id": place, "x": 1}) for place in range(10, 2510)]), THREE),
    Row("bulk_write", lambda c: c.bulk_write([InsertOne(document) for document in documents()]), THREE),
    Row(
        "bulk_write-updates",
        lambda c: c.bulk_write([UpdateOne({"_id": 1}, {"$inc": {"n": 1}}) for _ in range(MANY)]),
        ("update",) * 3,
    ),
    Row(
        "bulk_write-unordered-upserts",
        lambda c: c.bulk_write(
            [UpdateOne({"_id": place}, {"$inc": {"n": 1}}, upsert=True) for place in range(MANY)], ordered=False
        ),
        ("update",) * 3,
    ),
    Row("insert_many-failing", lambda c: c.insert_many(documents(duplicate=1700)), THREE[:2]),
    Row(
        "insert_many-unordered-failing",
        lambda c: c.insert_many(documents(duplicate=1700), ordered=False),
        THREE,
        loses_errors=True,
    ),
    Row(
        "bulk_write-unordered-failing",
        lambda c: c.bulk_write([InsertOne(document) for document in documents(duplicate=2100)], ordered=False),
        THREE,
        loses_errors=True,
    ),
)


@pytest.mark.parametrize("row", MANY_ROWS, ids=str)
async def test_many_documents_with_losses_at_each_command(row: Row, ground: Ground) -> None:
    run = await ground.each_lost(row)

    assert_right(run, await ground.undisturbed(row), row, ground)


async def test_documents_of_12_mb_are_a_command_each(ground: Ground) -> None:
    size = 12 * 1024 * 1024
    ground.prepare(ground.name, Row("empty", lambda c: None, (), ()))
    client = ground.connect(ground.proxy.uri(), socketTimeoutMS=60_000)
    ground.proxy.arm(mode="close", times=2, command="insert", skip=1)
    async with saferetry.record():
        result = await done(client[ground.name].c.insert_many([{"data": bytes(size)} for _ in range(3)]))

    stored = list(ground.left.c.aggregate([{"$project": {"size": {"$binarySize": "$data"}}}]))
    assert stored == [{"_id": made, "size": size} for made in result.inserted_ids]
    assert ground.log.sends("insert") == 3 + DRIVER_SENDS
    assert len(set(addresses(ground.log))) == 3


async def test_errors_keep_their_places_over_many_commands(ground: Ground) -> None:
    """The places in the user's list, not those in the command; and in order, as the driver sorts them."""
    row = Row(
        "places",
        lambda c: c.bulk_write(
            [
                UpdateOne({"_id": 2}, {"$inc": {"tags": 1}}),
                *[InsertOne({"x": place}) for place in range(1500)],
                InsertOne({"_id": 1}),
                UpdateOne({"sku": 7}, {"$inc": {"n": 1}}, upsert=True),
                DeleteOne({"_id": 3}),
                ReplaceOne({"sku": 8}, {"sku": 8}, upsert=True),
            ],
            ordered=False,
        ),
        ("insert", "insert", "update", "delete"),
    )
    run = await ground.disturbed(row, LOST_TWICE)

    assert isinstance(run.answer, BulkWriteError)
    assert [entry["index"] for entry in run.answer.details["writeErrors"]] == [0, 1501]
    assert [entry["index"] for entry in run.answer.details["upserted"]] == [1502, 1504]
    assert run.seen == await ground.undisturbed(row)


async def test_an_error_that_leaves_half_way_tells_how_much_was_done(ground: Ground) -> None:
    ground.prepare(ground.name, MANY_ROWS[0])
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=100, command="insert", skip=1)
    async with saferetry.record() as record:
        exc = await answer_of(lambda: client[ground.name].c.insert_many(documents()))

    assert report_of(exc).decision == "attempts"
    assert report_of(exc).done == 1_000
    assert record.writes[0].outcome is Outcome.UNKNOWN
    assert ground.left.c.count_documents({"x": {"$exists": True}}) == 2_000
    assert len(set(addresses(ground.log))) == 2


@pytest.mark.parametrize(
    "row",
    [
        Row("insert_one", lambda c: c.insert_one({"x": 1}), ("insert",)),
        Row("update_one", lambda c: c.update_one({"_id": 1}, {"$inc": {"n": 1}}), ("update",)),
        Row("insert_many", lambda c: c.insert_many(documents()), THREE),
        Row("update_many", lambda c: c.update_many({}, {"$inc": {"n": 1}}), ("update",)),
        next(row for row in SEVERAL if row.name == "bulk_write-ordered-mixed"),
        next(row for row in SEVERAL if row.name == "bulk_write-unordered-failing"),
    ],
    ids=str,
)
async def test_a_write_concern_error_is_what_it_is_with_plain_pymongo(row: Row, ground: Ground) -> None:
    """Applied, durability unknown; a bulk goes on and tells at its end."""
    name, plain_name = app_name(), app_name()
    concern = {"code": 64, "errmsg": "waiting for replication timed out"}
    ground.prepare(ground.name, row)
    ground.prepare(ground.name + "_plain", row)
    client = ground.connect(ground.proxy.uri(), appName=name)
    with fail_command(ground.admin, app_name=name, commands=row.commands[:1], times=1, writeConcernError=concern):
        async with saferetry.record() as record:
            answer = await answer_of(lambda: row.call(client[ground.name].c))
    with (
        pymongo.MongoClient[dict[str, Any]](ground.mongod.uri, appName=plain_name) as plain,
        fail_command(ground.admin, app_name=plain_name, commands=row.commands[:1], times=1, writeConcernError=concern),
    ):
        plain_answer = await answer_of(lambda: row.call(plain[ground.name + "_plain"].c))

    assert isinstance(answer, OperationFailure)
    assert seen(ground.left, answer) == seen(ground.admin[ground.name + "_plain"], plain_answer)
    assert record.writes[0].outcome is Outcome.APPLIED
    assert ground.log.sends(*WRITE_COMMANDS) == len(row.commands)


async def test_a_server_that_forgot_the_errors_is_asked_although_every_second_reply_is_lost(ground: Ground) -> None:
    """4.4 answers the resend of an unordered insert without its writeErrors; newer ones do not forget."""
    row = Row(
        "forgotten",
        lambda c: c.insert_many([{"x": 1}, {"_id": 1}, {"x": 3}, {"_id": 2}, {"x": 5}], ordered=False),
        ("insert",),
    )
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=100, command="insert", skip=-1, every=2)  # the first, the third, ...
    async with saferetry.record():
        answer = await answer_of(lambda: row.call(client[ground.name].c))

    assert ground.proxy.hits >= 1
    assert seen(ground.left, answer) == await ground.undisturbed(row)


# --- what cannot be sent ---------------------------------------------------------------------------------------------------

TOO_LARGE = bytes(17 * 1024 * 1024)
UNSENDABLE: dict[str, Callable[[Any], Any]] = {
    "insert_one-no_bson": lambda c: c.insert_one({"x": object()}),
    "insert_one-too_large": lambda c: c.insert_one({"x": TOO_LARGE}),
    "insert_one-too_great": lambda c: c.insert_one({"x": 2**70}),
    "update_one-no_bson": lambda c: c.update_one({"_id": 1}, {"$set": {"x": object()}}),
    "find_one_and_update-no_bson": lambda c: c.find_one_and_update({"_id": 1}, {"$set": {"x": object()}}),
    "update_many-no_bson": lambda c: c.update_many({"_id": 1}, {"$set": {"x": object()}}),
    "insert_many-no_bson": lambda c: c.insert_many([{"x": 1}, {"x": object()}, {"x": 3}]),
    "insert_many-unordered-no_bson": lambda c: c.insert_many([{"x": 1}, {"x": object()}], ordered=False),
    "insert_many-too_great": lambda c: c.insert_many([{"x": 1}, {"x": 2**70}, {"x": 3}]),
    "insert_many-in_the_third_command": lambda c: c.insert_many([*documents(2_200), {"x": object()}, {"x": 3}]),
    "bulk_write-no_bson": lambda c: c.bulk_write([InsertOne({"x": 1}), InsertOne({"x": object()})]),
    "bulk_write-update-no_bson": lambda c: c.bulk_write(
        [UpdateOne({"_id": 1}, {"$inc": {"n": 1}}), UpdateOne({"_id": 1}, {"$set": {"x": object()}})]
    ),
    "bulk_write-filter-no_bson": lambda c: c.bulk_write([DeleteOne({"_id": 1}), DeleteOne({"x": object()})]),
}


async def run_unsendable(ground: Ground, call: Callable[[Any], Any]) -> tuple[Any, int, Any, int]:
    """Return a guarded client's answer and number of sends, and a plain one's."""
    row = Row("unsendable", call, ())
    for name in (ground.name, ground.name + "_plain"):
        ground.prepare(name, row)
    client = ground.connect(ground.proxy.uri())
    async with saferetry.record() as record:
        answer = await answer_of(lambda: call(client[ground.name].c))
        assert all(view.outcome in (Outcome.NOT_APPLIED, Outcome.NOT_SENT) for view in record.writes)
    plain_log = CommandLog()
    with pymongo.MongoClient[dict[str, Any]](ground.mongod.uri, event_listeners=[plain_log]) as plain:
        plain_answer = await answer_of(lambda: call(plain[ground.name + "_plain"].c))
    return answer, ground.log.sends(*WRITE_COMMANDS), plain_answer, plain_log.sends(*WRITE_COMMANDS)


@pytest.mark.parametrize("name", UNSENDABLE)
async def test_what_plain_pymongo_does_not_send_is_not_sent(name: str, ground: Ground) -> None:
    answer, sends, plain_answer, plain_sends = await run_unsendable(ground, UNSENDABLE[name])

    assert type(answer) is type(plain_answer)
    assert isinstance(answer, Exception)
    assert (sends, plain_sends) == (0, 0)
    assert ground.documents() == list(STOCK)


REFUSED_WHOLE: dict[str, Callable[[Any], Any]] = {
    "insert_many": lambda c: c.insert_many([{"x": 1}, {"x": TOO_LARGE}, {"x": 3}]),
    "insert_many-unordered": lambda c: c.insert_many([{"x": 1}, {"x": TOO_LARGE}, {"x": 3}], ordered=False),
    "insert_many-in_the_third_command": lambda c: c.insert_many([*documents(2_200), {"x": TOO_LARGE}]),
    "bulk_write-update": lambda c: c.bulk_write(
        [UpdateOne({"_id": 1}, {"$inc": {"n": 1}}), UpdateOne({"_id": 1}, {"$set": {"x": TOO_LARGE}})]
    ),
}


@pytest.mark.parametrize("name", REFUSED_WHOLE)
async def test_a_document_too_large_is_sent_and_refused_with_its_command_as_by_plain_pymongo(name: str, ground: Ground) -> None:
    answer, sends, plain_answer, plain_sends = await run_unsendable(ground, REFUSED_WHOLE[name])

    assert (type(answer), answer.code) == (type(plain_answer), plain_answer.code)
    assert (sends, plain_sends) == (1, 1)
    assert ground.documents() == list(STOCK)


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_document_a_little_too_large_fails_alone(ordered: bool, ground: Ground) -> None:
    """The server lets its own fields pass, and looks at the document itself."""
    little = bytes(16 * 1024 * 1024 + 1024)
    row = Row("little", lambda c: c.insert_many([{"x": 1}, {"x": little}, {"x": 3}], ordered=ordered), ("insert", "insert"))
    run = await ground.disturbed(row, LOST_TWICE)

    assert run.seen == await ground.undisturbed(row)
    assert [entry["index"] for entry in run.answer.details["writeErrors"]] == [1]


async def test_a_bulk_with_a_later_command_that_cannot_be_sent_is_not_begun(ground: Ground) -> None:
    """Plain PyMongo sends the first command and finds out at the second."""
    answer, sends, plain_answer, plain_sends = await run_unsendable(
        ground, lambda c: c.bulk_write([UpdateOne({"_id": 1}, {"$inc": {"n": 1}}), InsertOne({"x": object()})])
    )

    assert type(answer) is type(plain_answer)
    assert (sends, plain_sends) == (0, 1)
    assert ground.documents() == list(STOCK)


def failing() -> Iterator[dict[str, Any]]:
    """Fail after the first document, as a generator that reads a broken file may."""
    yield {"x": 1}
    raise ZeroDivisionError


NO_DOCUMENT: Any = 2
WRONG: dict[str, Callable[[Any], Any]] = {
    "insert_one-number": lambda c: c.insert_one(1),
    "insert_one-without": lambda c: c.insert_one(),
    "insert_many-empty": lambda c: c.insert_many([]),
    "insert_many-empty_generator": lambda c: c.insert_many(iter(())),
    "insert_many-document": lambda c: c.insert_many({"x": 1}),
    "insert_many-numbers": lambda c: c.insert_many([{"x": 1}, 2]),
    "insert_many-failing_generator": lambda c: c.insert_many(failing()),
    "insert_many-unchangeable": lambda c: c.insert_many([{"x": 1}, MappingProxyType({"x": 2})]),
    "insert_many-none": lambda c: c.insert_many(None),
    "update_one-no_operator": lambda c: c.update_one({"_id": 1}, {"n": 1}),
    "update_one-filter": lambda c: c.update_one(1, {"$set": {"n": 1}}),
    "replace_one-operator": lambda c: c.replace_one({"_id": 1}, {"$set": {"n": 1}}),
    "update_one-unknown_option": lambda c: c.update_one({"_id": 1}, {"$inc": {"n": 1}}, wrong=True),
    "find_one_and_update-no_operator": lambda c: c.find_one_and_update({"_id": 1}, {"n": 1}),
    "bulk_write-empty": lambda c: c.bulk_write([]),
    "bulk_write-numbers": lambda c: c.bulk_write([1]),
    "bulk_write-document": lambda c: c.bulk_write([InsertOne({"x": 1}), {"x": 2}]),
    "bulk_write-one": lambda c: c.bulk_write(InsertOne({"x": 1})),
    "bulk_write-generator": lambda c: c.bulk_write(InsertOne({"x": x}) for x in range(3)),
    "create_indexes-generator": lambda c: c.create_indexes(IndexModel("x") for _ in range(3)),
    "aggregate-generator": lambda c: c.aggregate(stage for stage in [{"$out": "copy"}]),
    "update_one-array_filters": lambda c: c.update_one({"_id": 1}, {"$inc": {"a.$[e]": 1}}, array_filters=iter([{"e": 1}])),
    "insert_many-empty_tuple": lambda c: c.insert_many(()),
    "insert_many-text": lambda c: c.insert_many("text"),
    "bulk_write-no_operator": lambda c: c.bulk_write([InsertOne({"x": 1}), UpdateOne({"_id": 1}, {"n": 1})]),
    "bulk_write-insert_of_number": lambda c: c.bulk_write([InsertOne({"x": 1}), InsertOne(NO_DOCUMENT)]),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_arguments_get_the_drivers_own_error(name: str, ground: Ground) -> None:
    answer, sends, plain_answer, plain_sends = await run_unsendable(ground, WRONG[name])

    assert isinstance(answer, Exception)
    said, wanted = (str(exc).replace("Async", "") for exc in (answer, plain_answer))
    assert (type(answer), said) == (type(plain_answer), wanted)
    assert (sends, plain_sends) == (0, 0)


class Numbers:
    """Give new documents each time it is read, as a query of an object mapper may."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"x": place} for place in range(3))


@pytest.mark.parametrize("ordered", [True, False])
async def test_documents_that_are_new_each_time_are_read_once(ordered: bool, ground: Ground) -> None:
    row = Row("iterable", lambda c: c.insert_many(Numbers(), ordered=ordered), ("insert",))
    run = await ground.disturbed(row, LOST_TWICE)

    stored = {document["x"]: document["_id"] for document in ground.documents() if "x" in document}
    assert run.answer.inserted_ids == [stored[place] for place in range(3)]
