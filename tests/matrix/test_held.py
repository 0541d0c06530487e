"""The first copy is held in the engine, the client's socket timeout strikes: the second copy waits for the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest

import saferetry
from saferetry import Outcome, Settings
from tests.matrix.rows import FIND_ONE_AND_UPDATE, INC, INSERT_ONE, ORDERED_BULK
from tests.matrix.runner import STOCK, Ground, Row, addresses, answer_of, report_of, seen
from tests.support import (
    Operation,
    PeakCopies,
    app_name,
    copies,
    eventually,
    failpoint,
    hold_deletes,
    hold_find_and_modify,
    hold_inserts,
    hold_updates,
    running,
    wait_until_idle,
)

SOCKET_TIMEOUT_MS = 400
Hold = Callable[[Ground], AbstractContextManager[Callable[[], None]]]


@contextmanager
def hold_any_find_and_modify(ground: Ground) -> Iterator[Callable[[], None]]:
    """Hold findAndModify, on 4.4 too: there at the first yield, made to come at once."""
    if ground.server >= (5, 0):
        with hold_find_and_modify(ground.admin) as release:
            yield release
        return
    was = ground.admin.admin.command("setParameter", 1, internalQueryExecYieldIterations=1)["was"]
    try:
        with failpoint(ground.admin, "setYieldAllLocksHang", {"namespace": f"{ground.name}.c"}) as release:
            yield release
    finally:
        ground.admin.admin.command("setParameter", 1, internalQueryExecYieldIterations=was)


UPSERTED = Row(
    "find_one_and_update-upsert",
    lambda c: c.find_one_and_update({"sku": 7}, {"$inc": {"n": 1}}, upsert=True, return_document=True),
    ("findAndModify",),
)
DELETED = Row("delete_one", lambda c: c.delete_one({"n": {"$gt": 0}}), ("delete",))
HELD: dict[str, tuple[Row, Hold]] = {
    "insert_one": (INSERT_ONE, lambda ground: hold_inserts(ground.admin, f"{ground.name}.c")),
    "update_one": (INC, lambda ground: hold_updates(ground.admin, f"{ground.name}.c")),
    "delete_one": (DELETED, lambda ground: hold_deletes(ground.admin)),
    "find_one_and_update": (FIND_ONE_AND_UPDATE, hold_any_find_and_modify),
    "find_one_and_update-upsert": (UPSERTED, lambda ground: failpoint(ground.admin, "hangBeforeUpsertPerformsInsert")),
    "bulk_write-insert": (ORDERED_BULK, lambda ground: hold_inserts(ground.admin, f"{ground.name}.c")),
    "bulk_write-update": (ORDERED_BULK, lambda ground: hold_updates(ground.admin, f"{ground.name}.c")),
}


INTERRUPTIBLE_BEFORE_5 = {"insert_one", "delete_one", "bulk_write-insert"}  # there maxTimeMS ends them in time


def writes_of(ground: Ground, name: str) -> list[Operation]:
    """Return the writes that the server has at present from one client."""
    return [operation for operation in running(ground.admin, name) if operation.is_write]


def release_when_queued(ground: Ground, name: str, release: Callable[[], None], *, disconnect: bool) -> list[Operation]:
    """Wait until a copy is in the engine and another one waits for its session, then let go; return what was seen."""

    def both() -> list[Operation]:
        operations = writes_of(ground, name)
        return operations if {operation.in_engine for operation in operations} == {True, False} else []

    try:
        if disconnect:
            eventually(lambda: copies(writes_of(ground, name)))
            ground.proxy.disconnect()
        return eventually(both)
    finally:
        release()


@pytest.mark.parametrize("strike", ["socket timeout", "disconnect"])
@pytest.mark.parametrize("held", HELD)
async def test_a_held_copy_is_the_only_one_in_the_engine(held: str, strike: str, ground: Ground) -> None:
    """After a socket timeout the held copy is past its maxTimeMS and ends unwritten; after a disconnect it goes on."""
    row, hold = HELD[held]
    disconnect = strike == "disconnect" or (held in INTERRUPTIBLE_BEFORE_5 and ground.server < (5, 0))
    name = app_name()
    ground.prepare(ground.name, row)
    options = {} if disconnect else {"socketTimeoutMS": SOCKET_TIMEOUT_MS}
    client = ground.connect(ground.proxy.uri(**options), appName=name)
    with hold(ground) as release, ThreadPoolExecutor(1) as pool, PeakCopies(ground.admin, name) as watch:
        queued = pool.submit(release_when_queued, ground, name, release, disconnect=disconnect)
        async with saferetry.record() as record:
            answer = await answer_of(lambda: row.call(client[ground.name].c))
        operations = queued.result()
        wait_until_idle(ground.admin, name)

    assert copies(operations) == 1
    assert seen(ground.left, answer) == await ground.undisturbed(row)
    (view,) = record.writes
    assert view.outcome is Outcome.APPLIED
    assert view.sends > len(row.commands)
    assert len(set(addresses(ground.log))) == len(row.commands)
    assert watch.peak <= 1  # what was seen above is one of its looks, or none under load


async def test_a_held_copy_of_a_given_up_call_applies_nothing_later(ground: Ground) -> None:
    """The engine's copy is marked, the queued one cancelled: after the error nothing more happens."""
    name = app_name()
    ground.prepare(ground.name, INC)
    client = ground.connect(
        ground.proxy.uri(socketTimeoutMS=SOCKET_TIMEOUT_MS), appName=name, settings=Settings(max_attempts=1)
    )
    with hold_updates(ground.admin, f"{ground.name}.c"):
        async with saferetry.record() as record:
            exc = await answer_of(lambda: INC.call(client[ground.name].c))
        assert report_of(exc).decision == "attempts"
        assert record.writes[0].outcome is Outcome.UNKNOWN
    wait_until_idle(ground.admin, name)

    assert ground.documents() == list(STOCK)
    (killed,) = ground.log.commands("killSessions")
    assert [bytes(session["id"]) for session in killed["killSessions"]] == [addresses(ground.log)[0][0]]
