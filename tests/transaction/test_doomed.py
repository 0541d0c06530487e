"""An error inside the transaction ends the execution, whatever the handler catches; what passes is executed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from bson.errors import InvalidDocument
from pymongo import DeleteMany, InsertOne, UpdateOne
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ExecutionTimeout,
    OperationFailure,
    PyMongoError,
    WriteError,
)

from saferetry import Failure, Outcome
from saferetry.errors import TakenOverError
from tests.support import CommandLog, app_name, fail_command, running
from tests.support.driving import ProxyFactory, done, quick
from tests.transaction.scene import Scene, held, listed, names, only_async, only_sync

TRANSIENT = "TransientTransactionError"
LOST: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "insert_one": ("insert", lambda c: c.insert_one({"n": 0})),
    "insert_many": ("insert", lambda c: c.insert_many([{"n": 0}, {"n": 0}])),
    "update_one": ("update", lambda c: c.update_one({"_id": 1}, {"$inc": {"n": 1}})),
    "update_many": ("update", lambda c: c.update_many({}, {"$inc": {"n": 1}})),
    "replace_one": ("update", lambda c: c.replace_one({"_id": 1}, {"m": 1})),
    "delete_one": ("delete", lambda c: c.delete_one({"n": 0})),
    "delete_many": ("delete", lambda c: c.delete_many({})),
    "find_one_and_update": ("findAndModify", lambda c: c.find_one_and_update({"n": 0}, {"$set": {"n": 1}})),
    "bulk_write": ("update", lambda c: c.bulk_write([InsertOne({"n": 0}), UpdateOne({"_id": 1}, {"$inc": {"n": 1}})])),
}
LOST_READS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "find_one": ("find", lambda c: c.find_one({})),
    "count_documents": ("aggregate", lambda c: c.count_documents({})),
    "distinct": ("distinct", lambda c: c.distinct("n")),
    "aggregate": ("aggregate", lambda c: c.aggregate([{"$match": {}}])),
    "find": ("find", lambda c: c.find({})),
    "find, a later batch": ("getMore", lambda c: c.find({}, batch_size=2)),
    "find_raw_batches": ("find", lambda c: c.find_raw_batches({})),
    "aggregate, a later batch": ("getMore", lambda c: c.aggregate([{"$match": {}}], batchSize=2)),
}
CURSORS = ("aggregate", "find", "find, a later batch", "find_raw_batches", "aggregate, a later batch")
# WriteConflict, NoSuchTransaction, Interrupted (killSessions of an execution that takes over), ShutdownInProgress,
# NotWritablePrimary, LockTimeout, PrimarySteppedDown, InterruptedAtShutdown, InterruptedDueToReplStateChange,
# NotPrimaryNoSecondaryOk, NotPrimaryOrSecondary
PASSING = (112, 251, 11601, 91, 10107, 24, 189, 11600, 11602, 13435, 13436)


@pytest.fixture
def stocked(scene: Scene) -> Scene:
    """Three documents are there."""
    scene.there.c.insert_many([{"_id": 1, "n": 0}, {"_id": 2, "n": 0}, {"_id": 3, "n": 0}])
    return scene


def documents_after(scene: Scene, write: Callable[[Any], Any]) -> list[Any]:
    """Return what the documents are after a write that took effect once, without `_id`s of the driver's."""
    scene.there.plain.insert_many([{"_id": 1, "n": 0}, {"_id": 2, "n": 0}, {"_id": 3, "n": 0}])
    write(scene.there.plain)
    return known(list(scene.there.plain.find(sort=[("_id", 1)])))


def known(documents: list[dict[str, Any]]) -> list[Any]:
    return [document if isinstance(document["_id"], int) else {**document, "_id": None} for document in documents]


@pytest.mark.parametrize("name", LOST)
async def test_a_lost_reply_of_a_write_leaves_its_effect_once(stocked: Scene, proxy: ProxyFactory, name: str) -> None:
    command, write = LOST[name]
    lossy = proxy(command=command, times=1, skip=1 if command == "insert" else 0)

    async def on_order(database: Any) -> None:
        await done(write(database.c))

    await stocked.deliver(on_order, stocked.client(lossy.uri()))
    assert (lossy.hits, stocked.runs) == (1, 2)
    assert known(stocked.documents()) == documents_after(stocked, write)
    assert len(stocked.markers()) == 1


@pytest.mark.parametrize("name", LOST)
async def test_a_lost_reply_that_the_handler_catches_to_try_again_leaves_the_effect_once(
    stocked: Scene, proxy: ProxyFactory, name: str
) -> None:
    command, write = LOST[name]
    lossy = proxy(command=command, times=1, skip=1 if command == "insert" else 0)

    async def on_order(database: Any) -> None:
        for _ in range(3):
            try:
                await done(write(database.c))
                break
            except AutoReconnect:
                continue

    await stocked.deliver(on_order, stocked.client(lossy.uri()))
    assert (lossy.hits, stocked.runs) == (1, 2)
    assert known(stocked.documents()) == documents_after(stocked, write)


async def test_a_lost_reply_that_the_handler_catches_and_forgets_leaves_the_effect_once(
    stocked: Scene, proxy: ProxyFactory
) -> None:
    lossy = proxy(command="update", times=1)

    async def on_order(database: Any) -> None:
        try:
            await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        except PyMongoError:
            pass

    await stocked.deliver(on_order, stocked.client(lossy.uri()))
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]
    assert stocked.runs == 2


async def test_a_lost_reply_that_the_handler_turns_into_an_error_of_its_own_is_executed_again(
    stocked: Scene, proxy: ProxyFactory
) -> None:
    lossy = proxy(command="update", times=1)

    async def on_order(database: Any) -> None:
        try:
            await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        except PyMongoError as exc:
            raise LookupError from exc

    await stocked.deliver(on_order, stocked.client(lossy.uri()))
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


async def test_the_operations_after_a_lost_reply_are_not_sent(stocked: Scene, proxy: ProxyFactory, log: CommandLog) -> None:
    lossy = proxy(command="update", times=1)
    raised = []

    async def on_order(database: Any) -> None:
        for name in ("update_one", "insert_one", "delete_many", "find_one", "find"):
            try:
                if name == "update_one":
                    await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
                else:
                    answer = getattr(database.c, name)({"_id": 7})
                    await (listed(answer) if name == "find" else done(answer))
            except AutoReconnect as exc:
                raised.append(exc)

    await stocked.deliver(on_order, stocked.client(lossy.uri(), log=log))
    assert len(raised) == 5
    assert len(set(map(id, raised))) == 1
    assert names(log) == [
        *("insert", "update", "abortTransaction"),
        *("insert", "update", "insert", "delete", "find", "find", "commitTransaction"),
    ]


async def test_an_execution_ended_by_a_lost_reply_is_never_committed(
    stocked: Scene, proxy: ProxyFactory, log: CommandLog
) -> None:
    lossy = proxy(command="update", times=9)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 9}))
        try:
            await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        except AutoReconnect:
            pass

    with pytest.raises(AutoReconnect):
        await stocked.deliver(on_order, stocked.client(lossy.uri(), log=log), budget=0.4)
    assert log.sends("commitTransaction") == 0
    assert len(stocked.documents()) == 3
    assert stocked.markers() == []


async def test_a_lost_reply_of_the_marker_leaves_effects_once(stocked: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="insert", times=2)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order, stocked.client(lossy.uri()))
    assert (lossy.hits, stocked.runs) == (2, 1)
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


async def test_a_lost_reply_of_the_marker_at_the_first_operation_leaves_effects_once(
    stocked: Scene, proxy: ProxyFactory
) -> None:
    lossy = proxy(command="insert", times=1)

    async def on_order(database: Any) -> None:
        for _ in range(3):
            try:
                await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
                break
            except AutoReconnect:
                continue

    await stocked.deliver(on_order, stocked.client(lossy.uri()), lazily=True)
    assert (lossy.hits, stocked.runs) == (1, 2)
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


@pytest.mark.parametrize("name", LOST_READS)
async def test_a_lost_reply_of_a_read_is_executed_again(stocked: Scene, proxy: ProxyFactory, name: str) -> None:
    command, read = LOST_READS[name]
    lossy = proxy(command=command, times=1)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        answer = read(database.c)
        await (listed(answer) if name in CURSORS else done(answer))

    await stocked.deliver(on_order, stocked.client(lossy.uri()))
    assert (lossy.hits, stocked.runs) == (1, 2)
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


@pytest.mark.parametrize("name", LOST_READS)
async def test_a_lost_reply_of_a_read_that_the_handler_turns_into_an_error_of_its_own_is_executed_again(
    stocked: Scene, proxy: ProxyFactory, name: str
) -> None:
    command, read = LOST_READS[name]
    lossy = proxy(command=command, times=1)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        try:
            answer = read(database.c)
            await (listed(answer) if name in CURSORS else done(answer))
        except PyMongoError as exc:
            raise LookupError from exc

    await stocked.deliver(on_order, stocked.client(lossy.uri()))
    assert stocked.runs == 2
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


@pytest.mark.parametrize("name", LOST_READS)
async def test_a_lost_reply_of_a_read_that_the_handler_catches_is_executed_again(
    stocked: Scene, proxy: ProxyFactory, name: str
) -> None:
    command, read = LOST_READS[name]
    lossy = proxy(command=command, times=1)

    async def on_order(database: Any) -> None:
        try:
            answer = read(database.c)
            await (listed(answer) if name in CURSORS else done(answer))
        except AutoReconnect:
            await done(database.c.insert_one({"_id": "nothing was found"}))
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order, stocked.client(lossy.uri()))
    assert stocked.runs == 2
    assert stocked.documents() == [{"_id": 1, "n": 1}, {"_id": 2, "n": 0}, {"_id": 3, "n": 0}]


@pytest.mark.parametrize(
    ("command", "code"),
    [*(("update", code) for code in PASSING), *(("getMore", code) for code in PASSING[:5]), ("insert", 11601), ("find", 251)],
)
async def test_an_error_that_passes_is_executed_again(stocked: Scene, command: str, code: int) -> None:
    name = app_name()
    client = stocked.client(appName=name)

    async def on_order(database: Any) -> None:
        with ExitStack() as stack:
            if stocked.runs == 1:  # after the marker: the server looks for a new session with a find that would fail
                failure = fail_command(stocked.admin, app_name=name, commands=[command], times=1, errorCode=code)
                stack.enter_context(failure)
            await done(database.c.insert_one({"_id": 9, "n": 0}))
            await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
            await listed(database.c.find({}, batch_size=2))

    await stocked.deliver(on_order, client)
    assert stocked.runs == 2
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]
    assert stocked.documents(_id=9) == [{"_id": 9, "n": 0}]
    assert len(stocked.markers()) == 1


@pytest.mark.parametrize(("lazily", "code"), [*((False, code) for code in PASSING), *((True, code) for code in PASSING[3:6])])
async def test_an_error_of_the_marker_that_passes_is_executed_again(stocked: Scene, code: int, lazily: bool) -> None:
    name = app_name()
    client = stocked.client(appName=name)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with fail_command(stocked.admin, app_name=name, commands=["insert"], times=2, errorCode=code):
        await stocked.deliver(on_order, client, lazily=lazily)
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]
    assert len(stocked.markers()) == 1


async def test_errors_labelled_transient_are_executed_again_more_often_than_max_executions(stocked: Scene) -> None:
    name = app_name()
    client = stocked.client(appName=name, settings=quick(max_executions=2))

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with fail_command(stocked.admin, app_name=name, commands=["update"], times=6, errorCode=112, errorLabels=[TRANSIENT]):
        await stocked.deliver(on_order, client)
    assert stocked.runs == 7
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


async def test_an_unknown_error_labelled_transient_is_executed_again(stocked: Scene) -> None:
    name = app_name()

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with fail_command(stocked.admin, app_name=name, commands=["update"], times=1, errorCode=9999, errorLabels=[TRANSIENT]):
        await stocked.deliver(on_order, stocked.client(appName=name))
    assert stocked.runs == 2


async def test_a_write_conflict_is_executed_again_with_what_is_there_now(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        document = await done(database.c.find_one({"_id": 1}))
        if stocked.runs == 1:
            stocked.there.c.update_one({"_id": 1}, {"$set": {"n": 100}})
        await done(database.c.update_one({"_id": 1}, {"$set": {"n": document["n"] + 1}}))

    await stocked.deliver(on_order)
    assert stocked.runs == 2
    assert stocked.documents(_id=1) == [{"_id": 1, "n": 101}]


async def test_conflicts_end_with_the_budget_and_the_recoverer_is_told_exhausted(stocked: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.find_one({"_id": 1}))
        stocked.there.c.update_one({"_id": 1}, {"$inc": {"outside": 1}})
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order, recoverer=recovered.append, budget=3.0)
    (failure,) = recovered
    assert (failure.reason, failure.execution) == ("exhausted", stocked.runs)
    assert isinstance(failure.exception, OperationFailure)
    assert stocked.runs > 4
    assert stocked.documents(n=1) == []


# errors that do not pass

FINAL: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "a failed statement": (lambda c: c.update_one({"_id": 1}, {"$inc": {"t": 1}}), WriteError),
    "a bulk": (lambda c: c.bulk_write([InsertOne({}), UpdateOne({"_id": 1}, {"$inc": {"t": 1}})]), BulkWriteError),
    "duplicates in insert_many": (lambda c: c.insert_many([{}, {"_id": 1}, {}]), BulkWriteError),
    "unordered duplicates": (lambda c: c.insert_many([{}, {"_id": 1}, {}], ordered=False), BulkWriteError),
    "a time limit": (lambda c: c.find_one({"$where": "sleep(50) || true"}, max_time_ms=20), ExecutionTimeout),
    "a refused command": (lambda c: c.find_one({"$nonsense": 1}), OperationFailure),
}


@pytest.fixture
def typed(stocked: Scene) -> Scene:
    """A field that cannot be incremented is there."""
    stocked.there.c.update_one({"_id": 1}, {"$set": {"t": "text"}})
    return stocked


@pytest.mark.parametrize("name", FINAL)
async def test_an_error_that_does_not_pass_leaves_after_one_execution_and_nothing_is_committed(typed: Scene, name: str) -> None:
    call, kind = FINAL[name]
    before = typed.documents()

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))
        await done(call(database.c))

    with pytest.raises(kind):
        await typed.deliver(on_order)
    assert typed.runs == 1
    assert typed.documents() == before
    assert typed.markers() == []


@pytest.mark.parametrize("name", FINAL)
async def test_an_error_that_the_handler_catches_is_raised_at_its_end_and_nothing_is_committed(typed: Scene, name: str) -> None:
    call, kind = FINAL[name]
    before = typed.documents()

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))
        try:
            await done(call(database.c))
        except PyMongoError:
            pass

    with pytest.raises(kind) as caught:
        await typed.deliver(on_order)
    assert any("could not be committed" in note for note in caught.value.__notes__)
    assert typed.runs == 1
    assert typed.documents() == before
    assert typed.markers() == []


UNORDERED: dict[str, Callable[[Any], Any]] = {
    "kinds": lambda c: c.bulk_write(
        [InsertOne({}), UpdateOne({"_id": 2}, {"$inc": {"n": 1}}), InsertOne({"_id": 1})], ordered=False
    ),
    "multi": lambda c: c.bulk_write([UpdateOne({"_id": 1}, {"$inc": {"t": 1}}), DeleteMany({"_id": 9})], False),
}


@pytest.mark.parametrize("is_caught", [False, True])
@pytest.mark.parametrize("name", UNORDERED)
async def test_an_unordered_bulk_says_what_failed_although_the_driver_sends_its_next_command(
    typed: Scene, name: str, is_caught: bool
) -> None:
    """The first error aborts the transaction; the driver's next command of the same bulk is told that there is none."""
    before = typed.documents()

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))
        try:
            await done(UNORDERED[name](database.c))
        except PyMongoError:
            if not is_caught:
                raise

    with pytest.raises(BulkWriteError):
        await typed.deliver(on_order)
    assert typed.runs == 2
    assert typed.documents() == before
    assert typed.markers() == []


@pytest.mark.parametrize("name", FINAL)
async def test_the_operations_after_an_error_that_the_handler_catches_raise_it_again(
    typed: Scene, log: CommandLog, name: str
) -> None:
    call, kind = FINAL[name]

    async def on_order(database: Any) -> None:
        with pytest.raises(kind):
            await done(call(database.c))
        log.clear()
        await done(database.c.insert_one({}))

    with pytest.raises(kind) as caught:
        await typed.deliver(on_order, typed.client(log=log))
    assert any("could not be committed" in note for note in caught.value.__notes__)
    assert names(log) in ([], ["abortTransaction"])


async def test_an_error_of_the_handlers_own_after_one_it_caught_leaves_as_it_is(typed: Scene) -> None:
    async def on_order(database: Any) -> None:
        try:
            await done(database.c.update_one({"_id": 1}, {"$inc": {"t": 1}}))
        except WriteError:
            raise LookupError from None

    with pytest.raises(LookupError):
        await typed.deliver(on_order)
    assert typed.markers() == []


async def test_what_the_driver_refuses_before_sending_leaves_the_transaction_whole(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        with pytest.raises(InvalidDocument):
            await done(database.c.insert_one({"n": object()}))
        with pytest.raises(TypeError):
            await done(database.c.insert_one(7))
        with pytest.raises(ValueError, match="only works with"):
            await done(database.c.update_one({}, {"n": 1}))
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order)
    assert stocked.runs == 1
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


# errors of the handler's own


async def test_an_error_of_the_handlers_undoes_everything(stocked: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.delete_many({}))
        await done(database.c.insert_one({"_id": 9}))
        raise LookupError

    await stocked.deliver(on_order, recoverer=recovered.append)
    assert len(stocked.documents()) == 3
    assert stocked.markers() == []
    assert [write.outcome for write in recovered[0].writes] == [Outcome.NOT_APPLIED, Outcome.NOT_APPLIED]
    assert recovered[0].reason == "failed"


async def test_an_error_named_in_retry_on_is_executed_again_until_it_passes(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        if stocked.runs < 3:
            raise LookupError

    await stocked.deliver(on_order, retry_on=LookupError)
    assert stocked.runs == 3
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


async def test_an_error_named_in_retry_on_is_executed_max_executions_times(stocked: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        raise LookupError

    client = stocked.client(settings=quick(max_executions=3))
    await stocked.deliver(on_order, client, retry_on=LookupError, recoverer=recovered.append)
    assert stocked.runs == 3
    assert [failure.reason for failure in recovered] == ["exhausted"]
    assert stocked.documents(n=1) == []


@pytest.mark.parametrize("name", FINAL)
async def test_an_error_of_the_servers_named_in_retry_on_is_executed_again(typed: Scene, name: str) -> None:
    call, kind = FINAL[name]

    async def on_order(database: Any) -> None:
        if typed.runs < 3:
            await done(call(database.c))
        await done(database.c.update_one({"_id": 2}, {"$inc": {"n": 1}}))

    await typed.deliver(on_order, retry_on=kind)
    assert typed.runs == 3
    assert typed.documents(n=1) == [{"_id": 2, "n": 1}]


async def test_a_fatal_error_is_not_executed_again(stocked: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        raise KeyError

    await stocked.deliver(on_order, retry_on=LookupError, fatal=KeyError, recoverer=recovered.append)
    assert stocked.runs == 1
    assert [failure.reason for failure in recovered] == ["fatal"]


async def test_a_fatal_error_of_the_network_is_not_executed_again(stocked: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="update", times=1)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with pytest.raises(AutoReconnect):
        await stocked.deliver(on_order, stocked.client(lossy.uri()), fatal=AutoReconnect)
    assert stocked.runs == 1
    assert stocked.documents(n=1) == []


@only_sync  # asyncio's runner takes a KeyboardInterrupt for its own
async def test_an_exit_of_the_handlers_undoes_everything(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.delete_many({}))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await stocked.deliver(on_order)
    assert len(stocked.documents()) == 3


# interrupted statements


async def interrupted(call: Any) -> None:
    """Give up waiting for a statement that has just begun, and go on."""
    try:
        await asyncio.wait_for(call, 0.1)
    except TimeoutError:
        pass


@only_async
async def test_a_statement_that_was_cancelled_is_executed_again(stocked: Scene) -> None:
    name = app_name()
    client = stocked.client(appName=name)

    async def on_order(database: Any) -> None:
        call = database.c.update_one({"_id": 1}, {"$inc": {"n": 1}})
        await (interrupted(call) if stocked.runs == 1 else call)
        if stocked.runs == 1:
            await database.c.update_one({"_id": 2}, {"$inc": {"n": 1}})

    with held(stocked.admin, name, "update"):
        await stocked.deliver(on_order, client)
    assert stocked.runs == 2
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


@only_async
async def test_a_statement_that_was_cancelled_last_is_executed_again(stocked: Scene) -> None:
    name = app_name()
    client = stocked.client(appName=name)

    async def on_order(database: Any) -> None:
        await interrupted(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with held(stocked.admin, name, "update"):
        await stocked.deliver(on_order, client)
    assert stocked.runs == 2
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


@only_async
async def test_a_statement_that_was_cancelled_while_the_transaction_began_is_executed_again(stocked: Scene) -> None:
    name = app_name()
    client = stocked.client(appName=name)
    await client.admin.command("ping")  # connected, so that what is interrupted is no handshake

    async def on_order(database: Any) -> None:
        await interrupted(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with held(stocked.admin, name, "insert"):
        await stocked.deliver(on_order, client, lazily=True)
    assert stocked.runs == 2
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}]


@only_async
async def test_a_statement_cancelled_by_a_sibling_that_failed_leaves_with_the_siblings_error(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        async def fail() -> None:
            raise LookupError

        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(database.c.insert_one({"_id": 9}))

    with pytest.raises(ExceptionGroup):
        await stocked.deliver(on_order, budget=1.0)
    assert stocked.documents(_id=9) == []


@only_async
async def test_a_handler_that_was_cancelled_commits_nothing_and_is_done_once_when_redelivered(stocked: Scene) -> None:
    name = app_name()
    client = stocked.client(appName=name)

    async def on_order(database: Any) -> None:
        await database.c.update_one({"_id": 2}, {"$inc": {"n": 1}})
        await database.c.update_one({"_id": 1}, {"$inc": {"n": 1}})

    await stocked.cancel_held(name, "update", stocked.deliver(on_order, client))
    assert stocked.markers() == []
    await stocked.deliver(on_order)
    assert stocked.documents(n=1) == [{"_id": 1, "n": 1}, {"_id": 2, "n": 1}]


# another execution takes over while a statement runs


async def test_a_statement_killed_by_a_rival_that_takes_over_is_no_case_for_the_recoverer(stocked: Scene, hasty: None) -> None:
    recovered: list[Failure] = []
    name = app_name()
    stalled = stocked.client(appName=name)
    rival = stocked.client()

    async def on_order(database: Any) -> None:
        if database.client is stalled:
            await done(database.c.update_many({"$where": "sleep(1000) || true"}, {"$inc": {"n": 1}}))
        else:
            await done(database.c.update_many({}, {"$inc": {"n": 1}}))

    async def first() -> Any:
        return await stocked.deliver(on_order, stalled, recoverer=recovered.append)

    async def second() -> Any:
        await stocked.until(
            lambda: any(operation.is_write and operation.in_engine for operation in running(stocked.admin, name))
        )
        return await stocked.deliver(on_order, rival, recoverer=recovered.append)

    answers = await stocked.together(first, second)
    assert recovered == []
    assert [answer for answer in answers if answer is not None and not isinstance(answer, TakenOverError)] == []
    assert [document["n"] for document in stocked.documents()] == [1, 1, 1]
