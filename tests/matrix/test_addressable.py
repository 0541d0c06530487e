"""Replies lost and connections cut in mid-message: an addressable write has its effect once and its right result."""

from __future__ import annotations

from typing import Any

import pytest

from saferetry import Outcome
from tests.matrix.rows import (
    ADDRESSABLE,
    FIND_ONE_AND_UPDATE,
    INC,
    INSERT_ONE,
    MULTI_PLACES,
    ORDERED_BULK,
    PROJECTED,
)
from tests.matrix.runner import DRIVER_SENDS, LOST_TWICE, WRITE_COMMANDS, Fault, Ground, Row, Run, addresses

ONCE = (Fault("close", 1), Fault("cut", 1))
TWICE = (LOST_TWICE, Fault("cut", DRIVER_SENDS))  # the driver's own resend too
BOTH = frozenset(  # a row of every method; the others, with their options, meet the faults that go past the driver's resend
    {"insert_one", "insert_many", "insert_many-unordered", "update_one-inc", "replace_one", "delete_one"}
    | {"find_one_and_update-before", "find_one_and_replace-before", "find_one_and_delete"}
    | {"bulk_write-ordered-mixed", "bulk_write-unordered-mixed", "bulk_write-failing", "bulk_write-unordered-failing"}
    | {"insert_many-failing", "insert_many-unordered-failing"}
)
CELLS = [
    pytest.param(row, place, fault, id=f"{row}-{place}-{fault}")
    for row in ADDRESSABLE
    for place in range(len(row.commands))
    if place not in MULTI_PLACES.get(row.name, ())
    for fault in (*(ONCE if row.name in BOTH else ()), *TWICE)
]


def test_the_rows_named_for_all_faults_are_there() -> None:
    assert {row.name for row in ADDRESSABLE} >= BOTH


def assert_right(run: Run, row: Row, fault: Fault, ground: Ground) -> None:
    """Check what is not in the documents and the result: sends in their bound, an address for each command."""
    assert ground.proxy.hits == fault.times
    (view,) = run.writes
    assert view.outcome is not Outcome.UNKNOWN
    assert not getattr(run.answer, "__notes__", [])
    assert view.sends == ground.log.sends(*WRITE_COMMANDS)
    if row.loses_errors and ground.server < (5, 0):
        return  # more is sent there: each statement once more, alone
    assert view.sends == len(row.commands) + fault.times
    assert view.calls == len(row.commands) + fault.times // DRIVER_SENDS
    numbered = [command for command in ground.log.commands(*WRITE_COMMANDS) if "txnNumber" in command]
    assert len(numbered) == view.sends - len(MULTI_PLACES.get(row.name, ()))
    if len(numbered) == view.sends:
        assert len(set(addresses(ground.log))) == len(row.commands)


@pytest.mark.parametrize(("row", "place", "fault"), CELLS)
async def test_effect_once_and_the_undisturbed_result(row: Row, place: int, fault: Fault, ground: Ground) -> None:
    run = await ground.disturbed(row, fault, place=place)

    assert run.seen == await ground.undisturbed(row)
    assert_right(run, row, fault, ground)


@pytest.mark.parametrize("row", [INSERT_ONE, INC, FIND_ONE_AND_UPDATE, ORDERED_BULK], ids=str)
@pytest.mark.parametrize("mode", ["cut_reply", "drop_reply"])
async def test_a_reply_cut_or_never_coming_is_a_lost_one(row: Row, mode: Any, ground: Ground) -> None:
    """A dropped reply leaves the connection open: the client's socket timeout strikes."""
    fault = Fault(mode, DRIVER_SENDS)
    run = await ground.disturbed(row, fault, socketTimeoutMS=200)

    assert run.seen == await ground.undisturbed(row)
    assert_right(run, row, fault, ground)


@pytest.mark.parametrize("row", PROJECTED, ids=str)
async def test_the_projection_of_a_repeated_find_one_and_is_the_servers_limit(row: Row, ground: Ground) -> None:
    run = await ground.disturbed(row, LOST_TWICE)
    undisturbed = await ground.undisturbed(row)

    assert run.seen.left == undisturbed.left
    assert set(undisturbed.answer.items()) < set((run.answer | {"tags": ()}).items())  # the whole document: docs/limits.md
