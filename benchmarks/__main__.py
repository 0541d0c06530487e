"""Compare what a record costs in each way: `python -m benchmarks`.

Ratios only: the machine may be shared. Every line compares rounds that ran beside each other; in parentheses are the
quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pymongo

from benchmarks.importing import import_ratio
from benchmarks.measuring import Ratio, Rounds, measure
from benchmarks.ways import CALLS, WAYS, Effects, Place, Way, Ways, on_a_hot_document, on_documents_of, on_documents_of_its_own
from saferetry.lab.mongod import Mongod
from saferetry.lab.replica_set import ReplicaSet

RAW, INBOX = "raw, at least once", "inbox first, not atomic"
BY_HAND, EXPIRING = "with_transaction + inbox", "by hand, expiring inbox"
_LABELS = {RAW: "raw", INBOX: "inbox first", BY_HAND: "by hand", EXPIRING: "expiring"}  # of the columns
AGAIN, OUTSIDE = "raw again", "saferetry, no record"
PROCESS, TRANSACTION = 'saferetry "process"', 'saferetry "transaction"'


@dataclass(frozen=True)
class Goal:
    """What a ratio should reach: at least so much speed, or at most so much of the client's processor time."""

    way: str
    baseline: str
    at_least: float | None = None
    cpu_at_most: float | None = None

    def check(self, rounds: Rounds) -> str:
        """Print how it stands; return what was clearly missed, or an empty text."""
        if self.at_least is not None:
            ratio, aim = rounds.speed(self.way, self.baseline), f"at least {self.at_least}"
            is_met, may_be_met = ratio.median >= self.at_least, ratio.high >= self.at_least
        else:
            most = self.cpu_at_most or rounds.cpu(AGAIN, self.baseline).high  # else the noise of raw against itself
            ratio, aim = rounds.cpu(self.way, self.baseline), f"client CPU at most {most:.2f}"
            is_met, may_be_met = ratio.median <= most, ratio.low <= most
        verdict = "met" if is_met else "within the noise" if may_be_met else "missed"
        print(f"  goal: {self.way}, {aim} of {self.baseline}: {ratio}, {verdict}")
        return f"{self.way}: {ratio} of {self.baseline}, not {aim}" if verdict == "missed" else ""


OF_RECORDS = (Goal(TRANSACTION, EXPIRING, at_least=0.95), Goal(TRANSACTION, INBOX, at_least=1.3))
OF_CALLS = (Goal(OUTSIDE, RAW), Goal(PROCESS, RAW, cpu_at_most=1.25), Goal(PROCESS, RAW, at_least=0.95))
IMPORT_AT_MOST = 1.3


@dataclass(frozen=True)
class Case:
    """What is measured together."""

    nodes: int
    threads: int
    effects: Effects
    about: str
    goals: tuple[Goal, ...] = ()
    ways: Ways = WAYS


CASES = (
    Case(1, 1, on_documents_of_its_own, "one node, one thread", OF_RECORDS),
    Case(1, 4, on_documents_of_its_own, "one node, four threads"),
    Case(1, 4, on_a_hot_document, "one node, four threads, a hot document"),
    Case(1, 1, on_documents_of(1_000), "calls, one node, one thread, documents of 1 kB", OF_CALLS, CALLS),
    Case(1, 1, on_documents_of(100_000), "calls, one node, one thread, documents of 100 kB", OF_CALLS, CALLS),
    Case(3, 1, on_documents_of_its_own, "three nodes, one thread"),
    Case(3, 4, on_documents_of_its_own, "three nodes, four threads"),
    Case(3, 4, on_a_hot_document, "three nodes, four threads, a hot document"),
)


@contextmanager
def server(nodes: int) -> Iterator[tuple[str, str]]:
    """Give the URI and the version of a server with so many nodes."""
    if nodes == 1:
        with Mongod() as mongod:
            yield mongod.uri, mongod.version
    else:
        with ReplicaSet(nodes, proxied=False) as servers:
            yield servers.uri, servers.version


@contextmanager
def prepared(uri: str, case: Case) -> Iterator[list[Way]]:
    """Give the ways, each with a database of its own, which is dropped."""
    made = []
    with pymongo.MongoClient[dict[str, Any]](uri, w="majority") as admin:
        for make in case.ways:
            name = f"bench_{uuid.uuid4().hex[:8]}"
            admin[name].stock.insert_many([{"_id": number, "left": 1_000_000} for number in range(1_000)])
            for collection in ("orders", "inbox"):
                admin[name].create_collection(collection)
            made.append((make(Place(uri, name, case.effects)), name))
        yield [way for way, _ in made]
        for way, name in made:
            way.close()
            admin.drop_database(name)


def report(case: Case, rounds: Rounds, ways: list[Way], records: int) -> list[str]:
    """Print a case's lines; return the goals that were missed."""
    baselines = [name for name in (RAW, INBOX, BY_HAND, EXPIRING) if any(way.name == name for way in ways)]
    columns = ["ms", *(f"of {_LABELS[name]}" for name in baselines), "client CPU of raw"]
    print(f"  {'':26}{columns[0]:>7}" + "".join(f"{column:>27}" for column in columns[1:]))
    for way in ways:
        ratios: list[Ratio] = [rounds.speed(way.name, baseline) for baseline in baselines]
        ratios.append(rounds.cpu(way.name, RAW))
        print(f"  {way.name:26}{rounds.milliseconds(way.name, records):7.2f}" + "".join(f"{ratio!s:>27}" for ratio in ratios))
    return [missed for goal in case.goals if (missed := goal.check(rounds))]


def measure_import(rounds: int) -> list[str]:
    """Print what importing costs; return the goal if it was missed."""
    ratio = import_ratio(rounds)
    print(f"importing saferetry: processor time {ratio} of importing PyMongo; goal: at most {IMPORT_AT_MOST}")
    return [f"importing saferetry: {ratio}, not at most {IMPORT_AT_MOST}"] if ratio.low > IMPORT_AT_MOST else []


def main() -> None:
    """Run the command line; exit with 1 if a goal is clearly missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each case (default 60)")
    parser.add_argument("--records", type=int, default=50, help="records of each way in a round (default 50)")
    parser.add_argument("--nodes", type=int, choices=(1, 3), help="only with so many nodes")
    parser.add_argument("--only", default="", help="only the cases whose description holds this text")
    arguments = parser.parse_args()
    rng = random.Random()  # noqa: S311 - the order of the ways
    missed: list[str] = []
    for nodes in (1, 3):
        cases = [case for case in CASES if case.nodes == nodes and arguments.only in case.about]
        if not cases or arguments.nodes not in (None, nodes):
            continue
        with server(nodes) as (uri, version):
            print(f"mongod {version}, PyMongo {pymongo.version}, Python {sys.version.split()[0]}; w: majority everywhere")
            for case in cases:
                print(f"{case.about}: {arguments.rounds} rounds of {arguments.records} records")
                with prepared(uri, case) as ways:
                    rounds = measure(ways, rounds=arguments.rounds, records=arguments.records, threads=case.threads, rng=rng)
                    missed += report(case, rounds, ways, arguments.records)
    if arguments.only in "importing" and arguments.nodes is None:
        missed += measure_import(max(2, arguments.rounds))
    sys.exit("\n".join(missed) or 0)


if __name__ == "__main__":
    main()
