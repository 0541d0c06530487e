"""A commit without an answer is repeated, never the handler; in the end the marker tells what became of it."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

import pytest
from pymongo import WriteConcern
from pymongo.errors import AutoReconnect, PyMongoError

from saferetry import Failure, Outcome, Record, _transaction, _transaction_handling, current_record
from saferetry.errors import TakenOverError
from tests.support import CommandLog, Proxy, app_name, fail_command, failpoint
from tests.support.driving import ProxyFactory, RawClient, done
from tests.transaction.scene import MARKERS, Scene, names, only_async, plainly

TRANSIENT, UNKNOWN = "TransientTransactionError", "UnknownTransactionCommitResult"
IMPATIENT: dict[str, Any] = {"socketTimeoutMS": 300, "serverSelectionTimeoutMS": 300}


@pytest.fixture
def stocked(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A counter is there; nobody asks for long when the time is up."""
    for module in (_transaction, _transaction_handling):
        monkeypatch.setattr(module, "LAST_SECONDS", 0.4)
    scene.there.c.insert_one({"_id": 1, "n": 0})
    return scene


async def count(database: Any) -> None:
    await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))


def written(records: list[Record]) -> list[Outcome]:
    """Return what the last execution's record says of its writes."""
    return [write.outcome for write in records[-1].writes]


@pytest.mark.parametrize(("mode", "times"), [("close", 1), ("close", 2), ("close", 5), ("cut", 2), ("cut_reply", 2)])
async def test_a_commit_without_an_answer_is_repeated_alone(
    stocked: Scene, proxy: ProxyFactory, log: CommandLog, mode: str, times: int
) -> None:
    lossy: Proxy = proxy(command="commitTransaction", mode=mode, times=times)
    await stocked.deliver(count, stocked.client(lossy.uri(), log=log))
    assert (lossy.hits, stocked.runs) == (times, 1)
    assert stocked.documents() == [{"_id": 1, "n": 1}]
    assert len(stocked.markers()) == 1
    assert names(log) == ["insert", "update"] + ["commitTransaction"] * (times + 1)


async def test_a_commit_whose_answer_comes_too_late_is_repeated_alone(stocked: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="commitTransaction", mode="drop_reply", times=1)
    await stocked.deliver(count, stocked.client(lossy.uri(), **IMPATIENT))
    assert (lossy.hits, stocked.runs) == (1, 1)
    assert stocked.documents() == [{"_id": 1, "n": 1}]


async def test_a_commit_that_is_repeated_is_of_the_same_transaction(
    stocked: Scene, proxy: ProxyFactory, log: CommandLog
) -> None:
    lossy = proxy(command="commitTransaction", times=3)
    await stocked.deliver(count, stocked.client(lossy.uri(), log=log))
    commits = log.commands("commitTransaction")
    assert len({(bytes(commit["lsid"]["id"]), commit["txnNumber"]) for commit in commits}) == 1
    assert {commit["writeConcern"]["w"] for commit in commits} == {"majority"}


# What the server answers before it has done anything: MaxTimeMSExpired, WriteConcernFailed, ShutdownInProgress,
# InterruptedDueToReplStateChange, PrimarySteppedDown, NotWritablePrimary: unknown by the driver's table.
UNKNOWN_CODES = (50, 64, 91, 11602, 189, 10107)
# NoSuchTransaction, TransactionTooOld, WriteConflict, Interrupted: the transaction is gone, or the marker tells.
ASKING_CODES = (251, 225, 112, 11601)


@pytest.mark.parametrize(("code", "labels"), [*((code, []) for code in UNKNOWN_CODES), (50, [UNKNOWN]), (8000, [UNKNOWN])])
async def test_a_commit_of_unknown_result_is_repeated_alone(stocked: Scene, code: int, labels: list[str]) -> None:
    name = app_name()
    client = stocked.client(appName=name)
    with fail_command(
        stocked.admin, app_name=name, commands=["commitTransaction"], times=3, errorCode=code, errorLabels=labels
    ):
        await stocked.deliver(count, client)
    assert stocked.runs == 1
    assert stocked.documents() == [{"_id": 1, "n": 1}]


@pytest.mark.parametrize("code", ASKING_CODES)
@pytest.mark.parametrize("labels", [[], [TRANSIENT], [UNKNOWN]], ids=["", "transient", "unknown"])
async def test_a_commit_that_is_refused_leaves_effects_once(stocked: Scene, code: int, labels: list[str]) -> None:
    name = app_name()
    client = stocked.client(appName=name)
    options = {"errorCode": code, "errorLabels": labels}
    if code == 112 and not labels:
        options.pop("errorLabels")  # the server's own
    with fail_command(stocked.admin, app_name=name, commands=["commitTransaction"], times=1, **options):
        await stocked.deliver(count, client)
    assert stocked.documents() == [{"_id": 1, "n": 1}]
    assert len(stocked.markers()) == 1


async def test_a_commit_that_fails_for_good_is_the_recoverers(stocked: Scene) -> None:
    name = app_name()
    client = stocked.client(appName=name)
    recovered: list[Failure] = []
    with fail_command(stocked.admin, app_name=name, commands=["commitTransaction"], times=9, errorCode=8000, errorLabels=[]):
        await stocked.deliver(count, client, recoverer=recovered.append)
    (failure,) = recovered
    assert (failure.reason, stocked.runs) == ("failed", 1)
    assert [write.outcome for write in failure.writes] == [Outcome.NOT_APPLIED]
    assert stocked.documents() == [{"_id": 1, "n": 0}]
    assert stocked.markers() == []


@pytest.mark.parametrize(("code", "times"), [(64, 1), (64, 3), (91, 1), (79, 1), (100, 3), (11601, 1), (11602, 1)])
async def test_a_commit_whose_durability_is_open_is_repeated_alone(stocked: Scene, code: int, times: int) -> None:
    name = app_name()
    client = stocked.client(appName=name)
    failure = {"code": code, "errmsg": "waiting", "errInfo": {"wtimeout": code == 64}}
    with fail_command(stocked.admin, app_name=name, commands=["commitTransaction"], times=times, writeConcernError=failure):
        await stocked.deliver(count, client)
    assert stocked.runs == 1
    assert stocked.documents() == [{"_id": 1, "n": 1}]


async def test_a_commit_on_a_connection_that_breaks_is_repeated_alone(stocked: Scene) -> None:
    name = app_name()
    client = stocked.client(appName=name)
    with fail_command(stocked.admin, app_name=name, commands=["commitTransaction"], times=3, closeConnection=True):
        await stocked.deliver(count, client)
    assert stocked.runs == 1
    assert stocked.documents() == [{"_id": 1, "n": 1}]


# the budget ends before an answer comes


async def test_a_commit_never_answered_is_found_done_by_taking_the_slot_over(stocked: Scene, proxy: ProxyFactory) -> None:
    recovered: list[Failure] = []
    lossy = proxy(command="commitTransaction", times=1_000)

    await stocked.deliver(count, stocked.client(lossy.uri()), budget=0.5, recoverer=recovered.append)
    assert stocked.runs == 1
    assert recovered == []
    assert stocked.documents() == [{"_id": 1, "n": 1}]
    await stocked.deliver(count)
    assert stocked.documents() == [{"_id": 1, "n": 1}]


async def test_the_stored_result_is_returned_where_a_commit_was_found_done(stocked: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="commitTransaction", times=1_000)

    async def on_order(database: Any) -> dict[str, int]:
        await count(database)
        return {"runs": stocked.runs}

    client = stocked.client(lossy.uri())
    assert await stocked.deliver(on_order, client, budget=0.5, store_result=True) == {"runs": 1}


async def test_a_commit_that_never_arrives_is_found_not_applied_by_taking_the_slot_over(
    stocked: Scene, proxy: ProxyFactory
) -> None:
    recovered: list[Failure] = []
    lossy = proxy(command="commitTransaction", mode="cut", times=1_000)
    await stocked.deliver(count, stocked.client(lossy.uri()), budget=0.5, recoverer=recovered.append)
    (failure,) = recovered
    assert isinstance(failure.exception, AutoReconnect)
    assert failure.reason == "exhausted"
    assert [write.outcome for write in failure.writes] == [Outcome.NOT_APPLIED]
    assert stocked.documents() == [{"_id": 1, "n": 0}]
    await stocked.deliver(count)
    assert stocked.documents() == [{"_id": 1, "n": 1}]


@pytest.mark.parametrize("mode", ["drop_reply", "cut"])
async def test_a_commit_to_a_server_that_falls_silent_stays_unknown_and_is_no_case_for_the_recoverer(
    stocked: Scene, proxy: ProxyFactory, mode: str
) -> None:
    recovered: list[Failure] = []
    records = []
    lossy: Proxy = proxy(command="commitTransaction", mode=mode, times=1, on_hit=lambda: lossy.arm(mode="silent"))

    async def on_order(database: Any) -> None:
        records.append(current_record())
        await count(database)

    client = stocked.client(lossy.uri(), **IMPATIENT)
    with pytest.raises(PyMongoError) as caught:
        await stocked.deliver(on_order, client, budget=0.6, recoverer=recovered.append)
    assert caught.value.has_error_label(UNKNOWN)
    assert recovered == []
    assert stocked.runs == 1
    assert written([record for record in records if record]) == [Outcome.UNKNOWN]
    lossy.recover()
    await stocked.deliver(on_order)
    assert stocked.runs == (1 if mode == "drop_reply" else 2)
    assert stocked.documents() == [{"_id": 1, "n": 1}]


async def test_a_commit_that_no_majority_has_in_time_stays_unknown_and_is_no_case_for_the_recoverer(stocked: Scene) -> None:
    recovered: list[Failure] = []
    records = []

    async def on_order(database: Any) -> None:
        records.append(current_record())
        await count(database)

    client = stocked.client(**IMPATIENT)
    await stocked.deliver(on_order, client, key=("warm", 0, 1))
    with failpoint(stocked.admin, "disableSnapshotting"):
        with pytest.raises((PyMongoError, TakenOverError)):
            await stocked.deliver(on_order, client, budget=0.8, recoverer=recovered.append)
        assert recovered == []
        assert written([record for record in records if record]) == [Outcome.UNKNOWN]
    stocked.there.nudge.insert_one({})  # without another write a majority is looked for ten seconds later
    await stocked.deliver(on_order)
    assert stocked.runs == 2
    assert stocked.documents() == [{"_id": 1, "n": 2}]


# others have done the record meanwhile


def apart(scene: Scene, work: Any) -> Any:
    """Run something as if another process did: outside the record."""
    if scene.api.is_async:
        return asyncio.get_running_loop().create_task(work, context=Context())
    return Context().run(plainly, work)


async def test_an_execution_that_was_taken_over_before_its_commit_is_done_with_what_the_other_did(stocked: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> str:
        await count(database)
        if stocked.runs == 1:
            await done(apart(stocked, stocked.deliver(on_order, store_result=True)))
            return "first"
        return "second"

    assert await stocked.deliver(on_order, store_result=True, recoverer=recovered.append) == "second"
    assert stocked.runs == 2
    assert recovered == []
    assert stocked.documents() == [{"_id": 1, "n": 1}]


async def test_an_execution_that_was_taken_over_before_a_statement_is_done_with_what_the_other_did(stocked: Scene) -> None:
    async def on_order(database: Any) -> str:
        is_first = stocked.runs == 1
        if is_first:
            await done(apart(stocked, stocked.deliver(on_order, store_result=True)))
        await count(database)
        return "first" if is_first else "second"

    assert await stocked.deliver(on_order, store_result=True) == "second"
    assert stocked.runs == 2
    assert stocked.documents() == [{"_id": 1, "n": 1}]


async def test_an_execution_that_was_taken_over_before_a_read_is_done_with_what_the_other_did(stocked: Scene) -> None:
    async def on_order(database: Any) -> str:
        is_first = stocked.runs == 1
        if is_first:
            await done(apart(stocked, stocked.deliver(on_order, store_result=True)))
        await done(database.c.find({}).to_list())
        await count(database)
        return "first" if is_first else "second"

    assert await stocked.deliver(on_order, store_result=True) == "second"
    assert stocked.documents() == [{"_id": 1, "n": 1}]


async def test_an_execution_that_was_taken_over_and_fails_then_is_done_with_what_the_other_did(stocked: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> str:
        await count(database)
        if stocked.runs == 1:
            await done(apart(stocked, stocked.deliver(on_order, store_result=True)))
            raise LookupError
        return "second"

    assert await stocked.deliver(on_order, store_result=True, recoverer=recovered.append) == "second"
    assert recovered == []
    assert stocked.documents() == [{"_id": 1, "n": 1}]


def mark(admin: RawClient, scene: Scene, result: str, w: str | int = "majority") -> None:
    """Commit the record's marker as another execution would."""
    identity = {"group": "g", "stream": "orders", "partition": 0, "position": 7, "epoch": "", "name": "on_order"}
    markers = admin[scene.name].get_collection(MARKERS, write_concern=WriteConcern(w))
    markers.insert_one({"_id": identity, "result": result})


async def test_the_marker_is_asked_before_a_recoverer_runs(stocked: Scene, proxy: ProxyFactory) -> None:
    recovered: list[Failure] = []
    watched = proxy(
        command="abortTransaction", mode="delay_reply", times=1, on_hit=lambda: mark(stocked.admin, stocked, "other")
    )

    async def on_order(database: Any) -> None:
        await count(database)
        raise LookupError

    client = stocked.client(watched.uri())
    assert await stocked.deliver(on_order, client, store_result=True, recoverer=recovered.append) == "other"
    assert watched.hits == 1
    assert recovered == []


async def test_a_recoverer_does_not_run_while_another_execution_waits_for_a_majority(
    stocked: Scene, proxy: ProxyFactory
) -> None:
    recovered: list[Failure] = []
    watched = proxy(
        command="abortTransaction", mode="delay_reply", times=1, on_hit=lambda: mark(stocked.admin, stocked, "other", w=1)
    )

    async def on_order(database: Any) -> None:
        await count(database)
        raise LookupError

    client = stocked.client(watched.uri())
    await stocked.deliver(count, client, key=("warm", 0, 1), digest=lambda _: b"x")
    with failpoint(stocked.admin, "disableSnapshotting"), pytest.raises(LookupError):
        await stocked.deliver(on_order, client, store_result=True, recoverer=recovered.append)
    assert watched.hits == 1
    assert recovered == []
    stocked.there.nudge.insert_one({})
    assert await stocked.deliver(on_order, client, store_result=True, recoverer=recovered.append) == "other"


async def test_a_recoverer_does_not_run_where_nobody_says_whether_the_record_is_done(
    stocked: Scene, proxy: ProxyFactory
) -> None:
    recovered: list[Failure] = []
    watched: Proxy = proxy(command="abortTransaction", times=1, on_hit=lambda: watched.arm(mode="silent"))

    async def on_order(database: Any) -> None:
        await count(database)
        raise LookupError

    client = stocked.client(watched.uri(), **IMPATIENT)
    with pytest.raises(LookupError):
        await stocked.deliver(on_order, client, budget=0.5, recoverer=recovered.append)
    assert recovered == []


async def test_a_recoverers_result_is_the_handlers(stocked: Scene) -> None:
    async def on_order(database: Any) -> str:
        await count(database)
        raise LookupError

    assert await stocked.deliver(on_order, recoverer=lambda failure: failure.reason) == "failed"


async def test_a_recoverer_may_write_with_the_same_client(stocked: Scene) -> None:
    client = stocked.client()

    async def on_order(database: Any) -> str:
        await count(database)
        raise LookupError

    def recover(failure: Failure) -> Any:
        return client[stocked.name].dead.insert_one({"reason": failure.reason})

    await stocked.deliver(on_order, client, recoverer=recover)
    assert stocked.there.dead.count_documents({"reason": "failed"}) == 1
    assert stocked.documents() == [{"_id": 1, "n": 0}]


async def test_a_server_that_is_not_there_is_no_case_for_the_recoverer(stocked: Scene, proxy: ProxyFactory) -> None:
    recovered: list[Failure] = []
    lossy = proxy(mode="silent")
    with pytest.raises(PyMongoError):
        await stocked.deliver(count, stocked.client(lossy.uri(), **IMPATIENT), budget=0.5, recoverer=recovered.append)
    assert recovered == []
    assert stocked.runs == 0


async def test_an_answer_that_never_comes_in_a_statement_is_executed_again(stocked: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="update", mode="drop_reply", times=1)
    await stocked.deliver(count, stocked.client(lossy.uri(), **IMPATIENT))
    assert stocked.runs == 2
    assert stocked.documents() == [{"_id": 1, "n": 1}]


# what the record's views say


async def test_writes_are_applied_once_they_are_committed(stocked: Scene) -> None:
    records: list[Record] = []

    async def on_order(database: Any) -> None:
        record = current_record()
        assert record is not None
        records.append(record)
        await count(database)
        assert written(records) == [Outcome.UNKNOWN]

    await stocked.deliver(on_order)
    (view,) = records[0].writes
    assert (view.method, view.namespace, view.outcome, view.calls) == ("update_one", f"{stocked.name}.c", Outcome.APPLIED, 1)


async def test_reads_are_not_among_the_writes(stocked: Scene) -> None:
    records: list[Record] = []

    async def on_order(database: Any) -> None:
        record = current_record()
        assert record is not None
        records.append(record)
        await done(database.c.find_one({}))

    await stocked.deliver(on_order)
    assert records[0].writes == ()


async def test_writes_of_each_execution_are_its_own(stocked: Scene) -> None:
    records: list[Record] = []

    async def on_order(database: Any) -> None:
        record = current_record()
        assert record is not None
        records.append(record)
        await count(database)
        if stocked.runs == 1:
            raise LookupError

    await stocked.deliver(on_order, retry_on=LookupError)
    assert [record.execution for record in records] == [1, 2]
    assert written(records[:1]) == [Outcome.NOT_APPLIED]
    assert written(records) == [Outcome.APPLIED]


@only_async
async def test_a_cancelled_commit_is_settled_by_the_redelivery(stocked: Scene) -> None:
    name = app_name()
    client = stocked.client(appName=name)
    recovered: list[Failure] = []
    await stocked.cancel_held(name, "commitTransaction", stocked.deliver(count, client, recoverer=recovered.append))
    assert recovered == []
    await stocked.deliver(count)
    assert stocked.documents() == [{"_id": 1, "n": 1}]
