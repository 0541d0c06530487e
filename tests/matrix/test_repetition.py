"""The user's own repetition of a call inside a record, as people's retry loops make it: the same write, or another one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from bson.codec_options import CodecOptions
from pymongo import DeleteOne, IndexModel, InsertOne, ReturnDocument, UpdateOne
from pymongo.collation import Collation
from pymongo.errors import AutoReconnect
from pymongo.write_concern import WriteConcern

import saferetry
from saferetry import Outcome, Settings
from saferetry.errors import RetryRefusedError
from tests.matrix.rows import NOT_ADDRESSABLE
from tests.matrix.runner import DRIVER_SENDS, WRITE_COMMANDS, Fault, Ground, Row, addresses, answer_of, report_of, seen
from tests.support.driving import done

ONCE = Settings(max_attempts=1)


@dataclass(frozen=True)
class Call:
    """A call whose arguments can be made anew, or used again."""

    command: str
    arguments: Callable[[], tuple[Any, ...]]
    make: Callable[..., Any]


CALLS: dict[str, Call] = {
    "insert_one": Call("insert", lambda: ({"x": 1},), lambda c, document: c.insert_one(document)),
    "insert_one-own_id": Call("insert", lambda: ({"_id": 10},), lambda c, document: c.insert_one(document)),
    "insert_many": Call("insert", lambda: ([{"x": 1}, {"x": 2}],), lambda c, documents: c.insert_many(documents)),
    "insert_many-unordered": Call(
        "insert", lambda: ([{"x": 1}, {"_id": 10}],), lambda c, documents: c.insert_many(documents, ordered=False)
    ),
    "bulk_write": Call(
        "insert",
        lambda: (
            [
                UpdateOne({"_id": 2}, {"$inc": {"n": 1}}),
                InsertOne({"x": 1}),
                InsertOne({"x": 2}),
                DeleteOne({"_id": 3}),
            ],
        ),
        lambda c, requests: c.bulk_write(requests),
    ),
    "update_one": Call("update", lambda: ({"_id": 1}, {"$inc": {"n": 1}}), lambda c, *arguments: c.update_one(*arguments)),
    "update_one-upsert": Call(
        "update", lambda: ({"sku": 7}, {"$inc": {"n": 1}}), lambda c, *arguments: c.update_one(*arguments, upsert=True)
    ),
    "find_one_and_update": Call(
        "findAndModify",
        lambda: ({"_id": 1}, {"$inc": {"n": 1}}),
        lambda c, *arguments: c.find_one_and_update(*arguments, return_document=ReturnDocument.AFTER),
    ),
}


@pytest.mark.parametrize("mode", ["close", "cut"])
@pytest.mark.parametrize("arguments", ["fresh", "same"])
@pytest.mark.parametrize("name", CALLS)
async def test_an_equal_next_call_after_an_unknown_outcome_is_the_same_write(
    name: str, arguments: str, mode: Any, ground: Ground
) -> None:
    call = CALLS[name]
    same = call.arguments()

    def make(collection: Any) -> Any:
        return call.make(collection, *(same if arguments == "same" else call.arguments()))

    row = Row(name, lambda c: call.make(c, *copy.deepcopy(call.arguments())), (call.command,))
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode=mode, times=DRIVER_SENDS, command=call.command)
    async with saferetry.record() as record:
        exc = await answer_of(lambda: make(client[ground.name].c))
        assert type(exc) is AutoReconnect
        assert report_of(exc).decision == "attempts"
        assert [view.outcome for view in record.writes] == [Outcome.UNKNOWN]
        answer = await answer_of(lambda: make(client[ground.name].c))

    assert seen(ground.left, answer) == await ground.undisturbed(row)
    assert len(set(addresses(ground.log, call.command))) == 1
    assert ground.log.sends(call.command) == DRIVER_SENDS + 1
    (view,) = record.writes
    assert view.outcome is Outcome.APPLIED
    assert view.sends == ground.log.sends(*WRITE_COMMANDS)
    made = [document["_id"] for command in ground.log.commands("insert") for document in command["documents"]]
    assert len(set(made)) * (DRIVER_SENDS + 1) == len(made)


async def test_a_loop_of_three_attempts_around_three_intended_writes_makes_three_documents(ground: Ground) -> None:
    """The third write equals the ones before it and is none of them."""
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    collection = client[ground.name].c

    async def insert_with_a_loop() -> None:
        for attempt in range(3):
            try:
                await done(collection.insert_one({"x": 1}))
            except AutoReconnect:
                if attempt == 2:
                    raise
            else:
                return

    async with saferetry.record() as record:
        for _ in range(3):
            ground.proxy.arm(mode="close", times=2 * DRIVER_SENDS, command="insert")
            await insert_with_a_loop()

    assert [document["x"] for document in ground.documents()] == [1, 1, 1]
    assert ground.log.sends("insert") == 3 * (2 * DRIVER_SENDS + 1)
    assert len(set(addresses(ground.log))) == 3
    assert [view.outcome for view in record.writes] == [Outcome.APPLIED] * 3


async def test_the_second_of_two_equal_writes_without_a_failure_is_another_write(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri())
    async with saferetry.record():
        for _ in range(2):
            await done(client[ground.name].c.insert_one({"x": 1}))

    assert len(ground.documents()) == 2


INSERT_X = CALLS["insert_one"]
OTHER_CALLS: dict[str, Callable[[Any], Any]] = {
    "other_document": lambda c: c.insert_one({"x": 2}),
    "more_fields": lambda c: c.insert_one({"x": 1, "y": None}),
    "other_type": lambda c: c.insert_one({"x": 1.0}),
    "own_id": lambda c: c.insert_one({"_id": 10, "x": 1}),
    "other_option": lambda c: c.insert_one({"x": 1}, bypass_document_validation=True),
    "other_method": lambda c: c.insert_many([{"x": 1}]),
    "other_collection": lambda c: c.other.insert_one({"x": 1}),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
async def test_an_unequal_next_call_is_another_write(name: str, ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command="insert")
    collection = client[ground.name].c
    async with saferetry.record() as record:
        first = await answer_of(lambda: collection.insert_one({"x": 1}))
        await done(OTHER_CALLS[name](collection))

    assert type(first) is AutoReconnect
    assert [view.outcome for view in record.writes] == [Outcome.UNKNOWN, Outcome.APPLIED]
    assert len(set(addresses(ground.log))) == 2
    made = {document["_id"] for command in ground.log.commands("insert") for document in command["documents"]}
    assert len(made) == 2
    assert len(ground.documents()) + ground.left["c.other"].count_documents({}) == 2


async def test_an_equal_call_that_is_not_the_next_write_is_another_write(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command="insert")
    collection = client[ground.name].c
    async with saferetry.record():
        await answer_of(lambda: collection.insert_one({"x": 1}))
        await done(collection.update_one({"_id": 99}, {"$set": {"n": 1}}))
        await done(collection.insert_one({"x": 1}))

    assert len(ground.documents()) == 2


async def test_reads_in_between_do_not_make_it_another_write(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command="insert")
    collection = client[ground.name].c
    async with saferetry.record():
        await answer_of(lambda: collection.insert_one({"x": 1}))
        await done(collection.find_one({"x": 1}))
        await done(collection.count_documents({}))
        await done(collection.insert_one({"x": 1}))

    assert len(ground.documents()) == 1


async def test_the_repetition_may_be_made_on_another_object_of_the_collection(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command="insert")
    async with saferetry.record():
        await answer_of(lambda: client[ground.name]["c"].insert_one({"x": 1}))
        await done(client.get_database(ground.name).get_collection("c").insert_one({"x": 1}))

    assert len(ground.documents()) == 1


async def test_in_a_new_record_it_is_another_write(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command="insert")
    for _ in range(2):
        async with saferetry.record():
            await answer_of(lambda: client[ground.name].c.insert_one({"x": 1}))

    assert len(ground.documents()) == 2
    assert len(set(addresses(ground.log))) == 2


async def test_a_definite_error_is_not_repeated_but_made_anew(ground: Ground) -> None:
    """After a duplicate key nothing is unknown: the next equal call is a write of its own."""
    row = Row("duplicate", lambda c: c.insert_one({"n": 1}), ("insert",), unique="n")
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri())
    async with saferetry.record() as record:
        await answer_of(lambda: row.call(client[ground.name].c))
        ground.left.c.delete_one({"_id": 1})
        await done(row.call(client[ground.name].c))

    assert [view.outcome for view in record.writes] == [Outcome.NOT_APPLIED, Outcome.APPLIED]
    assert len(set(addresses(ground.log))) == 2


async def test_only_what_is_not_acknowledged_of_a_bulk_is_repeated(ground: Ground) -> None:
    requests = [
        InsertOne({"x": 1}),
        UpdateOne({"_id": 1}, {"$inc": {"n": 1}}),
        DeleteOne({"x": 1}),
    ]
    row = Row("bulk", lambda c: c.bulk_write(copy.deepcopy(requests)), ("insert", "update", "delete"))
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command="update")
    async with saferetry.record():
        exc = await answer_of(lambda: client[ground.name].c.bulk_write(requests))
        assert report_of(exc).done == 1
        answer = await answer_of(lambda: client[ground.name].c.bulk_write(requests))

    assert seen(ground.left, answer) == await ground.undisturbed(row)
    assert [ground.log.sends(name) for name in ("insert", "update", "delete")] == [1, DRIVER_SENDS + 1, 1]


# --- what must not run twice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in NOT_ADDRESSABLE if row.name != "create_indexes"], ids=str)
async def test_a_repetition_of_what_has_no_address_is_refused_and_not_sent(row: Row, ground: Ground) -> None:
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=1, command=row.commands[0])
    async with saferetry.record() as record:
        first = await answer_of(lambda: row.call(client[ground.name].c))
        second: Any = await answer_of(lambda: row.call(client[ground.name].c))

    assert type(first) is AutoReconnect
    assert type(second) is RetryRefusedError
    assert second.__cause__ is first
    assert [view.outcome for view in second.writes] == [Outcome.UNKNOWN]
    assert ground.log.sends(*row.commands) == 1
    assert [view.outcome for view in record.writes] == [Outcome.UNKNOWN]


WITHOUT_BSON: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "create_indexes": ("createIndexes", lambda c: c.create_indexes([IndexModel("n")])),
    "drop_collection": ("drop", lambda c: c.database.drop_collection(c)),
    "drop_database": ("dropDatabase", lambda c: c.database.client.drop_database(c.database)),
    "create_collection": (
        "create",
        lambda c: c.database.create_collection("made", write_concern=WriteConcern(w=1), check_exists=False),
    ),
    "command": (
        "update",
        lambda c: c.database.command(
            {"update": "c", "updates": [{"q": {"_id": 1}, "u": {"$inc": {"n": 1}}}]}, codec_options=CodecOptions()
        ),
    ),
    "update_many": (
        "update",
        lambda c: c.update_many({}, {"$inc": {"n": 1}}, collation=Collation("en"), hint="_id_", array_filters=None),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_BSON)
async def test_objects_without_a_bson_form_among_the_arguments_do_not_let_it_through(name: str, ground: Ground) -> None:
    command, call = WITHOUT_BSON[name]
    ground.prepare(ground.name, Row("empty", lambda c: None, ()))
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=1, command=command)
    async with saferetry.record():
        answers = [await answer_of(lambda: call(client[ground.name].c)) for _ in range(2)]

    assert [type(answer) for answer in answers] == [AutoReconnect, RetryRefusedError]
    assert ground.log.sends(command) == 1


async def test_however_often_it_is_repeated(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=1, command="update")
    async with saferetry.record():
        answers = [await answer_of(lambda: client[ground.name].c.update_many({}, {"$inc": {"n": 1}})) for _ in range(4)]

    assert [type(answer) for answer in answers] == [AutoReconnect] + [RetryRefusedError] * 3
    assert ground.log.sends("update") == 1


async def test_inside_repeatable_it_is_sent(ground: Ground) -> None:
    ground.prepare(ground.name, Row("empty", lambda c: None, ()))
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=1, command="update")
    async with saferetry.record() as record:
        first = await answer_of(lambda: client[ground.name].c.update_many({}, {"$set": {"n": 7}}))
        with saferetry.repeatable():
            result = await done(client[ground.name].c.update_many({}, {"$set": {"n": 7}}))

    assert type(first) is AutoReconnect
    assert result.matched_count == 3
    assert ground.log.sends("update") == 2
    assert [view.outcome for view in record.writes] == [Outcome.APPLIED]


async def test_an_unequal_update_many_is_another_write_and_sent(ground: Ground) -> None:
    ground.prepare(ground.name, Row("empty", lambda c: None, ()))
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=1, command="update")
    async with saferetry.record() as record:
        await answer_of(lambda: client[ground.name].c.update_many({}, {"$inc": {"n": 1}}))
        result = await done(client[ground.name].c.update_many({}, {"$inc": {"n": 2}}))

    assert result.modified_count == 3
    assert [view.outcome for view in record.writes] == [Outcome.UNKNOWN, Outcome.APPLIED]


async def test_a_repetition_that_is_lost_too_stays_the_same_write(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode="close", times=3 * DRIVER_SENDS, command="insert")
    async with saferetry.record() as record:
        answers = [await answer_of(lambda: client[ground.name].c.insert_one({"x": 1})) for _ in range(4)]

    assert [type(answer) for answer in answers[:3]] == [AutoReconnect] * 3
    assert [document["_id"] for document in ground.documents()] == [answers[3].inserted_id]
    assert len(set(addresses(ground.log))) == 1
    assert [view.outcome for view in record.writes] == [Outcome.APPLIED]


async def test_without_numbers_an_insert_is_repeated_through_its_id(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri(retryWrites=False), settings=ONCE)
    ground.proxy.arm(mode="close", times=1, command="insert")
    async with saferetry.record():
        first = await answer_of(lambda: client[ground.name].c.insert_one({"x": 1}))
        result = await done(client[ground.name].c.insert_one({"x": 1}))

    assert type(first) is AutoReconnect
    assert [document["_id"] for document in ground.documents()] == [result.inserted_id]


async def test_without_numbers_an_update_is_refused(ground: Ground) -> None:
    run_once = Row("inc", lambda c: c.update_one({"_id": 1}, {"$inc": {"n": 1}}), ("update",))
    run = await ground.disturbed(run_once, Fault("close", 1), retryWrites=False)
    assert report_of(run.answer).decision == "refused"
    client = ground.connect(ground.proxy.uri(retryWrites=False))
    ground.proxy.arm(mode="close", times=1, command="update")
    async with saferetry.record():
        answers = [await answer_of(lambda: run_once.call(client[ground.name].c)) for _ in range(2)]

    assert [type(answer) for answer in answers] == [AutoReconnect, RetryRefusedError]
    assert ground.log.sends("update") == 2  # one in each record
