"""A group of consumers on a Kafka cluster, one killed and started again now and then, one stopped past its poll interval.

The primary's replies are lost now and then, too. With saferetry every record's effects are there once; with plain PyMongo and
a retry decorator, the control, some are there twice. `make proof-kafka` does it at full length.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from saferetry.lab.broker import Broker
from saferetry.lab.processes import TellingProcess
from saferetry.lab.proxy import Proxy
from tests.proof.conftest import ROOT, Ground
from tests.proof.work import RawDatabase
from tests.support import random_name

IS_LONG = bool(os.environ.get("PROOF_KAFKA"))  # make proof-kafka
PARTITIONS = 4
SESSION, INTERVAL = 4.0, 6.0  # seconds
STOPPED = INTERVAL + 2.0

pytestmark = [pytest.mark.timeout(3_600 if IS_LONG else 150)]


@dataclass(frozen=True)
class Plan:
    """What is done to a group.

    Attributes:
        records: In the topic.
        consumers: In the group.
        kills: How often one is killed; None: as long as records are left.
        stops: How often one is stopped; None: as long as records are left.
        pause: Seconds between two of these.
        lose_every: Each so many-th reply of the primary is lost.
    """

    records: int
    consumers: int
    kills: int | None
    stops: int | None
    pause: float
    lose_every: int


PLAN = Plan(20_000, 3, None, None, 8.0, 500) if IS_LONG else Plan(1_000, 2, 1, 1, 0.5, 200)


@dataclass
class Group:
    """Be the consumers of one way, and what is done to them.

    Attributes:
        way: "saferetry" or "raw".
        topic: Also the group's name.
        killed: How often a consumer was killed.
        stopped: How often one was stopped.
        ended: How often one ended by itself.
    """

    way: str
    ground: Ground
    broker: Broker
    proxy: Proxy
    topic: str
    stack: ExitStack
    members: list[TellingProcess] = field(default_factory=list)
    everybody: list[TellingProcess] = field(default_factory=list)
    zombies: set[int] = field(default_factory=set)  # pids of those that were stopped
    killed: int = 0
    stopped: int = 0
    ended: int = 0

    def config(self) -> dict[str, Any]:
        """Return the consumers' configuration."""
        return {
            "bootstrap.servers": self.broker.address,
            "group.id": self.topic,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": round(SESSION * 1000),
            "heartbeat.interval.ms": 500,
            "max.poll.interval.ms": round(INTERVAL * 1000),
            "log_level": 0,
        }

    def start(self) -> TellingProcess:
        """Start one more consumer."""
        plan = {
            "way": self.way,
            "uri": self.proxy.uri(),
            "database": self.ground.name,
            "topic": self.topic,
            "config": self.config(),
        }
        member = self.stack.enter_context(TellingProcess("tests.proof.kafka_worker", plan, folder=ROOT))
        self.members.append(member)
        self.everybody.append(member)
        return member

    def heal(self) -> None:
        """Start those anew that ended by themselves, as a supervisor does."""
        for member in list(self.members):
            if not member.is_running():
                self.members.remove(member)
                self.ended += 1
                self.start()

    def kill(self, member: TellingProcess) -> None:
        """Kill one and start another one."""
        member.kill()
        member.finish()
        self.members.remove(member)
        self.killed += 1
        self.start()

    def stop(self, member: TellingProcess) -> Callable[[], None]:
        """Stop one; return what lets it go on, a zombie."""
        member.pause()
        self.zombies.add(member.pid)
        self.stopped += 1
        return member.resume

    def is_whole(self) -> bool:
        """Whether everybody has had a record: on a busy machine a start takes longer than the pause between two kills."""
        return all(member.told("record") for member in self.members)

    def done(self) -> int:
        """Return how many records have effects."""
        return int(self.ground.database.orders.estimated_document_count())

    def end(self) -> list[int]:
        """Let all stop; return their exit codes."""
        for member in self.members:
            os.kill(member.pid, signal.SIGTERM)
        return [member.finish() for member in self.members]

    def told(self, text: str) -> list[int]:
        """Return the pids of those that told of something, but for those that were stopped."""
        events = ((member.pid, event) for member in self.everybody for event in member.told("log"))
        return [pid for pid, event in events if text in event["text"] and pid not in self.zombies]


def committed(group: Group) -> list[int]:
    """Return the group's offset in each partition."""
    consumer = Consumer({**group.config(), "enable.auto.commit": False})
    try:
        found = consumer.committed([TopicPartition(group.topic, number) for number in range(PARTITIONS)], timeout=10)
        return [partition.offset for partition in found]
    finally:
        consumer.close()


def disturb(group: Group, plan: Plan, rng: random.Random) -> Generator[None]:
    """Kill and stop consumers in turn; each step takes its pause."""
    kills = itertools.count() if plan.kills is None else range(plan.kills)
    stops = iter(itertools.count() if plan.stops is None else range(plan.stops))
    for number in kills:
        group.kill(rng.choice(group.members))
        yield
        if (plan.stops is not None or number % 3 == 2) and next(stops, None) is not None:
            member = rng.choice(group.members)
            go_on = group.stop(member)
            until = time.monotonic() + STOPPED
            while time.monotonic() < until:
                yield
            go_on()
            yield


def consume(group: Group, plan: Plan, rng: random.Random, deadline: float) -> float:
    """Let the group consume all while it is disturbed; return the seconds from the first record on."""
    for _ in range(plan.consumers):
        group.start()
    group.members[0].wait_for("record")
    begin = time.monotonic()
    steps = disturb(group, plan, rng)
    is_over = False
    while not (is_over and committed(group) == [plan.records // PARTITIONS] * PARTITIONS):
        assert time.monotonic() < deadline, (group.done(), committed(group), [m.trace() for m in group.members])
        time.sleep(plan.pause)
        group.heal()
        if not is_over and (plan.kills is None and group.done() >= plan.records):
            steps.close()
            for member in group.members:
                member.resume()
            is_over = True
        if not is_over and (group.is_whole() if plan.kills is None else group.done() > 50):
            is_over = next(steps, "over") == "over"
    return time.monotonic() - begin


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """A cluster."""
    with Broker() as broker:
        yield broker


def prepare(database: RawDatabase) -> None:
    """Put there what the handler changes."""
    database.create_collection("orders")
    database.stock.insert_many([{"_id": number, "taken": 0} for number in range(PARTITIONS)])


def consumed(way: str, ground: Ground, broker: Broker, show: Callable[[str], None]) -> tuple[Group, int, int]:
    """Consume in one way; return the group, and how many effects are too many and too few."""
    rng = random.Random(PLAN.records)
    topic = random_name("topic")
    each = PLAN.records // PARTITIONS
    for partition in range(PARTITIONS):
        broker.produce_many(topic, (b"%d" % number for number in range(each)), partition=partition)
    ground.start_anew(prepare)
    with ExitStack() as stack:
        proxy = ground.proxy_losing_every(PLAN.lose_every)
        group = Group(way, ground, broker, proxy, topic, stack)
        seconds = consume(group, PLAN, rng, time.monotonic() + (3_000 if IS_LONG else 130))
        codes = group.end()
        counts = Counter((document["partition"], document["offset"]) for document in ground.database.orders.find())
        taken = sum(document["taken"] for document in ground.database.stock.find())
        twice = max(sum(counts.values()), taken) - PLAN.records
        missing = PLAN.records - min(len(counts), taken)
        show(
            f"{way}: {PLAN.records:,} records, {group.killed} killed, {group.stopped} stopped, {proxy.hits} replies lost, "
            f"{group.ended} ended by themselves: {twice} effects too many, {missing} missing, "
            f"{PLAN.records / seconds:.0f} records/s"
        )
        assert committed(group) == [each] * PARTITIONS
        if way == "saferetry":
            assert codes == [0] * PLAN.consumers
            assert set(counts.values()) == {1}
            assert {document["taken"] for document in ground.database.stock.find()} == {each}
        return group, twice, missing


def test_with_saferetry_every_record_has_its_effects_once(ground: Ground, broker: Broker, show: Callable[[str], None]) -> None:
    group, twice, missing = consumed("saferetry", ground, broker, show)
    assert (twice, missing) == (0, 0)
    assert group.ended == 0
    assert group.told("_MAX_POLL_EXCEEDED") == []
    assert group.killed >= 1
    assert group.stopped >= 1


def test_the_control_plain_pymongo_has_some_twice(ground: Ground, broker: Broker, show: Callable[[str], None]) -> None:
    _, twice, _ = consumed("raw", ground, broker, show)
    assert twice > 0
