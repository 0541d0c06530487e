"""`except DuplicateKeyError: pass` in a handler works, although MongoDB aborts a transaction with that error."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from bson.objectid import ObjectId
from bson.regex import Regex
from pymongo.errors import DuplicateKeyError, PyMongoError

from saferetry import Failure
from tests.support import CommandLog, app_name, fail_command
from tests.support.driving import done
from tests.transaction.scene import Scene, names

DUPLICATES: dict[str, Callable[[Any], Any]] = {
    "insert_one": lambda c: c.insert_one({"u": 1}),
    "insert_one, _id": lambda c: c.insert_one({"_id": 1}),
    "update_one": lambda c: c.update_one({"_id": 2}, {"$set": {"u": 1}}),
    "update_many": lambda c: c.update_many({"_id": 2}, {"$set": {"u": 1}}),
    "upsert": lambda c: c.update_one({"_id": 9}, {"$set": {"u": 1}}, upsert=True),
    "replace_one": lambda c: c.replace_one({"_id": 2}, {"u": 1}),
    "find_one_and_update": lambda c: c.find_one_and_update({"_id": 2}, {"$set": {"u": 1}}),
    "find_one_and_replace": lambda c: c.find_one_and_replace({"_id": 2}, {"u": 1}),
}


@pytest.fixture
def stocked(scene: Scene) -> Scene:
    """Two documents are there, and no two may have the same `u`."""
    scene.there.c.create_index("u", unique=True)
    scene.there.c.insert_many([{"_id": 1, "u": 1}, {"_id": 2, "u": 2}])
    return scene


@pytest.mark.parametrize("name", DUPLICATES)
async def test_a_duplicate_that_the_handler_passes_over_does_not_stop_the_rest(stocked: Scene, name: str) -> None:
    async def on_order(database: Any) -> None:
        try:
            await done(DUPLICATES[name](database.c))
        except DuplicateKeyError:
            pass
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    await stocked.deliver(on_order)
    assert stocked.runs == 2
    assert stocked.documents() == [{"_id": 1, "u": 1}, {"_id": 2, "u": 2}, {"_id": 7, "u": 7}]
    assert len(stocked.markers()) == 1


@pytest.mark.parametrize("name", DUPLICATES)
async def test_a_duplicate_at_the_end_of_the_handler_is_passed_over(stocked: Scene, name: str) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 7, "u": 7}))
        try:
            await done(DUPLICATES[name](database.c))
        except DuplicateKeyError:
            pass

    await stocked.deliver(on_order)
    assert stocked.documents(_id=7) == [{"_id": 7, "u": 7}]
    assert stocked.documents(u=1) == [{"_id": 1, "u": 1}]


@pytest.mark.parametrize("name", DUPLICATES)
async def test_a_duplicate_that_leaves_the_handler_leaves_the_record(stocked: Scene, name: str) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 7, "u": 7}))
        await done(DUPLICATES[name](database.c))

    await stocked.deliver(on_order, recoverer=recovered.append)
    (failure,) = recovered
    assert isinstance(failure.exception, DuplicateKeyError)
    assert (failure.reason, stocked.runs) == ("failed", 1)
    assert stocked.documents(_id=7) == []
    assert stocked.markers() == []


async def test_a_learned_duplicate_is_raised_as_it_was_and_not_sent(stocked: Scene, log: CommandLog) -> None:
    raised = []

    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"u": 1}))
        except DuplicateKeyError as exc:
            raised.append((exc.code, exc.details and exc.details["keyValue"]))
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    await stocked.deliver(on_order, stocked.client(log=log))
    assert raised == [(11000, {"u": 1})] * 2
    assert names(log)[-4:] == ["insert", "find", "insert", "commitTransaction"]


async def test_several_duplicates_are_passed_over(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        for insert in DUPLICATES.values():
            try:
                await done(insert(database.c))
            except DuplicateKeyError:
                pass
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    await stocked.deliver(on_order)
    assert stocked.runs == len(DUPLICATES) + 1
    assert stocked.documents() == [{"_id": 1, "u": 1}, {"_id": 2, "u": 2}, {"_id": 7, "u": 7}]


async def test_equal_statements_on_two_collections_are_learned_apart(stocked: Scene) -> None:
    stocked.there.other.insert_one({"_id": 1})

    async def on_order(database: Any) -> None:
        for collection in (database.c, database.other, database.third):
            try:
                await done(collection.insert_one({"_id": 1}))
            except DuplicateKeyError:
                pass

    await stocked.deliver(on_order)
    assert stocked.runs == 3
    assert stocked.there.third.count_documents({}) == 1


async def test_the_same_statement_twice_is_passed_over_twice(stocked: Scene) -> None:
    passed = []

    async def on_order(database: Any) -> None:
        for _ in range(2):
            try:
                await done(database.c.insert_one({"u": 1}))
            except DuplicateKeyError:
                passed.append(stocked.runs)
            await done(database.c.update_one({"_id": 2}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order)
    assert passed == [1, 2, 2]
    assert stocked.documents(_id=2) == [{"_id": 2, "u": 2, "n": 2}]


async def test_a_document_that_the_handler_inserts_twice_is_there_once(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        for _ in range(2):
            try:
                await done(database.c.insert_one({"_id": 7, "u": 7}))
            except DuplicateKeyError:
                pass
        await done(database.c.update_one({"_id": 7}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order)
    assert stocked.documents(_id=7) == [{"_id": 7, "u": 7, "n": 1}]


async def test_a_duplicate_that_is_gone_meanwhile_is_inserted(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"_id": 8, "u": 1}))
        except DuplicateKeyError:
            stocked.there.c.delete_one({"u": 1})
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    await stocked.deliver(on_order)
    assert stocked.documents() == [{"_id": 2, "u": 2}, {"_id": 7, "u": 7}, {"_id": 8, "u": 1}]


async def test_a_duplicate_that_the_handler_itself_removes_is_inserted(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"_id": 8, "u": 1}))
        except DuplicateKeyError:
            await done(database.c.delete_one({"u": 1}))
            await done(database.c.insert_one({"_id": 8, "u": 1}))

    await stocked.deliver(on_order)
    assert stocked.documents() == [{"_id": 2, "u": 2}, {"_id": 8, "u": 1}]


async def test_a_handler_may_update_where_the_insert_meets_a_duplicate(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"_id": 1, "u": 1, "n": 1}))
        except DuplicateKeyError:
            await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order)
    await stocked.deliver(on_order)
    assert stocked.documents(_id=1) == [{"_id": 1, "u": 1, "n": 1}]


async def test_a_duplicate_in_a_handler_that_turns_the_drivers_errors_into_its_own_is_passed_over(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        try:
            try:
                await done(database.c.insert_one({"u": 1}))
            except DuplicateKeyError:
                pass
            await done(database.c.insert_one({"_id": 7, "u": 7}))
        except PyMongoError as exc:
            raise LookupError from exc

    await stocked.deliver(on_order)
    assert stocked.documents(_id=7) == [{"_id": 7, "u": 7}]


VOLATILE: dict[str, Callable[[], Any]] = {
    "aware": lambda: dt.datetime.now(dt.UTC),
    "naive": lambda: dt.datetime.now(dt.UTC).replace(tzinfo=None),
    "nested": lambda: {"created": [dt.datetime.now(dt.UTC)]},
}
RANDOM: dict[str, Callable[[], Any]] = {
    "uuid": lambda: uuid.uuid4().hex,
    "object_id": ObjectId,
    "seconds": time.time_ns,
}


@pytest.mark.parametrize("kind", VOLATILE)
@pytest.mark.parametrize("name", ["insert_one", "update_one"])
async def test_a_duplicate_in_a_statement_that_holds_the_time_is_passed_over(stocked: Scene, name: str, kind: str) -> None:
    async def on_order(database: Any) -> None:
        time.sleep(0.002)  # another millisecond in each execution
        try:
            if name == "insert_one":
                await done(database.c.insert_one({"u": 1, "at": VOLATILE[kind]()}))
            else:
                await done(database.c.update_one({"_id": 2}, {"$set": {"u": 1, "at": VOLATILE[kind]()}}))
        except DuplicateKeyError:
            pass
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    await stocked.deliver(on_order)
    assert stocked.runs == 2
    assert stocked.documents(_id=7) == [{"_id": 7, "u": 7}]


@pytest.mark.parametrize("kind", [*VOLATILE, *RANDOM])
async def test_a_duplicate_id_of_a_document_that_differs_each_time_is_passed_over(stocked: Scene, kind: str) -> None:
    async def on_order(database: Any) -> None:
        time.sleep(0.002)
        try:
            await done(database.c.insert_one({"_id": 1, "v": {**VOLATILE, **RANDOM}[kind]()}))
        except DuplicateKeyError:
            pass
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    await stocked.deliver(on_order)
    assert stocked.runs == 2
    assert stocked.documents() == [{"_id": 1, "u": 1}, {"_id": 2, "u": 2}, {"_id": 7, "u": 7}]


@pytest.mark.parametrize("kind", RANDOM)
async def test_a_duplicate_that_cannot_be_recognized_is_raised_soon_and_nothing_is_committed(stocked: Scene, kind: str) -> None:
    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"u": 1, "v": RANDOM[kind]()}))
        except DuplicateKeyError:
            pass
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    with pytest.raises(DuplicateKeyError) as caught:
        await stocked.deliver(on_order)
    assert any("could not be committed" in note for note in caught.value.__notes__)
    assert stocked.runs <= 5
    assert stocked.documents(_id=7) == []
    assert stocked.markers() == []


async def test_a_statement_that_only_looks_like_one_with_a_learned_duplicate_is_sent(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        for document in ({"_id": 1}, {"_id": 1.5}, {"_id": True}, {"_id": "1"}, {"_id": {"_id": 1}}, {"u": 7}):
            try:
                await done(database.other.insert_one(dict(document)))
            except DuplicateKeyError:
                pass

    stocked.there.other.insert_one({"_id": 1})
    await stocked.deliver(on_order)
    assert stocked.there.other.count_documents({}) == 6


async def test_a_document_outside_a_partial_index_is_inserted_beside_a_learned_duplicate(stocked: Scene) -> None:
    stocked.there.partial.create_index("u", unique=True, partialFilterExpression={"active": True})
    stocked.there.partial.insert_one({"_id": 1, "u": 1, "active": True})

    async def on_order(database: Any) -> None:
        for number, active in enumerate((True, False, True, False)):
            try:
                await done(database.partial.insert_one({"u": 1, "active": active, "number": number}))
            except DuplicateKeyError:
                pass

    await stocked.deliver(on_order)
    assert [document["number"] for document in stocked.there.partial.find({"active": False})] == [1, 3]


async def test_a_duplicate_value_that_is_a_pattern_is_looked_up_as_a_value(stocked: Scene) -> None:
    stocked.there.c.insert_many([{"_id": 3, "u": Regex("^x")}, {"_id": 4, "u": "xyz"}])

    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"_id": 8, "u": Regex("^x")}))
        except DuplicateKeyError:
            stocked.there.c.delete_one({"_id": 3})
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    await stocked.deliver(on_order)
    assert [document["_id"] for document in stocked.documents()] == [1, 2, 4, 7, 8]


async def test_duplicates_are_remembered_over_executions_that_end_otherwise(stocked: Scene) -> None:
    name = app_name()

    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"u": 1}))
        except DuplicateKeyError:
            pass
        await done(database.c.update_one({"_id": 2}, {"$inc": {"n": 1}}))

    with fail_command(stocked.admin, app_name=name, commands=["update"], times=2, errorCode=112):
        await stocked.deliver(on_order, stocked.client(appName=name))
    assert stocked.runs == 4
    assert stocked.documents(_id=2) == [{"_id": 2, "u": 2, "n": 1}]


async def test_duplicates_that_occur_at_once_are_passed_over(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        async def insert(number: int) -> None:
            try:
                await done(database.c.insert_one({"_id": number, "u": number}))
            except DuplicateKeyError:
                pass

        await stocked.at_once(insert, 5)

    await stocked.deliver(on_order)
    assert [document["u"] for document in stocked.documents()] == [0, 1, 2, 3, 4]


async def test_a_duplicate_at_the_first_operation_is_passed_over(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"u": 1}))
        except DuplicateKeyError:
            pass
        await done(database.c.insert_one({"_id": 7, "u": 7}))

    await stocked.deliver(on_order, lazily=True)
    assert stocked.documents(_id=7) == [{"_id": 7, "u": 7}]


async def test_a_duplicate_named_in_retry_on_is_executed_again(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": stocked.runs}))

    await stocked.deliver(on_order, retry_on=DuplicateKeyError)
    assert stocked.runs == 3
    assert stocked.documents(_id=3) == [{"_id": 3}]
