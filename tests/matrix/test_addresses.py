"""Addresses: one command each, reused when away from the driver's sessions, and cancelled alone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pymongo import InsertOne, UpdateOne
from pymongo.errors import AutoReconnect, DuplicateKeyError
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent
from pymongo.server_description import ServerDescription

import saferetry
from saferetry import Outcome, Settings
from tests.matrix.rows import FIND_ONE_AND_UPDATE, INC, INSERT_ONE, ORDERED_BULK
from tests.matrix.runner import (
    DRIVER_SENDS,
    STOCK,
    WRITE_COMMANDS,
    Fault,
    Ground,
    Row,
    addresses,
    answer_of,
    report_of,
    seen,
)
from tests.support import CommandLog, app_name, copies, eventually, hold_inserts, hold_updates, running, wait_until_idle
from tests.support.driving import Api, done
from tests.support.older import BLOCKS_THE_EVENT_LOOP

ONCE = Settings(max_attempts=1)
PATIENT = Settings(max_attempts=100, backoff_base_ms=1, backoff_cap_ms=5, seed=1)
EMPTY = Row("empty", lambda c: None, ())
OF_THE_DRIVER = frozenset({"$clusterTime", "maxTimeMS", "$readPreference", "comment"})


def start(api: Api, work: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
    """Start some work beside the test: in a thread of its own, or as a task."""
    if api.is_async:
        return asyncio.ensure_future(work())
    return asyncio.ensure_future(asyncio.to_thread(_run, work))


def _run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main())


async def until(predicate: Callable[[], Any]) -> None:
    """Wait for something while what was started goes on."""
    await asyncio.to_thread(eventually, predicate)


def lsids(log: CommandLog, *names: str) -> set[bytes]:
    """Return the session ids that commands were sent on."""
    return {bytes(command["lsid"]["id"]) for command in log.commands(*names)}


# --- one command each ------------------------------------------------------------------------------------------------------


async def test_no_two_commands_ever_share_an_address(api: Api, ground: Ground) -> None:
    """Many threads or tasks, every seventh reply lost: what is sent twice at an address is the same command."""
    ground.prepare(ground.name, EMPTY)
    client = ground.connect(ground.proxy.uri(), settings=PATIENT)
    collection = client[ground.name].c

    async def work(worker: int) -> None:
        async with saferetry.record(("stream", worker, 0)):
            for turn in range(10):
                await done(collection.insert_one({"worker": worker, "turn": turn}))
                await done(collection.update_one({"_id": 1}, {"$inc": {"n": 1}}))
                await done(collection.find_one_and_update({"_id": 2}, {"$inc": {"n": 1}}))
                await done(collection.insert_many([{"w": worker, "t": turn, "i": i} for i in range(3)]))
                await done(
                    collection.bulk_write(
                        [InsertOne({"b": worker}), UpdateOne({"_id": 3}, {"$inc": {"n": 1}}), InsertOne({"b": turn})]
                    )
                )

    ground.proxy.arm(needle=ground.name.encode(), mode="close", times=10_000, every=7)
    await asyncio.gather(*(start(api, functools.partial(work, worker)) for worker in range(8)))

    assert ground.proxy.hits > 50
    bodies: dict[tuple[bytes, int], Any] = {}
    for command in ground.log.commands(*WRITE_COMMANDS):
        assert "stmtIds" not in command
        assert "stmtId" not in command
        assert "txnNumber" in command
        body = {name: value for name, value in command.items() if name not in OF_THE_DRIVER}
        address = bytes(body.pop("lsid")["id"]), body.pop("txnNumber")
        assert bodies.setdefault(address, body) == body
    assert len(bodies) == 8 * 10 * 7
    assert [document["n"] for document in ground.left.c.find({"_id": {"$lte": 3}}, sort=[("_id", 1)])] == [81, 82, 83]
    assert ground.left.c.count_documents({}) == 3 + 8 * 10 * 6


async def test_a_session_id_is_used_again_with_the_next_number(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri())
    for position in range(2):
        async with saferetry.record(("stream", 0, position)):
            for turn in range(10):
                await done(client[ground.name].c.insert_one({"turn": turn}))

    used = addresses(ground.log)
    assert len({lsid for lsid, _, _ in used}) == 1
    assert [number for _, number, _ in used] == list(range(1, 21))


async def test_the_commands_of_one_bulk_share_a_session_id_one_after_another(ground: Ground) -> None:
    """Each is acknowledged before the next is sent; else a long bulk of mixed kinds takes a session for every command."""
    client = ground.connect(ground.proxy.uri())
    requests: list[InsertOne[Any] | UpdateOne] = [
        InsertOne({}) if place % 2 else UpdateOne({"_id": 99}, {"$set": {"n": 1}}) for place in range(20)
    ]
    async with saferetry.record():
        await done(client[ground.name].c.bulk_write(requests))

    used = addresses(ground.log)
    assert [number for _, number, _ in used] == list(range(1, 21))
    assert len({lsid for lsid, _, _ in used}) == 1


async def test_threads_and_tasks_need_a_session_id_each_and_no_more(api: Api, ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri())

    async def work(worker: int) -> None:
        async with saferetry.record(("stream", worker, 0)):
            for turn in range(20):
                await done(client[ground.name].c.insert_one({"worker": worker, "turn": turn}))

    await asyncio.gather(*(start(api, functools.partial(work, worker)) for worker in range(8)))

    used = addresses(ground.log)
    assert len(used) == len(set(used)) == 8 * 20
    assert len({lsid for lsid, _, _ in used}) <= 8


async def test_a_definite_error_gives_the_session_id_back(ground: Ground) -> None:
    client = ground.connect(ground.proxy.uri())
    async with saferetry.record():
        for _ in range(3):
            with contextlib.suppress(DuplicateKeyError):
                await done(client[ground.name].c.insert_one({"_id": 1}))

    assert len(lsids(ground.log, "insert")) == 1
    assert ground.log.sends("killSessions") == 0


@pytest.mark.parametrize("row", [INSERT_ONE, INC, FIND_ONE_AND_UPDATE, ORDERED_BULK], ids=str)
async def test_an_unknown_outcome_keeps_the_session_id_from_other_writes(row: Row, ground: Ground) -> None:
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command=row.commands[0])
    async with saferetry.record():
        exc = await answer_of(lambda: row.call(client[ground.name].c))
        unknown = lsids(ground.log, *WRITE_COMMANDS)
        ground.log.clear()
        for turn in range(5):
            await done(client[ground.name].c.insert_one({"turn": turn}))
    await done(client[ground.name].c.insert_one({"turn": "outside"}))

    assert type(exc) is AutoReconnect
    assert len(unknown) == 1
    assert not unknown & lsids(ground.log, "insert")


@pytest.mark.parametrize("row", [INC, FIND_ONE_AND_UPDATE, ORDERED_BULK], ids=str)
async def test_what_was_sent_with_a_number_is_never_sent_without(
    row: Row, ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a lost reply a server may look for a moment as if it took no retryable writes.

    So does a primary that was restarted (a hello that came before its election), or one just marked unknown by the monitor:
    the driver then sends without a number, on a first send of a call, and the server would run the write a second time.
    """
    lost = []

    def not_a_primary_at_the_second() -> None:
        lost.append(row.commands[0])
        if len(lost) == DRIVER_SENDS:
            monkeypatch.setattr(ServerDescription, "retryable_writes_supported", property(lambda self: False))

    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command=row.commands[0], on_hit=not_a_primary_at_the_second)
    async with saferetry.record() as record:
        answer: Any = await answer_of(lambda: row.call(client[ground.name].c))
    monkeypatch.undo()

    assert ground.proxy.hits == DRIVER_SENDS
    assert all("txnNumber" in command for command in ground.log.commands(row.commands[0]))
    undisturbed = await ground.undisturbed(row)
    if isinstance(answer, Exception):
        assert record.writes[0].outcome is Outcome.UNKNOWN
        assert report_of(answer).decision != "final"
    else:
        assert seen(ground.left, answer) == undisturbed
    if len(row.commands) == 1:
        assert seen(ground.left, None).left == undisturbed.left


async def test_a_server_that_looks_right_again_gets_the_resend(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for two looks only: the write then goes through."""
    lost, looks = [], []

    def not_a_primary_for_two_looks() -> None:
        lost.append(1)
        if len(lost) == DRIVER_SENDS:
            monkeypatch.setattr(ServerDescription, "retryable_writes_supported", property(look))

    def look(self: ServerDescription) -> bool:
        looks.append(1)
        return len(looks) > 2

    ground.prepare(ground.name, INC)
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command="update", on_hit=not_a_primary_for_two_looks)
    async with saferetry.record() as record:
        answer = await answer_of(lambda: INC.call(client[ground.name].c))

    assert seen(ground.left, answer) == await ground.undisturbed(INC)
    assert all("txnNumber" in command for command in ground.log.commands("update"))
    assert record.writes[0].outcome is Outcome.APPLIED


# --- away from the driver's sessions ---------------------------------------------------------------------------------------


async def interrupted(ground: Ground, row: Row, client: Any) -> Any:
    """Make a call that a KeyboardInterrupt ends while it is sent."""
    try:
        return await done(row.call(client[ground.name].c))
    except KeyboardInterrupt as exc:
        return exc


class Interrupter(CommandListener):
    """Raise KeyboardInterrupt as if Ctrl-C were pressed while a command is answered, once."""

    def __init__(self) -> None:
        self.armed_for = ""

    def started(self, event: CommandStartedEvent) -> None:
        """Do nothing."""

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Interrupt."""
        if event.command_name == self.armed_for:
            self.armed_for = ""
            raise KeyboardInterrupt

    def failed(self, event: CommandFailedEvent) -> None:
        """Do nothing."""


UPDATE_MANY = Row("update_many", lambda c: c.update_many({}, {"$inc": {"n": 1}}), ("update",))
MERGED = Row("merge", lambda c: c.aggregate([{"$merge": {"into": "copy"}}]), ("aggregate",))
ENDINGS = ("lost", "cut", "refused", "interrupted")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("row", [INSERT_ONE, INC, FIND_ONE_AND_UPDATE, ORDERED_BULK, UPDATE_MANY, MERGED], ids=str)
async def test_ordinary_writes_after_a_failed_one_are_applied(row: Row, ending: str, ground: Ground) -> None:
    """A session of ours in the driver's pool would swallow them."""
    ground.prepare(ground.name, row)
    interrupter = Interrupter()
    client = ground.connect(ground.proxy.uri(), settings=ONCE, event_listeners=[ground.log, interrupter])
    if ending in ("lost", "cut"):
        mode: Any = {"lost": "close", "cut": "cut"}[ending]
        ground.proxy.arm(mode=mode, times=DRIVER_SENDS, command=row.commands[0])
    elif ending == "interrupted":
        interrupter.armed_for = row.commands[0]
    async with saferetry.record():
        if ending == "refused":
            await answer_of(lambda: client[ground.name].c.insert_one({"_id": 1}))
        else:
            answer = await interrupted(ground, row, client) if ending == "interrupted" else None
            if answer is None:
                await answer_of(lambda: row.call(client[ground.name].c))
    ours = lsids(ground.log, *WRITE_COMMANDS, "aggregate")
    ground.log.clear()

    for turn in range(10):  # more than the driver's pool could hold of one call
        await done(client[ground.name].ordinary.insert_one({"_id": turn}))
        await done(client[ground.name].ordinary.update_one({"_id": turn}, {"$set": {"n": 1}}))

    assert ours
    assert not ours & lsids(ground.log, *WRITE_COMMANDS)
    assert [document["n"] for document in ground.left.ordinary.find()] == [1] * 10


class Auditor(CommandListener):
    """Write a document through the same client for every insert into the collection `c`, while that is being sent."""

    def __init__(self) -> None:
        self.client: Any = None
        self.tasks: list[Any] = []

    def started(self, event: CommandStartedEvent) -> None:
        """Write."""
        if event.command_name == "insert" and event.command["insert"] == "c":
            answer = self.client[event.database_name].audit.insert_one({"request": event.request_id})
            if asyncio.iscoroutine(answer):
                self.tasks.append(asyncio.ensure_future(answer))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Do nothing."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Do nothing."""


async def test_a_listener_that_writes_does_not_ride_on_the_address(ground: Ground) -> None:
    auditor = Auditor()
    client = ground.connect(ground.proxy.uri(), event_listeners=[ground.log, auditor])
    auditor.client = client
    ground.proxy.arm(needle=b"\x02insert\x00\x02\x00\x00\x00c\x00", mode="close", times=DRIVER_SENDS)
    async with saferetry.record():
        result = await done(client[ground.name].c.insert_one({"x": 1}))
        await asyncio.gather(*auditor.tasks)

    assert ground.proxy.hits == DRIVER_SENDS
    assert [document["_id"] for document in ground.documents()] == [result.inserted_id]
    assert ground.left.audit.count_documents({}) == DRIVER_SENDS + 1
    # The last task may only run when the call is over, and then be one of the record with the session's next number.
    inserts = ground.log.commands("insert")
    ours = {(bytes(command["lsid"]["id"]), command["txnNumber"]) for command in inserts if command["insert"] == "c"}
    audits = {(bytes(command["lsid"]["id"]), command.get("txnNumber")) for command in inserts if command["insert"] == "audit"}
    assert len(ours) == 1
    assert not ours & audits


# --- cancelled alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [INSERT_ONE, INC, FIND_ONE_AND_UPDATE, ORDERED_BULK, UPDATE_MANY, MERGED], ids=str)
async def test_a_given_up_write_cancels_its_own_session_and_no_other(row: Row, ground: Ground) -> None:
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri(), settings=ONCE)
    await done(client[ground.name].c.find_one())  # a session in the driver's pool
    async with saferetry.record():
        await done(client[ground.name].other.insert_one({}))  # one in ours
        ground.log.clear()
        ground.proxy.arm(mode="close", times=DRIVER_SENDS, command=row.commands[0])
        exc = await answer_of(lambda: row.call(client[ground.name].c))

    assert type(exc) is AutoReconnect
    (killing,) = ground.log.commands("killSessions")
    assert [bytes(session["id"]) for session in killing["killSessions"]] == list(lsids(ground.log, *row.commands[:1]))
    assert bytes(killing["lsid"]["id"]) not in lsids(ground.log, *row.commands[:1])


async def test_a_write_that_gets_through_cancels_nothing(ground: Ground) -> None:
    run = await ground.disturbed(INC, Fault("close", 3 * DRIVER_SENDS))

    assert run.answer.modified_count == 1
    assert ground.log.sends("killSessions") == 0


async def test_what_else_the_client_does_lives_on(api: Api, ground: Ground) -> None:
    """An insert of the same client is held in the engine while another write is given up and cancelled."""
    if api.is_async and BLOCKS_THE_EVENT_LOOP:
        pytest.skip("PyMongo 4.9: while a reply is waited for, killSessions is not even sent in its one second")
    name = app_name()
    ground.prepare(ground.name, EMPTY)
    client = ground.connect(ground.proxy.uri(), settings=ONCE, appName=name)

    async def insert() -> Any:
        async with saferetry.record():
            return await done(client[ground.name].held.insert_one({"_id": "alive"}))

    with hold_inserts(ground.admin, f"{ground.name}.held"):
        held = start(api, insert)
        await until(lambda: copies(running(ground.admin, name)) == 1)
        ground.proxy.arm(mode="close", times=DRIVER_SENDS, command="update")
        async with saferetry.record():
            exc = await answer_of(lambda: INC.call(client[ground.name].c))
        assert ground.log.sends("killSessions") == 1
    result = await held

    assert type(exc) is AutoReconnect
    assert result.inserted_id == "alive"
    assert list(ground.left.held.find()) == [{"_id": "alive"}]


@pytest.mark.parametrize("api", ["async"], indirect=True)
@pytest.mark.parametrize("row", [INC, UPDATE_MANY], ids=str)
async def test_a_cancelled_task_leaves_nothing_that_applies_later(row: Row, ground: Ground) -> None:
    name = app_name()
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri(), appName=name)
    with hold_updates(ground.admin, f"{ground.name}.c"):
        async with saferetry.record() as record:
            task = asyncio.ensure_future(row.call(client[ground.name].c))
            await until(lambda: copies(running(ground.admin, name)) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert record.writes[0].outcome is Outcome.UNKNOWN
    wait_until_idle(ground.admin, name)

    assert ground.documents() == list(STOCK)
    (killing,) = ground.log.commands("killSessions")
    assert [bytes(session["id"]) for session in killing["killSessions"]] == list(lsids(ground.log, "update"))
    used = lsids(ground.log, "update")
    ground.log.clear()
    for turn in range(5):
        await done(client[ground.name].ordinary.insert_one({"_id": turn}))
    assert ground.left.ordinary.count_documents({}) == 5
    assert not used & lsids(ground.log, "insert")


async def test_with_cancel_off_nothing_is_cancelled(ground: Ground) -> None:
    run = await ground.disturbed(INC, Fault("close", 100), settings=Settings(max_attempts=1, cancel=False))

    assert type(run.answer) is AutoReconnect
    assert ground.log.sends("killSessions") == 0
