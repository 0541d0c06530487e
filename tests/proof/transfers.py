"""Transfers between accounts, by consumers that are killed and stalled at random while somebody looks for a half-done one."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from saferetry.lab.processes import ProcessError, TellingProcess
from tests.proof.conftest import Ground
from tests.proof.work import MARKERS, Database, RawDatabase

ACCOUNTS = 12
EACH = 100  # money in each account at first; some transfers are refused for want of it
PARTITIONS = 3
_PARTITION = 1_000_000  # added to the positions for each partition, so that a position names a transfer


def prepare(database: RawDatabase) -> None:
    """Open the accounts."""
    database.accounts.insert_many([{"_id": number, "balance": EACH, "turnover": 0} for number in range(ACCOUNTS)])
    for name in ("audits", MARKERS):
        database.create_collection(name)


def transfer(database: Database, position: int) -> int:
    """Move money if there is enough, write it down, and change both accounts once more by an update_many."""
    choice = random.Random(position)
    source, target = choice.sample(range(ACCOUNTS), 2)
    amount = choice.randint(1, 60)
    account = database.accounts.find_one({"_id": source})
    moved = amount if account["balance"] >= amount else 0
    if moved:
        database.accounts.update_one({"_id": source}, {"$inc": {"balance": -moved}})
        database.accounts.update_one({"_id": target}, {"$inc": {"balance": moved}})
    database.audits.insert_one({"position": position, "source": source, "target": target, "moved": moved})
    database.accounts.update_many({"_id": {"$in": [source, target]}}, {"$inc": {"turnover": moved}})
    return moved


@dataclass(frozen=True)
class Books:
    """What is true at one moment of what the majority has."""

    balances: dict[int, int]
    turnover: int
    moved: dict[int, int]  # what the audits say of each account
    audits: int
    markers: int

    def faults(self) -> list[str]:
        """Return what no moment may show: money made or lost, a transfer done by half or twice."""
        expected = {account: EACH + self.moved.get(account, 0) for account in range(ACCOUNTS)}
        faults = []
        if self.balances != expected:
            faults.append(f"balances {self.balances} are not those of the audits {expected}")
        if sum(self.balances.values()) != ACCOUNTS * EACH:
            faults.append(f"all money is {sum(self.balances.values())}")
        if min(self.balances.values()) < 0:
            faults.append(f"an account is overdrawn: {self.balances}")
        if self.audits != self.markers:
            faults.append(f"{self.audits} audits, {self.markers} markers")
        return faults


_MOVED: list[dict[str, Any]] = [
    {
        "$project": {
            "sides": [
                {"account": "$source", "change": {"$subtract": [0, "$moved"]}},
                {"account": "$target", "change": "$moved"},
            ]
        }
    },
    {"$unwind": "$sides"},
    {"$group": {"_id": "$sides.account", "moved": {"$sum": "$sides.change"}, "sides": {"$sum": 1}}},
]


def look(client: MongoClient[dict[str, Any]], name: str) -> Books:
    """Look at the books, all of them at one moment: a snapshot of what the majority has."""
    with client.start_session() as session, session.start_transaction(ReadConcern("snapshot"), WriteConcern("majority")):
        database = client[name]
        accounts = list(database.accounts.find(session=session))
        moved = list(database.audits.aggregate(_MOVED, session=session))
        markers = database[MARKERS].count_documents({}, session=session)
    return Books(
        {account["_id"]: account["balance"] for account in accounts},
        sum(account["turnover"] for account in accounts),
        {side["_id"]: side["moved"] for side in moved},
        sum(side["sides"] for side in moved) // 2,
        markers,
    )


@dataclass
class Campaign:
    """Let three consumers do all transfers while they are killed, stalled and replaced.

    Attributes:
        kills: how often a consumer was killed.
        stalls: how often one was stopped, replaced, and continued beside the one that replaced it.
        reads: snapshots looked at meanwhile.
        faults: what they showed.
    """

    ground: Ground
    transfers: int
    rng: random.Random
    records_a_life: int = 5
    kills: int = 0
    stalls: int = 0
    reads: int = 0
    faults: list[str] = field(default_factory=list)
    _committed: dict[int, int] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)

    def positions(self, partition: int) -> range:
        """Return the positions of a partition."""
        count = self.transfers // PARTITIONS + (partition < self.transfers % PARTITIONS)
        return range(partition * _PARTITION, partition * _PARTITION + count)

    def run(self, more: int = 0) -> None:
        """Do all transfers that are not done yet, and so many more, and look at the books all the time."""
        self.transfers += more
        self._ended.clear()
        seeds = [self.rng.random() for _ in range(PARTITIONS)]
        with ThreadPoolExecutor(PARTITIONS + 1) as pool:
            reading = pool.submit(self._read)
            try:
                for consuming in [pool.submit(self._consume, number, seed) for number, seed in enumerate(seeds)]:
                    consuming.result()
            finally:
                self._ended.set()
            reading.result()

    def deliver_all_again(self) -> list[TellingProcess]:
        """Deliver every record once more, undisturbed; return the consumers."""
        workers = [self._worker(partition, list(self.positions(partition))) for partition in range(PARTITIONS)]
        for worker in workers:
            worker.wait_for("end", timeout=600)
        return workers

    def _worker(self, partition: int, positions: list[int]) -> TellingProcess:
        return self.ground.worker(
            *positions, work="transfer", subscription={"topic": "transfers", "partition": partition}, budget=55
        )

    def _consume(self, partition: int, seed: float) -> None:
        rng = random.Random(seed)
        positions = list(self.positions(partition))
        committed = self._committed.get(partition, 0)  # index of the first record whose offset was not committed
        stalled: TellingProcess | None = None
        while True:
            start = max(0, committed - rng.randint(0, 3))  # some are delivered again although they are done
            worker = self._worker(partition, positions[start:])
            if stalled is not None:
                self._told(worker, "done" if rng.random() < 0.5 else "execution")
                stalled.resume()
            life = rng.randint(1, 2 * self.records_a_life)
            if not self._follow(worker, life):
                break
            time.sleep(rng.uniform(0, 0.02))
            if stalled is not None:
                stalled.kill()
                stalled, self.kills = None, self.kills + 1
            if rng.random() < 0.3:
                worker.pause()
                stalled, self.stalls = worker, self.stalls + 1
            else:
                worker.kill()
                self.kills += 1
            committed = start + len(worker.told("done"))
            assert not worker.told("failed"), worker.told("failed")
        for process in (worker, stalled):
            if process is not None:
                assert not process.told("failed"), process.told("failed")
                process.close()
        assert all(not str(event["result"]).startswith("recovered") for event in worker.told("done"))
        self._committed[partition] = len(positions)

    def _follow(self, worker: TellingProcess, records: int) -> bool:
        """Wait until a consumer has done so many records; whether there is something left to do."""
        return all(self._told(worker, "done") for _ in range(records)) and not worker.told("end")

    @staticmethod
    def _told(worker: TellingProcess, event: str) -> bool:
        """Wait for an event; whether it came before the consumer was through."""
        try:
            worker.wait_for(event, timeout=120)
        except ProcessError:
            if worker.told("end"):
                return False
            raise
        return True

    def _read(self) -> None:
        with MongoClient[dict[str, Any]](self.ground.uri, serverSelectionTimeoutMS=10_000) as client:
            while not self._ended.is_set():
                try:
                    books = look(client, self.ground.name)
                except PyMongoError:
                    continue  # a failover, or a conflict with its own snapshot
                self.reads += 1
                self.faults += books.faults()
