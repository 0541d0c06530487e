"""The campaign sees what is wrong: each mutant is caught on its schedule, and nothing is seen there without it."""

from __future__ import annotations

import pytest

from tests.campaign.controls import BEFORE_5, QUICK, REPLICA_SET, SCHEDULES, play
from tests.campaign.grounds import OneNode
from tests.campaign.mutants import MUTANTS
from tests.conftest import RawClient
from tests.support import Mongod

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("name", [name for name in QUICK if name not in BEFORE_5])
def test_a_mutant_is_caught(name: str, mongod: Mongod, admin: RawClient) -> None:
    """`make mutants` plays those too that need processes to be killed, three nodes, or older servers."""
    outcome = play(name, OneNode(mongod.port, admin))
    assert not outcome.unmutated, outcome.line()
    assert outcome.seen, outcome.line()


def test_every_mutant_has_a_schedule() -> None:
    assert set(MUTANTS) == set(SCHEDULES) | {REPLICA_SET}
