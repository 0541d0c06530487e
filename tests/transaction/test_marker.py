"""The marker that is committed with a record's effects: whoever finds it does not do the record again."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId

from saferetry import Failure, RecordKey, current_record
from saferetry.errors import ConfigurationError, KeyReusedError, TakenOverError
from tests.support import CommandLog, failpoint
from tests.support.driving import done, quick
from tests.support.older import BLOCKS_THE_EVENT_LOOP
from tests.transaction.scene import KEY, Scene, names, only_async


async def test_a_redelivered_record_is_skipped_and_its_handler_does_not_run(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> str:
        await done(database.c.insert_one({}))
        return "done"

    assert await scene.deliver(on_order) == "done"
    assert await scene.deliver(on_order, scene.client(log=log)) is None
    assert scene.runs == 1
    assert len(scene.documents()) == len(scene.markers()) == 1
    assert names(log) == ["insert", "find"]


async def test_a_redelivered_record_is_skipped_by_the_same_client(scene: Scene) -> None:
    client = scene.client()

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    for _ in range(3):
        await scene.deliver(on_order, client)
    assert scene.runs == len(scene.documents()) == 1


async def test_the_marker_is_asked_for_with_majority_from_the_primary(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    await scene.deliver(on_order)
    await scene.deliver(on_order, scene.client(log=log, readPreference="secondaryPreferred", readConcernLevel="local"))
    (question,) = log.commands("find")
    assert question["readConcern"]["level"] == "majority"
    assert question.get("$readPreference", {"mode": "primary"})["mode"] in ("primary", "primaryPreferred")


async def test_a_handler_without_client_is_left_at_its_first_operation(scene: Scene) -> None:
    reached: list[Any] = []

    async def on_order(database: Any) -> str:
        reached.append("before")
        await done(database.c.insert_one({}))
        reached.append("after")
        return "done"

    assert await scene.deliver(on_order, lazily=True) == "done"
    assert await scene.deliver(on_order, lazily=True) is None
    assert reached == ["before", "after", "before"]
    assert len(scene.documents()) == 1


FIRST_OPERATIONS: Mapping[str, Callable[[Any], Any]] = {
    "find_one": lambda c: c.find_one({}),
    "update_many": lambda c: c.update_many({}, {"$inc": {"n": 1}}),
    "bulk_write": lambda c: c.bulk_write([]),
    "count_documents": lambda c: c.count_documents({}),
    "aggregate": lambda c: c.aggregate([]),
}


@pytest.mark.parametrize("name", FIRST_OPERATIONS)
async def test_a_handler_without_client_is_left_at_its_first_operation_whatever_it_is(scene: Scene, name: str) -> None:
    reached: list[Any] = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}) if not reached else FIRST_OPERATIONS[name](database.c))
        reached.append("after")

    await scene.deliver(on_order, lazily=True)
    await scene.deliver(on_order, lazily=True)
    assert reached == ["after"]


async def test_a_handler_that_catches_every_exception_is_left_all_the_same(scene: Scene) -> None:
    reached: list[Any] = []

    async def on_order(database: Any) -> str:
        try:
            await done(database.c.insert_one({}))
        except Exception:  # noqa: BLE001 - that is the test
            reached.append("caught")
        reached.append("after")
        return "done"

    await scene.deliver(on_order, lazily=True)
    assert await scene.deliver(on_order, lazily=True) is None
    assert reached == ["after"]


async def test_a_handler_that_catches_everything_writes_nothing(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> str:
        for _ in range(3):
            try:
                await done(database.c.insert_one({}))
            except BaseException:  # noqa: BLE001, S110 - that is the test
                pass
        return "done"

    assert await scene.deliver(on_order, lazily=True) == "done"
    assert await scene.deliver(on_order, scene.client(log=log), lazily=True) is None
    assert len(scene.documents()) == 3
    assert names(log) == ["insert", "find"]


async def test_a_handler_that_turns_everything_into_an_error_of_its_own_is_left_without_one(scene: Scene) -> None:
    async def on_order(database: Any) -> str:
        try:
            await done(database.c.insert_one({}))
        except BaseException as exc:
            raise LookupError from exc
        return "done"

    assert await scene.deliver(on_order, lazily=True) == "done"
    assert await scene.deliver(on_order, lazily=True) is None


@only_async
async def test_tasks_of_a_group_are_left_at_their_first_operation(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(database.c.insert_one({"_id": number}))

    await scene.deliver(on_order, lazily=True)
    assert await scene.deliver(on_order, lazily=True) is None
    assert len(scene.documents()) == 3


async def test_threads_or_tasks_are_left_at_their_first_operation(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        async def insert(number: int) -> None:
            await done(database.c.insert_one({"_id": number}))

        await scene.at_once(insert, 4)

    await scene.deliver(on_order, lazily=True)
    await scene.deliver(on_order, lazily=True)
    assert len(scene.documents()) == 4


async def test_the_record_of_a_skipped_handler_says_so(scene: Scene) -> None:
    skipped = []

    async def on_order(database: Any) -> None:
        record = current_record()
        assert record is not None
        try:
            await done(database.c.insert_one({}))
        finally:
            skipped.append(record.skipped)

    await scene.deliver(on_order, lazily=True)
    await scene.deliver(on_order, lazily=True)
    assert skipped == [False, True]


async def test_a_recoverer_is_not_called_for_a_record_that_is_skipped(scene: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    for lazily in (False, False, True):
        await scene.deliver(on_order, lazily=lazily, recoverer=recovered.append)
    assert recovered == []


OTHERS: Mapping[str, RecordKey] = {
    "stream": replace(KEY, stream="other"),
    "partition": replace(KEY, partition=1),
    "position": replace(KEY, position=8),
    "no position": replace(KEY, position=None),
    "a position in the same slot": replace(KEY, position=7 + 256),
    "group": replace(KEY, group="other"),
    "epoch": replace(KEY, epoch="2"),
}


@pytest.mark.parametrize("part", OTHERS)
async def test_another_record_is_not_skipped(scene: Scene, part: str) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    for key in (KEY, OTHERS[part], KEY, OTHERS[part]):
        await scene.deliver(on_order, key=key)
    assert scene.runs == len(scene.documents()) == len(scene.markers()) == 2


async def test_another_handler_does_the_same_record_too(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    for name in ("orders", "audit", "orders"):
        await scene.deliver(on_order, name=name)
    assert len(scene.documents()) == 2


async def test_a_record_without_position_is_done_once(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    for key in ("job-1", "job-2", "job-1", ("jobs", 3), ("jobs", 3)):
        await scene.deliver(on_order, key=key, digest=lambda _: b"x")
    assert len(scene.documents()) == 3


async def test_two_records_with_texts_that_look_alike_are_two(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    for key in (
        RecordKey("a/b", group="c", digest=b"x"),
        RecordKey("b", group="c/a", digest=b"x"),
        RecordKey("a", group="c", epoch="b", digest=b"x"),
    ):
        await scene.deliver(on_order, key=key)
    assert len(scene.documents()) == 3


# stored results

RESULTS: Mapping[str, Any] = {
    "None": None,
    "a number": 7,
    "a large number": 2**62,
    "a text": "ü",
    "a list": [1, [2], {"a": None}],
    "a document": {"a": {"b": [1.5, True]}},
    "an ObjectId": ObjectId("0123456789ab0123456789ab"),
    "a decimal": Decimal128("1.10"),
    "bytes": b"\0\1",
    "a moment": dt.datetime(2026, 1, 2, 3, 4, 5, 678_000),  # noqa: DTZ001 - as MongoDB returns it
}


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("lazily", [False, True], ids=["with_client", "without_client"])
async def test_a_stored_result_is_returned_when_the_record_is_redelivered(scene: Scene, kind: str, lazily: bool) -> None:
    async def on_order(database: Any) -> Any:
        await done(database.c.insert_one({}))
        return RESULTS[kind]

    assert await scene.deliver(on_order, store_result=True, lazily=lazily) == RESULTS[kind]
    assert await scene.deliver(on_order, store_result=True, lazily=lazily) == RESULTS[kind]
    assert len(scene.documents()) == 1


async def test_a_result_is_stored_with_the_effects_or_not_at_all(scene: Scene) -> None:
    async def on_order(database: Any) -> Any:
        await done(database.c.insert_one({}))
        if scene.runs == 1:
            raise LookupError
        return scene.runs

    with pytest.raises(LookupError):
        await scene.deliver(on_order, store_result=True)
    assert scene.markers() == []
    assert [await scene.deliver(on_order, store_result=True) for _ in range(2)] == [2, 2]


UNSTORABLE: Mapping[str, Any] = {
    "an object": object(),
    "a set": {1, 2},
    "a document with such": {"a": [object()]},
    "a number beyond 64 bits": 2**70,
    "a date": dt.date(2026, 1, 2),
    "a text that is no UTF-8": "\ud800",
}


@pytest.mark.parametrize("kind", UNSTORABLE)
async def test_a_result_that_is_no_bson_is_refused_and_nothing_is_committed(scene: Scene, kind: str) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> Any:
        await done(database.c.insert_one({}))
        return UNSTORABLE[kind]

    with pytest.raises(ConfigurationError, match="store_result cannot store a .* of on_order: return a BSON value"):
        await scene.deliver(on_order, store_result=True, recoverer=recovered.append)
    assert scene.documents() == scene.markers() == []
    assert recovered == []


async def test_a_result_too_large_for_a_document_is_refused_and_nothing_is_committed(scene: Scene) -> None:
    async def on_order(database: Any) -> Any:
        await done(database.c.insert_one({}))
        return "x" * (17 * 1024 * 1024)

    with pytest.raises(ConfigurationError, match="store_result cannot store a str"):
        await scene.deliver(on_order, store_result=True)
    assert scene.documents() == scene.markers() == []


async def test_a_result_that_is_not_to_be_stored_may_be_anything(scene: Scene) -> None:
    result = object()

    async def on_order(database: Any) -> Any:
        await done(database.c.insert_one({}))
        return result

    assert await scene.deliver(on_order) is result
    assert "result" not in scene.markers()[0]


# the digest


def digest_of(content: bytes) -> Callable[[Any], bytes]:
    return lambda _: content


async def test_a_key_with_another_content_is_an_error_and_never_a_skip(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    await scene.deliver(on_order)
    for lazily in (False, True):
        with pytest.raises(KeyReusedError, match="another one that was done before.*another epoch"):
            await scene.deliver(on_order, key=replace(KEY, digest=b"other"), lazily=lazily)
    assert len(scene.documents()) == 1


async def test_a_key_with_another_content_is_an_error_to_a_handler_that_catches_everything(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({}))
        except Exception:  # noqa: BLE001, S110 - that is the test
            pass

    await scene.deliver(on_order)
    with pytest.raises(KeyReusedError):
        await scene.deliver(on_order, key=replace(KEY, digest=b"other"), lazily=True)
    assert len(scene.documents()) == 1


@pytest.mark.parametrize("lazily", [False, True], ids=["with_client", "without_client"])
async def test_the_recoverer_is_told_that_a_key_was_reused(scene: Scene, lazily: bool) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    def recover(failure: Failure) -> str:
        recovered.append(failure)
        return "recovered"

    await scene.deliver(on_order)
    key = replace(KEY, digest=b"other")
    assert await scene.deliver(on_order, key=key, recoverer=recover, lazily=lazily) == "recovered"
    assert [(failure.reason, failure.key) for failure in recovered] == [("key_reused", key)]
    assert isinstance(recovered[0].exception, KeyReusedError)


async def test_a_key_with_another_content_and_another_epoch_is_another_record(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    await scene.deliver(on_order)
    await scene.deliver(on_order, key=replace(KEY, digest=b"other", epoch="2"))
    assert len(scene.documents()) == 2


async def test_a_digest_of_the_handlers_counts_before_the_keys(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    await scene.deliver(on_order, digest=digest_of(b"1"))
    await scene.deliver(on_order, digest=digest_of(b"1"), key=replace(KEY, digest=b"other"))
    with pytest.raises(KeyReusedError):
        await scene.deliver(on_order, digest=digest_of(b"2"))


@pytest.mark.parametrize("value", ["text", None, 7])
async def test_a_digest_that_is_no_bytes_is_refused(scene: Scene, log: CommandLog, value: Any) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    with pytest.raises(ConfigurationError, match="digest= must return bytes"):
        await scene.deliver(on_order, scene.client(log=log), digest=lambda _: value)
    assert names(log) == []


async def test_records_without_digest_are_skipped_unchecked_with_one_warning(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    client = scene.client()

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    with caplog.at_level(logging.WARNING, "saferetry"):
        for position in (1, 2, 1):
            await scene.deliver(on_order, client, key=RecordKey("orders", 0, position, group="g"))
    assert ["no digest" in message for message in caplog.messages] == [True]
    assert len(scene.documents()) == 2


async def test_strict_refuses_records_without_digest(scene: Scene, log: CommandLog) -> None:
    client = scene.client(log=log, settings=quick(strict=True))

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    with pytest.raises(ConfigurationError, match="no digest"):
        await scene.deliver(on_order, client, key=RecordKey("orders", 0, 1, group="g"))
    assert names(log) == []


async def test_a_record_that_got_its_digest_later_is_skipped(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    await scene.deliver(on_order, key=replace(KEY, digest=b""))
    await scene.deliver(on_order)
    assert len(scene.documents()) == 1


# a marker that no majority has yet


async def test_a_record_is_not_skipped_before_a_majority_has_its_marker(scene: Scene) -> None:
    finished = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": scene.runs}))

    await scene.deliver(on_order, key=replace(KEY, position=8))  # makes collections and index, which wait for a majority too
    with failpoint(scene.admin, "disableSnapshotting") as release:

        async def deliver() -> None:
            await scene.deliver(on_order)
            finished.append(True)

        async def deliver_again() -> None:
            await scene.until(lambda: len(scene.documents()) == 2)
            await deliver()

        async def watch() -> None:
            await scene.until(lambda: len(scene.documents()) == 2)
            await scene.sleep(0.3)
            seen = list(finished)
            release()
            scene.there.nudge.insert_one({})  # without another write a majority is looked for ten seconds later
            assert seen == []

        answers = await scene.together(deliver, deliver_again, watch)
    assert answers == [None, None, None]
    assert scene.runs == 2
    assert len(scene.markers()) == 2


async def test_a_record_whose_marker_no_majority_confirms_is_taken_over_and_no_case_for_the_recoverer(scene: Scene) -> None:
    if scene.api.is_async and BLOCKS_THE_EVENT_LOOP:
        pytest.skip("PyMongo 4.9: three deliveries at once outlast the half second that this is about")
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": scene.runs}))

    await scene.deliver(on_order, key=replace(KEY, position=8))
    with failpoint(scene.admin, "disableSnapshotting") as release:

        async def deliver() -> None:
            await scene.deliver(on_order)

        async def deliver_again() -> None:
            await scene.until(lambda: len(scene.documents()) == 2)
            await scene.deliver(on_order, budget=0.5, recoverer=recovered.append)

        async def watch() -> None:
            await scene.until(lambda: len(scene.documents()) == 2)
            await scene.sleep(1.5)
            release()
            scene.there.nudge.insert_one({})

        answers = await scene.together(deliver, deliver_again, watch)
    assert answers[0] is None
    assert isinstance(answers[1], TakenOverError)
    assert recovered == []
    assert scene.runs == 2
