"""The primary is killed -9 and restarted between the send and ours: the restarted server answers from its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import MongoClient

import saferetry
from saferetry import Outcome
from tests.matrix.rows import FIND_ONE_AND_UPDATE, INC, INSERT_ONE, ORDERED_BULK
from tests.matrix.runner import DRIVER_SENDS, Ground, Row, addresses, answer_of, seen
from tests.support import CommandLog, Mongod, Proxy, random_name

REMEMBERS_ALOUD = (6, 0)  # from this server on a reply names the statements that were answered from memory


@pytest.fixture(scope="module")
def mortal() -> Iterator[Mongod]:
    """A server that these tests kill and restart."""
    with Mongod() as server:
        yield server


@pytest.fixture
def mortal_ground(mortal: Mongod, log: CommandLog, guarded: Any, proxy: Callable[..., Proxy]) -> Iterator[Ground]:
    """The ground on that server."""
    with MongoClient[dict[str, Any]](mortal.uri) as admin:
        yield Ground(mortal, admin, log, proxy(target_port=mortal.port), guarded, random_name("test"))


@pytest.mark.parametrize(("row", "place"), [(INSERT_ONE, 0), (INC, 0), (FIND_ONE_AND_UPDATE, 0), (ORDERED_BULK, 1)], ids=str)
async def test_a_restarted_primary_knows_the_write(row: Row, place: int, mortal_ground: Ground) -> None:
    ground = mortal_ground
    lost = []

    def kill_and_restart_at_the_second() -> None:
        lost.append(row.commands[place])
        if len(lost) == DRIVER_SENDS:
            ground.mongod.restart()

    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri(w="majority", journal=True))
    ground.proxy.arm(mode="close", times=DRIVER_SENDS, command=row.commands[place], on_hit=kill_and_restart_at_the_second)
    async with saferetry.record() as record:
        answer = await answer_of(lambda: row.call(client[ground.name].c))

    assert ground.proxy.hits == DRIVER_SENDS
    assert seen(ground.left, answer) == await ground.undisturbed(row)
    (view,) = record.writes
    assert view.outcome is Outcome.APPLIED
    assert view.calls == len(row.commands) + 1
    assert view.sends == len(row.commands) + DRIVER_SENDS
    assert len(set(addresses(ground.log))) == len(row.commands)
    if ground.server >= REMEMBERS_ALOUD:
        replies = [event.reply for event in ground.log.succeeded_events if event.command_name == row.commands[place]]
        assert replies[0].keys() & {"retriedStmtIds", "retriedStmtId"}
