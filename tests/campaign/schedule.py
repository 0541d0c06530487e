"""A schedule: which records there are, what their handlers do, who gets them how often, and what goes wrong. All of it data."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tests.campaign import drawing
from tests.campaign.steps import Condition, Step

Guarantee = Literal["process", "transaction", "outside"]  # the last: no record at all
LaneKind = Literal["sync", "async", "threads", "process"]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with commands of one delivery.

    Attributes:
        kind: see `KINDS`.
        place: the first command it befalls, counted from 0; those sent again count.
        times: how many commands in a row.
        delay: seconds, where something is late.
        code: the server's error code, where it answers with an error.
        labels: the labels of that error.
    """

    kind: str
    place: int
    times: int = 1
    delay: float = 0.0
    code: int = 0
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Delivery:
    """One time that a record is handed to a handler.

    Attributes:
        lane: who handles it.
        faults: what goes wrong meanwhile.
        twin: another lane that gets it at the same moment, "" for none.
        twin_faults: what goes wrong there.
        twin_after: seconds that it gets it later.
    """

    lane: str
    faults: tuple[Fault, ...] = ()
    twin: str = ""
    twin_faults: tuple[Fault, ...] = ()
    twin_after: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One record.

    Attributes:
        owner: its name, which all of its documents bear.
        guarantee: its handler's.
        steps: what its handler does.
        deliveries: in their order.
        budget: seconds.
        recovers: whether the handler has a recoverer.
        stores: whether the result is stored with the marker.
        retries: whether the handler is to be executed again after errors of the driver's too.
        key_of: the record whose key this one has too, with another content; "" for none.
    """

    owner: str
    guarantee: Guarantee
    steps: tuple[Step, ...]
    deliveries: tuple[Delivery, ...]
    budget: float = 20.0
    recovers: bool = False
    stores: bool = False
    retries: bool = False
    key_of: str = ""

    @property
    def stream(self) -> str:
        """The record's stream, which is its own."""
        return self.key_of or self.owner

    @property
    def position(self) -> int:
        """The record's position in its stream."""
        return int(self.stream[1:])

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> Plan:
        """Return it from what `as_json` gave."""
        steps = tuple(
            Step(**{**step, "condition": Condition(**step["condition"]) if step["condition"] else None})
            for step in plain["steps"]
        )
        deliveries = tuple(
            Delivery(**{**delivery, **{name: _faults(delivery[name]) for name in ("faults", "twin_faults")}})
            for delivery in plain["deliveries"]
        )
        return cls(**{**plain, "steps": steps, "deliveries": deliveries})


def _faults(plain: Sequence[Mapping[str, Any]]) -> tuple[Fault, ...]:
    return tuple(Fault(**{**fault, "labels": tuple(fault["labels"])}) for fault in plain)


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        weight: how often it is drawn.
        lanes: where it is possible.
        longest: how many commands in a row it may befall.
        delays: seconds, from and to.
        is_error: whether it is an error that the server answers with.
        is_alone: whether it needs the server for itself.
    """

    weight: int
    lanes: frozenset[LaneKind] = frozenset({"sync", "async", "threads", "process"})
    longest: int = 10
    delays: tuple[float, float] = (0.0, 0.0)
    is_error: bool = False
    is_alone: bool = False


SOCKET_TIMEOUT = 0.5  # seconds
_RETRYABLE = ("RetryableWriteError",)
_OVERLOADED = ("RetryableError", "SystemOverloadedError")
KINDS: Mapping[str, Kind] = {
    "lost reply": Kind(12),
    "lost reply, silent": Kind(2, longest=3),
    "reply cut": Kind(4),
    "request cut": Kind(5),
    "request lost": Kind(2, longest=3),
    "request late": Kind(3, longest=3, delays=(0.0, 1.5 * SOCKET_TIMEOUT)),
    "reply late": Kind(2, longest=3, delays=(0.0, 1.5 * SOCKET_TIMEOUT)),
    "reply throttled": Kind(2, longest=3, delays=(0.0, 1.2 * SOCKET_TIMEOUT)),
    "disconnected": Kind(3, longest=4),
    "server error": Kind(8, is_error=True),
    "server closes": Kind(3, is_error=True),
    "write concern error": Kind(3, is_error=True),
    "task cancelled": Kind(4, frozenset({"async"}), longest=1),
    "process killed before": Kind(6, frozenset({"process"}), longest=1),
    "process killed after": Kind(6, frozenset({"process"}), longest=1),
    "process stopped": Kind(3, frozenset({"process"}), longest=1, delays=(0.1, 0.6)),
    # The copy is held in the engine; so many sends after it are cut, then one waits for its session. Or all are cut.
    "copy held": Kind(0, frozenset({"sync"}), is_alone=True),
    "primary killed": Kind(0, longest=1),
    "primary stepped down": Kind(0, longest=1),
}
_DISASTERS = {"primary killed": 8, "primary stepped down": 8}
_ERRORS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (91, _RETRYABLE),
    (91, ()),
    (11600, _RETRYABLE),
    (11602, _RETRYABLE),
    (189, _RETRYABLE),
    (10107, _RETRYABLE),
    (13435, _RETRYABLE),
    (11601, ()),
    (50, ()),
    (112, ()),
    (24, ()),
    (16500, ()),
    (462, _OVERLOADED),
    (8000, ()),
)
_CONCERNS = (64, 91, 50, 79)


@dataclass(frozen=True)
class Lane:
    """A consumer: a client, and how it runs its handlers.

    Attributes:
        name: of the lane.
        kind: what it is.
        max_attempts: its setting.
        at_once: records it handles at a time.
        timeout: seconds of its calls under CSOT (`timeoutMS`), 0 for none.
        socket_timeout: seconds.
    """

    name: str
    kind: LaneKind
    max_attempts: int = 4
    at_once: int = 1
    timeout: float = 0.0
    socket_timeout: float = SOCKET_TIMEOUT


LANES: tuple[Lane, ...] = (
    Lane("sync", "sync"),
    Lane("sync, two attempts", "sync", max_attempts=2),
    Lane("sync, timeoutMS", "sync", timeout=2.0),
    Lane("async", "async", at_once=4),
    Lane("threads", "threads", at_once=4),
    Lane("process 1", "process"),
    Lane("process 2", "process"),
    Lane("process 3", "process", max_attempts=2),
)


@dataclass(frozen=True)
class Schedule:
    """A campaign: everything that is drawn from one seed.

    Attributes:
        seed: of all records.
        lanes: who handles them.
        plans: the records.
        is_patient: time limits are so long that a delivery without a fault has to go well, and one record is handled after
            another.
        must_be_done: what goes wrong may not keep any delivery from being done.
    """

    seed: int
    lanes: tuple[Lane, ...]
    plans: tuple[Plan, ...]
    is_patient: bool = False
    must_be_done: bool = False


def draw(seed: int, records: int, lanes: Sequence[Lane] = LANES, *, first: int = 0, nodes: int = 1) -> Schedule:
    """Draw a schedule; each record is drawn from seed and number alone, so that it can be replayed alone.

    Args:
        seed: of all records.
        records: how many.
        lanes: who handles them.
        first: the number of the first record.
        nodes: of the replica set; with several their primary is killed, and steps down.
    """
    numbers = range(first, first + records)
    return Schedule(seed, tuple(lanes), tuple(draw_plan(seed, number, lanes, nodes) for number in numbers))


_GUARANTEES: tuple[Guarantee, ...] = ("process", "transaction", "outside")


def draw_plan(seed: int, number: int, lanes: Sequence[Lane], nodes: int = 1) -> Plan:
    """Draw one record."""
    rng = random.Random(f"{seed}/{number}")
    guarantee = rng.choices(_GUARANTEES, [45, 45, 10])[0]
    steps = drawing.steps(rng)
    if guarantee == "outside":
        steps = tuple(replace(step, tries=1) for step in steps)  # people's loops are repetitions inside records only
    count = rng.choices([1, 2, 3, 4, 5], [50, 25, 12, 8, 5])[0]
    deliveries = tuple(_draw_delivery(rng, lanes, guarantee, len(steps), nodes) for _ in range(count))
    budget = rng.choice([1.5, 20.0, 20.0, 20.0]) if nodes == 1 else 40.0
    recovers, stores, retries = (rng.random() < 0.3 for _ in range(3))
    return Plan(f"r{number:06d}", guarantee, steps, deliveries, budget, recovers, stores, retries)


PATIENT = Lane("sync, patient", "sync", socket_timeout=3.0)
_HELD = (
    "insert_one",
    "insert_many",
    "update_one",
    "replace_one",
    "delete_one",
    "bulk_write",
    "find_one_and_update",
    "update_many",
)


def draw_held(seed: int, records: int) -> Schedule:
    """Draw records of one step whose copy is held in the engine while its sends are cut, some until it is given up."""
    plans = []
    for number in range(records):
        rng = random.Random(f"held {seed}/{number}")
        step = drawing.steps(rng)[0]
        while step.do not in _HELD:
            step = drawing.steps(rng)[0]
        fault = Fault("copy held", 0, rng.choice([1, 1, 2, 3, 20]))
        plans.append(Plan(f"r{number:06d}", "process", (replace(step, condition=None),), (Delivery(PATIENT.name, (fault,)),)))
    return Schedule(seed, (PATIENT,), tuple(plans), is_patient=True)


def _draw_delivery(rng: random.Random, lanes: Sequence[Lane], guarantee: Guarantee, steps: int, nodes: int) -> Delivery:
    lane = rng.choice(lanes)
    kinds = {name: kind.weight for name, kind in KINDS.items() if lane.kind in kind.lanes}
    if guarantee != "transaction":
        kinds.pop("process stopped", None)  # somebody else goes on meanwhile, with plain PyMongo's result
    if nodes > 1:  # failCommand is a setting of one server
        kinds = {name: weight for name, weight in kinds.items() if not KINDS[name].is_error} | _DISASTERS
    count = rng.choices([0, 1, 2, 3], [10, 55, 25, 10])[0]
    drawn = rng.choices(list(kinds), list(kinds.values()), k=count)
    faults = tuple(sorted((_draw_fault(rng, name, steps, guarantee) for name in drawn), key=lambda fault: fault.place))
    twin = ""
    others = [other.name for other in lanes if other is not lane]
    if guarantee == "transaction" and rng.random() < 0.15 and others:
        twin = rng.choice(others)
    return Delivery(lane.name, faults, twin)


def _draw_fault(rng: random.Random, name: str, steps: int, guarantee: Guarantee) -> Fault:
    kind = KINDS[name]
    most = steps + (3 if guarantee == "transaction" else 0)
    place = rng.randrange(most + 1)
    times = min(kind.longest, rng.choices([1, 2, 3, 4, 5, 7, 8, 10], [25, 35, 10, 8, 6, 4, 6, 6])[0])
    delay = round(rng.uniform(*kind.delays), 2)
    code, labels = 0, tuple[str, ...]()
    if name == "server error":
        code, labels = rng.choice(_ERRORS)
    elif name == "write concern error":
        code = rng.choice(_CONCERNS)
    return Fault(name, place, times, delay, code, labels)
