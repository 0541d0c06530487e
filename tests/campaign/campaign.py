"""Run a schedule: hand the records over as it says, and ask the oracle after each delivery."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest import mock

from pymongo import common

from saferetry import RecordKey
from saferetry.lab.operations import PeakCopies, wait_until_idle
from tests.campaign import drawing, oracle
from tests.campaign.faults import GIVEN_UP, Observed
from tests.campaign.grounds import Ground, patiently
from tests.campaign.handling import RawDatabase, Told
from tests.campaign.lanes import RunningLane, running
from tests.campaign.oracle import Model, State, Transactions, judge_process, put, same, state_of
from tests.campaign.schedule import KINDS, Delivery, Plan, Schedule
from tests.campaign.steps import COUNTER, DOCUMENTS, SHARED
from tests.support import random_name

_AT_ONCE = 24
_LONGEST = 4_000  # characters of a plan that are shown; seed and record say the rest
_ADAPTIVE_RETRIES = 2  # resends of one driver call after overload errors, the driver's default


@dataclass
class Report:
    """What a campaign found.

    Attributes:
        records: that were handled.
        deliveries: of them.
        ended: how they ended, by guarantee.
        observed: faults that took place, by kind and method.
        violations: what must not be; each names its seed and record.
    """

    records: int = 0
    deliveries: int = 0
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    observed: Observed = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Add what another campaign found."""
        self.records += other.records
        self.deliveries += other.deliveries
        self.ended += other.ended
        self.observed += other.observed
        self.violations += other.violations

    def table(self) -> str:
        """Return the faults that took place, by kind and method, as text."""
        kinds = Counter[str]()
        methods = Counter[str]()
        for (kind, method), count in self.observed.items():
            kinds[kind] += count
            methods[method] += count
        lines = [
            f"{self.records} records, {self.deliveries} deliveries, {sum(self.observed.values())} observed faults, "
            f"{len(self.violations)} violations",
            "ended: " + ", ".join(f"{guarantee} {how} {count}" for (guarantee, how), count in sorted(self.ended.items())),
            "by kind: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()),
            "by method: " + ", ".join(f"{method} {count}" for method, count in methods.most_common()),
        ]
        return "\n".join(lines)


def prepare(database: RawDatabase) -> None:
    """Make the collections and indexes that handlers find."""
    database[DOCUMENTS].create_index("owner")
    database[DOCUMENTS].create_index("u", unique=True, sparse=True)
    database["fs.files"].create_index([("filename", 1), ("uploadDate", 1)])
    database["fs.chunks"].create_index([("files_id", 1), ("n", 1)], unique=True)
    database[SHARED].insert_one({"_id": COUNTER, "n": 0})


class Campaign:
    """One schedule on one server.

    Args:
        schedule: what is to be done.
        ground: where.
        mutant: name of the mutant that processes are to be; in this one it is active already.
    """

    def __init__(self, schedule: Schedule, ground: Ground, *, mutant: str = "") -> None:
        self._mutant = mutant
        self.schedule = schedule
        self.report = Report()
        self._ground = ground
        self._admin = ground.admin
        self._name = random_name("campaign")
        self._database: RawDatabase = ground.admin.get_database(self._name, read_concern=ground.read_concern)
        self._clean: RawDatabase = ground.clean[self._name + "_clean"]
        self._model = Model(self._clean)
        self._lock = threading.Lock()
        self._lanes: dict[str, RunningLane] = {}
        self._left: dict[str, tuple[Plan, State]] = {}
        self._counted = self._maybe = 0

    def run(self) -> Report:
        """Run it."""
        self._ground.prepare(self._name)
        prepare(self._database)
        prepare(self._clean)
        try:
            with ExitStack() as stack, mock.patch.object(common, "MIN_HEARTBEAT_INTERVAL", 0.02):
                for described in self.schedule.lanes:
                    lane = running(described, self._ground, self._name, self._mutant)
                    self._lanes[described.name] = stack.enter_context(lane)
                with ThreadPoolExecutor(1 if self.schedule.is_patient else _AT_ONCE) as pool:
                    list(pool.map(self._handle, self.schedule.plans))
                self._look_again()
        finally:
            self._admin.admin.command(
                "killAllSessions", []
            )  # what the dead have left open would keep databases from being dropped
            for database in (self._database, self._clean):
                database.client.drop_database(database.name)
        return self.report

    def _handle(self, plan: Plan) -> None:
        patiently(lambda: put(self._database, plan, {DOCUMENTS: drawing.first_documents(plan.owner)}))
        self._ground.settle()
        state = self._look(plan)
        transactions = None
        if plan.guarantee == "transaction":
            transactions = Transactions(plan, state, self._model.run(plan, state))
        deliveries = list(plan.deliveries)
        for number, delivery in enumerate(deliveries):  # grows meanwhile
            before = state
            told, observed, peak = self._deliver_watched(plan, delivery)
            self._ground.settle()
            self._settle(delivery, told)
            state = self._look(plan)
            self._note(plan, told, observed)
            if transactions is not None:
                faults = transactions.judge(told, state, self._markers(plan))
            else:
                (one,) = told
                judgement = judge_process(plan, one, before, state, self._model)
                faults = judgement.faults
                if any(kind == GIVEN_UP for kind, _ in observed) and not (one.is_done or same(state, before)):
                    faults.append("its copy was held until it was given up, and took effect afterwards")
                with self._lock:
                    self._counted += judgement.counted
                    self._maybe += judgement.maybe
            faults += self._judge_sends(plan, delivery, told, observed)
            if peak > 1:
                faults.append(f"{peak} copies of its write were in the engine at a time")
            if self.schedule.must_be_done:
                faults += [f"it raised {one.error}, and is not done" for one in told if not one.is_done]
            if self.schedule.is_patient and not plan.key_of and not delivery.faults + delivery.twin_faults:
                faults += [f"nothing went wrong, and it raised {one.error}" for one in told if _is_disturbed(one)]
            if any(one.is_killed for one in told) and number + 1 == len(deliveries):
                deliveries.append(Delivery(self.schedule.lanes[0].name))  # as a broker does; till then its locks stay
            if faults:
                self._violation(plan, f"delivery {number}", faults)
                break  # what follows would be judged on wrong grounds
        if transactions is not None and transactions.is_done:
            with self._lock:
                self._counted += sum(transactions.clean.counts)
        with self._lock:
            self._left[plan.owner] = (plan, state)

    def _deliver_watched(self, plan: Plan, delivery: Delivery) -> tuple[list[Told], Observed, int]:
        """Deliver, and watch the copies in the engine where one is to be held."""
        if not any(KINDS[fault.kind].is_alone for fault in delivery.faults):
            return (*self._deliver(plan, delivery), 0)
        with PeakCopies(self._admin, self._lanes[delivery.lane].app_name) as watch:
            told, observed = self._deliver(plan, delivery)
        return told, observed, watch.peak

    def _deliver(self, plan: Plan, delivery: Delivery) -> tuple[list[Told], Observed]:
        if not delivery.twin:
            told, observed = self._lanes[delivery.lane].deliver(plan, delivery.faults)
            return [told], observed

        def deliver_twin() -> Told:
            time.sleep(delivery.twin_after)
            return self._lanes[delivery.twin].deliver(plan, delivery.twin_faults)[0]

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(deliver_twin)
            told, observed = self._lanes[delivery.lane].deliver(plan, delivery.faults)
            return [told, other.result()], observed

    def _settle(self, delivery: Delivery, told: list[Told]) -> None:
        """Wait for what the server still does for a delivery that ended with an error."""
        for name, one in zip((delivery.lane, delivery.twin), told, strict=False):
            if one.is_done:
                continue
            self._wait_until_idle(self._lanes[name])

    def _wait_until_idle(self, lane: RunningLane) -> None:
        patiently(lambda: wait_until_idle(self._admin, lane.app_name))

    def _look(self, plan: Plan) -> State:
        return patiently(lambda: state_of(self._database, plan))

    def _markers(self, plan: Plan) -> int:
        identity = {
            "group": "campaign",
            "stream": plan.stream,
            "partition": 0,
            "position": plan.position,
            "epoch": "",
            "name": "campaign",
        }
        markers = self._database["saferetry_records"]
        its_own = {"_id": identity, "digest": hashlib.blake2b(plan.owner.encode(), digest_size=32).digest()}
        return patiently(lambda: markers.count_documents(its_own))

    def _judge_sends(self, plan: Plan, delivery: Delivery, told: list[Told], observed: Observed) -> list[str]:
        """Judge how often each write was sent: at one address, and within the bound."""
        faults = []
        key = RecordKey(plan.stream, 0, plan.position, group="campaign").hashed()
        for name, one in zip((delivery.lane, delivery.twin), told, strict=False):
            lane = self._lanes[name]
            sent = lane.sends.take(key)
            if plan.guarantee != "process" or lane.lane.kind == "process":
                continue
            overloaded = sum(count for (kind, _), count in observed.items() if kind == "server error")
            attempts = lane.lane.max_attempts * max(step.tries for step in plan.steps)
            most = 2 * attempts + (overloaded if lane.lane.at_once == 1 else _ADAPTIVE_RETRIES * attempts)
            if lane.lane.timeout:
                continue  # CSOT resends until the deadline
            for address, count in sent.items():
                if address[2] >= 0 and count > most:
                    faults.append(f"{address[0]} was sent {count} times at one address, {most} allowed")
            for method, _, calls, sends in one.writes:
                # An error of the server's may befall the other records of the same client too.
                if sends > 2 * calls + (overloaded if lane.lane.at_once == 1 else _ADAPTIVE_RETRIES * calls):
                    faults.append(f"{method}: {sends} sends in {calls} driver calls")
            said = sum(sends for _, _, _, sends in one.writes)
            if one.executions == 1 and said != sum(sent.values()):
                faults.append(f"the record says {said} sends, the driver's events {sum(sent.values())}")
        return faults

    def _note(self, plan: Plan, told: list[Told], observed: Observed) -> None:
        with self._lock:
            self.report.records += plan.owner not in self._left
            self._left.setdefault(plan.owner, (plan, {}))
            self.report.deliveries += len(told)
            self.report.observed += observed
            for one in told:
                error = (one.error or {}).get("type", "")
                how = "killed" if one.is_killed else "done" if one.is_done else f"{one.decision or 'error'} {error}".strip()
                self.report.ended[plan.guarantee, how] += 1

    def _look_again(self) -> None:
        """Look at every record once more when nothing is at work any more, for what came late."""
        self._ground.settle()
        for lane in self._lanes.values():
            self._wait_until_idle(lane)
        for plan, state in self._left.values():
            now = self._look(plan)
            if not same(now, state):
                self._violation(plan, "afterwards", [oracle.differ("it changed once more", now, [state])])
        counter = self._database[SHARED].find_one({"_id": COUNTER}) or {}
        if not self.report.violations and not self._counted <= counter["n"] <= self._counted + self._maybe:
            self.report.violations.append(
                f"seed {self.schedule.seed}: the shared counter is {counter['n']}, expected {self._counted} to "
                f"{self._counted + self._maybe}"
            )

    def _violation(self, plan: Plan, when: str, faults: list[str]) -> None:
        text = "\n  ".join(
            [
                f"seed {self.schedule.seed}, record {plan.owner}, {when}:",
                *faults,
                f"plan: {json.dumps(plan.as_json())[:_LONGEST]}",
            ]
        )
        with self._lock:
            self.report.violations.append(text)


def _is_disturbed(told: Told) -> bool:
    """Whether it ended with an error that the handler and its data are not at fault for."""
    error = told.error
    return error is not None and not (error["data"] or error["app"] or error["type"] == "RetryRefusedError")
