"""A slice of the campaign: 300 records on one node; `make campaign-long` does the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.campaign.campaign import Campaign
from tests.campaign.grounds import OneNode
from tests.campaign.schedule import KINDS, Plan, draw, draw_held, draw_plan
from tests.conftest import FIGURE, RawClient
from tests.support import Mongod

RECORDS = 50
SEEDS = range(1, 7)
_DIFFERENT_KINDS = 6  # which of them are drawn depends on the seed, and a fault counts only if it took place

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_that_must_not_be_is_seen(
    seed: int, mongod: Mongod, admin: RawClient, record_property: Callable[[str, object], None]
) -> None:
    report = Campaign(draw(seed, RECORDS), OneNode(mongod.port, admin)).run()
    record_property(FIGURE, f"seed {seed}: {report.table()}")
    assert not report.violations, "\n".join(report.violations)
    assert report.records == RECORDS
    assert len({kind for kind, _ in report.observed}) >= _DIFFERENT_KINDS


def test_a_record_is_drawn_from_seed_and_number_alone() -> None:
    plans = draw(7, 20).plans
    assert draw(7, 5, first=10).plans == plans[10:15]
    assert len(set(map(repr, plans))) == len(plans)


def test_a_plan_is_data() -> None:
    for plan in draw(8, 50).plans:
        assert Plan.of_json(plan.as_json()).as_json() == plan.as_json()


def test_every_kind_of_fault_is_drawn() -> None:
    plans = [draw_plan(9, number, draw(9, 1).lanes) for number in range(600)]
    drawn = {fault.kind for plan in plans for delivery in plan.deliveries for fault in delivery.faults}
    drawn |= {fault.kind for delivery in draw_held(9, 1).plans[0].deliveries for fault in delivery.faults}
    drawn |= {fault.kind for plan in draw(9, 200, nodes=3).plans for delivery in plan.deliveries for fault in delivery.faults}
    assert drawn == set(KINDS)
