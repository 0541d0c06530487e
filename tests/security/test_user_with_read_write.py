"""A user who may read and write one database gets every promise: a slice of the campaign, with auth."""

from __future__ import annotations

from collections.abc import Callable

from tests.campaign.campaign import Campaign
from tests.campaign.grounds import OneNode
from tests.campaign.schedule import LANES, draw
from tests.conftest import FIGURE
from tests.support import Mongod
from tests.support.driving import RawClient

SEED = 11
RECORDS = 40


class LockedNode(OneNode):
    """A node that asks for a password; the lanes' user has readWrite on the campaign's database, where the markers are too."""

    def prepare(self, database: str) -> None:
        self.admin[database].command("createUser", "user", pwd="pwd", roles=["readWrite"])
        self.options.update(username="user", password="pwd", authSource=database)


def test_a_user_with_read_write_on_one_database_gets_every_promise(
    locked: Mongod, root: RawClient, record_property: Callable[[str, object], None]
) -> None:
    lanes = [lane for lane in LANES if lane.kind != "process"]
    ground = LockedNode(locked.port, root)
    try:
        report = Campaign(draw(SEED, RECORDS, lanes), ground).run()
    finally:
        root[ground.options["authSource"]].command("dropAllUsersFromDatabase")
    record_property(FIGURE, f"with auth: {report.table().splitlines()[0]}")
    assert not report.violations, "\n".join(report.violations)
    assert sum(report.observed.values()) >= RECORDS // 2
