"""Controls: each mutant on a schedule that shows what it does wrong, and the same schedule on saferetry as it is.

`python -m tests.campaign.controls` (`make mutants`) plays all of them; exit code 1 if one survives, or if a schedule shows a
fault without its mutant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pymongo
from pymongo import common
from pymongo.read_concern import ReadConcern

from saferetry.lab.replica_set import ReplicaSet
from tests.campaign import drawing
from tests.campaign.campaign import Campaign, prepare
from tests.campaign.grounds import Ground, one_node
from tests.campaign.handling import Handler, connect
from tests.campaign.mutants import MUTANTS
from tests.campaign.oracle import state_of
from tests.campaign.schedule import PATIENT, Delivery, Fault, Lane, Plan, Schedule, draw_held
from tests.campaign.steps import Step
from tests.support import random_name
from tests.support.driving import run_without_waiting

SYNC = PATIENT.name
PROCESS = Lane("process", "process", socket_timeout=3.0)
REPLICA_SET = "commit of one node"  # played on three nodes


def _update(method: str = "update_one", **more: Any) -> Step:
    which = {"owner": "@o"} if method == "update_many" else {"_id": "@o:1"}
    return Step(method, {"filter": which, "update": {"$inc": {"n": 1}}}, **more)


def _lost(place: int, times: int) -> Fault:
    return Fault("lost reply", place, times)


def _error(place: int, code: int, times: int = 1) -> Fault:
    return Fault("server error", place, times, code=code)


def _plan(*steps: Step, faults: Sequence[Fault] = (), number: int = 0, guarantee: str = "process", **more: Any) -> Plan:
    deliveries = more.pop("deliveries", (Delivery(SYNC, tuple(faults)),))
    return Plan(f"r{number:06d}", guarantee, steps, deliveries, **more)  # type: ignore[arg-type]  # a guarantee by its name


def _on(*plans: Plan, must_be_done: bool = False) -> Schedule:
    return Schedule(0, (PATIENT, PROCESS), plans, is_patient=True, must_be_done=must_be_done)


_INSERT = Step("insert_one", {"document": {"owner": "@o", "n": 1}})
_REFILL = Step(
    "bulk_write",
    {"requests": [["DeleteOne", {"filter": {"_id": "@o:7"}}], ["InsertOne", {"document": {"_id": "@o:7", "owner": "@o"}}]]},
)
_MIXED = Step(
    "bulk_write",
    {
        "requests": [
            ["UpdateOne", {"filter": {"_id": "@o:1"}, "update": {"$inc": {"n": 1}}}],
            ["UpdateMany", {"filter": {"_id": {"$in": ["@o:2", "@o:3"]}}, "update": {"$inc": {"n": 1}}}],
        ]
    },
)
_TWO_KINDS = Step("bulk_write", {"requests": [["InsertOne", {"document": {"owner": "@o"}}], *_MIXED.arguments["requests"][:1]]})
_UNORDERED = Step(
    "insert_many",
    {"documents": [{"_id": f"@o:{key}", "owner": "@o"} for key in (7, 1, 8)], "ordered": False},
    catches=True,
)
_CAUGHT = Step("insert_one", {"document": {"_id": "@o:1", "owner": "@o"}}, catches=True)
_KILLED = (Delivery(PROCESS.name, (Fault("process killed after", 2),)), Delivery(SYNC))
_STOPPED = Delivery(PROCESS.name, (Fault("process stopped", 2, delay=1.5),), SYNC, (_error(2, 8000),), twin_after=0.7)

SCHEDULES: Mapping[str, Schedule] = {
    "PyMongo, handler retried": _on(_plan(_update(), _update("update_many"), faults=[_lost(1, 1)])),
    "PyMongo, calls retried": _on(_plan(_update(), faults=[_lost(0, 2)])),
    "one driver call": _on(_plan(_REFILL, faults=[_lost(1, 2)])),
    "multi among others": _on(_plan(_MIXED, faults=[_lost(0, 1)]), must_be_done=True),
    "no address": _on(_plan(_update(), faults=[_lost(0, 2)])),
    "new address each time": _on(_plan(_update(), faults=[_lost(0, 2)])),
    "same number": _on(_plan(_update(), _update())),
    "last error counts": _on(_plan(_update(), faults=[_lost(0, 1), _error(1, 11601, 4)], retries=True)),
    "unnumbered sent again": _on(_plan(_update("update_many"), faults=[_lost(0, 1)])),
    "executed again after an effect": _on(_plan(_update(), Step("fail", {"times": 1}))),
    "last result only": _on(_plan(_TWO_KINDS)),
    "repetition is another write": _on(_plan(_update(tries=2), faults=[_lost(0, 8)])),
    "217 is not applied": _on(_plan(_update(), faults=[_lost(0, 1), _error(1, 217)], retries=True)),
    "concern 50 is not applied": _on(_plan(_update(), faults=[Fault("write concern error", 0, code=50)], retries=True)),
    "225 is applied": _on(
        _plan(_update(), guarantee="transaction", deliveries=(Delivery(PROCESS.name),)),
        _plan(_update(), _update(), _update(), number=1, guarantee="transaction", deliveries=(_STOPPED,)),
    ),
    "no digest": _on(
        _plan(_update(), guarantee="transaction"), _plan(_update(), number=1, guarantee="transaction", key_of="r000000")
    ),
    "a slot of its own": _on(_plan(_update(), _update(), guarantee="transaction", deliveries=_KILLED, budget=3.0)),
    "low number, 225 is final": _on(_plan(_update(), _update(), guarantee="transaction", deliveries=_KILLED, budget=3.0)),
    "not doomed": _on(_plan(_update(tries=3), faults=[_lost(1, 1)], guarantee="transaction")),
    "nothing learned": _on(_plan(_CAUGHT, _update(), guarantee="transaction")),
    "marker apart": _on(_plan(_update(), _update(), guarantee="transaction", deliveries=_KILLED)),
    "no marker": _on(_plan(_update(), guarantee="transaction", deliveries=(Delivery(SYNC), Delivery(SYNC)))),
    "in the driver's pool": _on(_plan(_update()), _plan(_update(), number=1, guarantee="outside")),
    "no cancelling": replace(draw_held(1, 8), plans=draw_held(1, 8).plans[7:]),
    "lost errors": _on(_plan(_UNORDERED, faults=[_lost(0, 2)])),
}
QUICK = tuple(
    name
    for name, schedule in SCHEDULES.items()
    if all(delivery.lane != PROCESS.name for plan in schedule.plans for delivery in plan.deliveries)
)  # without processes of their own
BEFORE_5 = frozenset({"lost errors"})  # a fault of older servers only


@dataclass(frozen=True)
class Outcome:
    """What a control came to.

    Attributes:
        mutant: its name.
        seen: what the oracle saw with the mutant.
        unmutated: what it saw without, which must be nothing.
    """

    mutant: str
    seen: Sequence[str]
    unmutated: Sequence[str]

    @property
    def is_caught(self) -> bool:
        """Whether the mutant is seen, and nothing else is."""
        return bool(self.seen) and not self.unmutated

    def line(self) -> str:
        """Return it for people."""
        if self.unmutated:
            return f"WRONG     {self.mutant}: seen without the mutant: {self.unmutated[0]}"
        if not self.seen:
            return f"SURVIVES  {self.mutant} ({MUTANTS[self.mutant].takes_out})"
        where, *what = (text.strip() for text in self.seen[0].splitlines())
        return f"caught    {self.mutant} ({MUTANTS[self.mutant].takes_out}): {where} {' '.join(what[:-1])[:240]}"


def play(name: str, ground: Ground) -> Outcome:
    """Play a control on a server."""
    schedule = SCHEDULES[name]
    unmutated = Campaign(schedule, ground).run().violations
    with MUTANTS[name].active():
        seen = Campaign(schedule, ground, mutant=name).run().violations
    return Outcome(name, seen, unmutated)


def play_on_replica_set() -> Outcome:
    """Play the control of the commit: the primary is cut off from its followers, a record is handled, the primary is killed."""
    unmutated = _rolled_back()
    with MUTANTS[REPLICA_SET].active():
        seen = _rolled_back()
    return Outcome(REPLICA_SET, seen, unmutated)


def _rolled_back() -> list[str]:
    plan = _plan(_update(), guarantee="transaction", budget=50.0)
    with (
        mock.patch.object(common, "MIN_HEARTBEAT_INTERVAL", 0.02),
        ReplicaSet(proxied=False) as servers,
        pymongo.MongoClient[dict[str, Any]](servers.uri, w="majority") as admin,
        ThreadPoolExecutor(1) as pool,
    ):
        database = admin.get_database(random_name("campaign"), read_concern=ReadConcern("majority"))
        prepare(database)
        database.docs.insert_many(drawing.first_documents(plan.owner))
        before = state_of(database, plan)
        client = connect(PATIENT, servers.uri, random_name("app"), database.name, serverSelectionTimeoutMS=20_000)
        handler = Handler(plan, client, database.name)
        handle = handler.decorated(lambda argument: run_without_waiting(handler.work(argument)))
        client.admin.command("ping")
        with servers.cut_off_primary() as primary:
            handled = pool.submit(handle, plan)
            try:
                handled.result(timeout=2.0)
            except TimeoutError:
                pass  # as it should be: no majority has it
            primary.kill()
        servers.primary()
        handled.result()
        after = state_of(database, plan)
        client.close()
    changed = [document for document in after["docs"] if document not in before["docs"]]
    expected = [{**before["docs"][1], "n": before["docs"][1]["n"] + 1}]
    return [] if changed == expected else [f"three nodes, record {plan.owner}:\n  it is done, and it left {changed}"]


def main() -> int:
    """Play all controls, or those named."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.controls")
    parser.add_argument("mutants", nargs="*", default=list(MUTANTS))
    parser.add_argument("--mongod", help="path of a mongod")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    with one_node(options.mongod) as (ground, version):
        for name in options.mutants:
            if name in BEFORE_5 and not version.startswith("4."):
                sys.stdout.write(f"left out  {name}: mongod {version} does not do that\n")
                continue
            outcomes.append(play_on_replica_set() if name == REPLICA_SET else play(name, ground))
            sys.stdout.write(outcomes[-1].line() + "\n")
            sys.stdout.flush()
    caught = sum(outcome.is_caught for outcome in outcomes)
    sys.stdout.write(f"{caught} of {len(outcomes)} mutants caught\n")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
