"""Compare what a record costs in each way: `python -m benchmarks`.

Ratios only: the machine may be shared. Every line compares rounds that ran beside each other; in parentheses are the
quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pymongo

from benchmarks.measuring import Rounds, measure
from benchmarks.ways import WAYS, Effects, Place, Way, on_a_hot_document, on_documents_of_its_own
from saferetry.lab.mongod import Mongod
from saferetry.lab.replica_set import ReplicaSet

RAW, INBOX, BY_HAND = "raw, at least once", "inbox first, not atomic", "with_transaction + inbox"
TRANSACTION = 'saferetry "transaction"'
GOALS = ((BY_HAND, 0.95), (INBOX, 1.3))  # of TRANSACTION, one thread, one node


@dataclass(frozen=True)
class Case:
    """What is measured together."""

    nodes: int
    threads: int
    effects: Effects
    about: str
    is_judged: bool = False


CASES = (
    Case(1, 1, on_documents_of_its_own, "one node, one thread", is_judged=True),
    Case(1, 4, on_documents_of_its_own, "one node, four threads"),
    Case(1, 4, on_a_hot_document, "one node, four threads, a hot document"),
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
def prepared(uri: str, effects: Effects, ways: tuple[Callable[[Place], Way], ...]) -> Iterator[list[Way]]:
    """Give the ways, each with a database of its own, which is dropped."""
    made = []
    with pymongo.MongoClient[dict[str, Any]](uri, w="majority") as admin:
        for make in ways:
            name = f"bench_{uuid.uuid4().hex[:8]}"
            admin[name].stock.insert_many([{"_id": number, "left": 1_000_000} for number in range(1_000)])
            for collection in ("orders", "inbox"):
                admin[name].create_collection(collection)
            made.append((make(Place(uri, name, effects)), name))
        yield [way for way, _ in made]
        for way, name in made:
            way.close()
            admin.drop_database(name)


def report(case: Case, rounds: Rounds, ways: list[Way], records: int) -> list[str]:
    """Print a case's lines; return the goals that were missed."""
    columns = ("", "ms", "of raw", "of inbox first", "of by hand", "client CPU of raw")
    print("  {:26}{:>7}{:>19}{:>19}{:>19}{:>19}".format(*columns))
    for way in ways:
        ratios = [str(rounds.speed(way.name, baseline)) for baseline in (RAW, INBOX, BY_HAND)]
        ratios.append(str(rounds.cpu(way.name, RAW)))
        milliseconds = rounds.milliseconds(way.name, records)
        print(f"  {way.name:26}{milliseconds:7.2f}" + "".join(f"{ratio:>19}" for ratio in ratios))
    missed = []
    if case.is_judged:
        for baseline, goal in GOALS:
            ratio = rounds.speed(TRANSACTION, baseline)
            verdict = "met" if ratio.median >= goal else "within the noise" if ratio.high >= goal else "missed"
            print(f"  goal: {TRANSACTION} at least {goal} of {baseline}: {ratio}, {verdict}")
            if verdict == "missed":
                missed.append(f"{TRANSACTION} is {ratio} of {baseline}, not {goal}")
    return missed


def main() -> None:
    """Run the command line; exit with 1 if a goal is clearly missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each case (default 15)")
    parser.add_argument("--records", type=int, default=200, help="records of each way in a round (default 200)")
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
                with prepared(uri, case.effects, WAYS) as ways:
                    rounds = measure(ways, rounds=arguments.rounds, records=arguments.records, threads=case.threads, rng=rng)
                    missed += report(case, rounds, ways, arguments.records)
    sys.exit("\n".join(missed) or 0)


if __name__ == "__main__":
    main()
