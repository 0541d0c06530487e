"""Money moved by consumers that are killed, stalled, replaced and failed over: every total exact, no half-done transfer."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from saferetry.lab.replica_set import ReplicaSet
from tests.proof import transfers, work
from tests.proof.conftest import Ground, on_replica_set
from tests.proof.transfers import ACCOUNTS, Campaign, look
from tests.proof.work import MARKERS
from tests.support import eventually

IS_LONG = bool(os.environ.get("PROOF_LONG"))  # make proof
TRANSFERS = 1_000 if IS_LONG else 90
LEAST_READS = 10_000 if IS_LONG else 100
SEED = 7
FORGETFUL = {
    "localLogicalSessionTimeoutMinutes": 1,
    "logicalSessionRefreshMillis": 5_000,
    "TransactionRecordMinimumLifetimeMinutes": 1,
}

pytestmark = [pytest.mark.timeout(1800 if IS_LONG else 300), pytest.mark.xdist_group("replica set")]


@contextmanager
def opened_bank(**parameters: object) -> Iterator[tuple[ReplicaSet, Ground]]:
    with ReplicaSet(parameters=parameters, proxied=False) as servers, on_replica_set(servers) as bank:
        transfers.prepare(bank.database)
        yield servers, bank


def check(bank: Ground, campaign: Campaign) -> None:
    books = look(bank.admin, bank.name)
    assert not campaign.faults
    assert not books.faults()
    positions = [position for partition in range(transfers.PARTITIONS) for position in campaign.positions(partition)]
    assert sorted(entry["position"] for entry in bank.database.audits.find()) == positions
    assert sorted(entry["_id"]["position"] for entry in bank.database[MARKERS].find()) == positions
    assert len(books.balances) == ACCOUNTS
    assert books.turnover == 2 * sum(entry["moved"] for entry in bank.database.audits.find())
    assert 0 < bank.database.audits.count_documents({"moved": 0}) < len(positions)


def run(campaign: Campaign, servers: ReplicaSet, show: Callable[[str], None], *, least_reads: int = LEAST_READS) -> None:
    """Do all transfers, with one step-down when a third of them is done."""

    def fail_over() -> None:
        audits = campaign.ground.database.audits
        eventually(lambda: audits.count_documents({}) > campaign.transfers // 3, timeout=600)
        servers.step_down()

    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        failing_over = pool.submit(fail_over)
        campaign.run()
        while campaign.reads < least_reads:
            campaign.run(more=TRANSFERS // 4)
        failing_over.result()
    show(
        f"{campaign.transfers} transfers by {transfers.PARTITIONS} consumers in {time.monotonic() - begin:.0f} s: "
        f"{campaign.kills} kills, {campaign.stalls} stalls, 1 step-down; {campaign.reads} snapshots of the books meanwhile, "
        f"{len(campaign.faults)} with a fault"
    )


def test_transfers_are_exact_whatever_dies(show: Callable[[str], None]) -> None:
    with opened_bank() as (servers, bank):
        campaign = Campaign(bank, TRANSFERS, random.Random(SEED))
        run(campaign, servers, show)
        check(bank, campaign)
        assert min(campaign.kills, campaign.stalls) >= 3
        assert campaign.reads >= LEAST_READS
        for worker in campaign.deliver_all_again():
            assert not worker.told("execution")
        check(bank, campaign)


if IS_LONG:

    def test_transfers_are_exact_after_the_server_has_forgotten_the_sessions(show: Callable[[str], None]) -> None:
        """A session nobody used for localLogicalSessionTimeoutMinutes is gone, and with it the newest number it had."""
        with opened_bank(**FORGETFUL) as (servers, bank):
            work.prepare(bank.database)
            campaign = Campaign(bank, 150, random.Random(SEED))
            run(campaign, servers, show, least_reads=100)
            check(bank, campaign)

            stalled = bank.worker(1, work="pausing_before_commit")
            stalled.wait_for("half")
            stalled.pause()
            assert bank.consumer().handle(1) == 1
            remembered = bank.admin.config.transactions.count_documents({})
            assert remembered > 0
            begin = time.monotonic()
            eventually(lambda: bank.admin.config.transactions.count_documents({}) == 0, timeout=400, interval=1)
            show(f"{remembered} sessions forgotten after {time.monotonic() - begin:.0f} s")

            stalled.resume()  # nobody knows any more that its number is old
            stalled.wait_for("end")
            assert [event["result"] for event in stalled.told("done")] == [None]
            assert bank.consumer().handle(1) is None
            for worker in campaign.deliver_all_again():
                assert not worker.told("execution")
            found = bank.effects()
            assert (found["orders"], found["taken"], found["changes"]) == ({1: 1}, 1, {1})
            bank.database[MARKERS].delete_many({"_id.stream": "orders"})
            check(bank, campaign)
