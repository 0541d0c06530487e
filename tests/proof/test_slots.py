"""The sessions that records share: clocks that disagree, keys that meet, groups that do not."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from saferetry import RecordKey
from saferetry._slots import slot_of
from saferetry.lab.commands import CommandLog
from tests.proof import work
from tests.proof.conftest import Ground
from tests.proof.consuming import Subscription
from tests.proof.work import Database

HOUR = 3600.0
APART = 256  # positions that share a session
MOST_STARTS = 3  # commands until a record has its session although another process has used higher numbers


def starts(log: CommandLog) -> int:
    """Count the commands by which a transaction was to begin."""
    return sum(bool(command.get("startTransaction")) for command in log.commands("insert"))


# Clocks. The worker's is wrong, ours is right.


@pytest.mark.parametrize("offset", [HOUR, -HOUR])
@pytest.mark.parametrize("position", [1, 1 + APART], ids=["the same record", "another record of the slot"])
def test_a_clock_that_is_an_hour_wrong_costs_one_more_start(
    offset: float, position: int, ground: Ground, log: CommandLog
) -> None:
    ground.worker(1, clock={"offset": offset}).wait_for("end")
    consumer = ground.consumer(event_listeners=[log])
    consumer.handle(position)
    assert starts(log) <= MOST_STARTS
    consumer.handle(position + 2 * APART)
    assert ground.effects() == work.once(*{1, position, position + 2 * APART})
    worker = ground.worker(position, position + 3 * APART, clock={"offset": offset})
    worker.wait_for("end")
    assert ground.effects() == work.once(*{1, position, position + 2 * APART, position + 3 * APART})


@pytest.mark.parametrize("offset", [HOUR, -HOUR])
def test_a_dead_execution_with_a_wrong_clock_is_taken_over_at_once(offset: float, ground: Ground) -> None:
    worker = ground.worker(1, work="pausing_before_commit", clock={"offset": offset})
    worker.wait_for("half")
    worker.kill()
    worker.finish()
    begin = time.monotonic()
    assert ground.consumer().handle(1) == 1
    assert time.monotonic() - begin < 2
    assert ground.effects() == work.once(1)


@pytest.mark.parametrize("offset", [HOUR, -HOUR])
def test_a_stalled_execution_with_a_wrong_clock_is_fenced(offset: float, ground: Ground) -> None:
    worker = ground.worker(1, work="pausing_before_commit", clock={"offset": offset})
    worker.wait_for("half")
    worker.pause()
    assert ground.consumer().handle(1) == 1
    worker.resume()
    worker.wait_for("end")
    assert [event["result"] for event in worker.told("done")] == [None]
    assert ground.effects() == work.once(1)


def test_clocks_that_stand_at_the_same_microsecond_do_a_record_once(ground: Ground) -> None:
    """Two processes choose equal numbers, again and again, for the same record and for others of its slot."""
    positions = [1, 1, 1 + APART, 1 + 2 * APART]
    plan: dict[str, Any] = {"clock": {"frozen": time.time()}, "start_at": time.time() + 2}
    workers = [ground.worker(*positions, **plan) for _ in range(2)]
    for worker in workers:
        worker.wait_for("end")
        assert not worker.told("failed")
    assert ground.effects() == work.once(*set(positions))


def test_a_clock_that_goes_backwards_does_not_stop_a_consumer(ground: Ground) -> None:
    ground.worker(1, clock={"frozen": time.time() + HOUR}).wait_for("end")
    worker = ground.worker(*(1 + APART * number for number in range(1, 6)), clock={"frozen": time.time()})
    worker.wait_for("end")
    assert not worker.told("failed")
    assert ground.effects() == work.once(*(1 + APART * number for number in range(6)))


# Keys that share a session.


def hashed_alike() -> tuple[int, int]:
    """Return two numbers whose streams, without positions, have the same slot."""
    subscription = Subscription(has_positions=False)
    seen: dict[object, int] = {}
    for number in itertools.count():
        slot = slot_of(subscription.key(number), "proof", "x")
        if slot in seen:
            return seen[slot], number
        seen[slot] = number
    raise AssertionError


@pytest.fixture(params=[True, False], ids=["positions", "hashed"])
def colliding(request: pytest.FixtureRequest) -> Iterator[tuple[Subscription, int, int]]:
    """Two records whose keys have nothing to do with each other, in one session."""
    if request.param:
        yield Subscription(), 1, 1 + APART
    else:
        yield Subscription(has_positions=False), *hashed_alike()


def marked_once(ground: Ground, count: int) -> None:
    """Check that so many records were done, once each; those without position are told apart by their stream."""
    found = ground.effects()
    assert (found["taken"], found["changes"]) == (count, {count})
    assert sorted(found["orders"].values()) == [1] * count
    assert sum(found["markers"].values()) == count


def test_in_one_process_a_record_waits_for_the_other_of_its_slot(
    colliding: tuple[Subscription, int, int], ground: Ground
) -> None:
    subscription, one, other = colliding
    begun, at_work = threading.Event(), set[int]()
    together = []

    def watched(database: Database, position: int) -> None:
        at_work.add(position)
        together.append(len(at_work))
        begun.set()
        work.order(database, position)
        time.sleep(0.2)
        at_work.remove(position)

    consumer = ground.consumer(watched, subscription=subscription)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(consumer.handle, one)
        begun.wait()
        second = pool.submit(consumer.handle, other)
        first.result()
        second.result()
    assert together == [1, 1]
    assert sorted(consumer.executions) == sorted([one, other])
    marked_once(ground, 2)


def test_in_two_processes_both_records_of_a_slot_are_done(
    colliding: tuple[Subscription, int, int], ground: Ground, show: Callable[[str], None]
) -> None:
    """The later one ends the earlier one's transaction, which is executed again."""
    subscription, one, other = colliding
    plan: dict[str, Any] = {"subscription": subscription.__dict__, "start_at": time.time() + 2, "work": "pausing_order"}
    workers = [ground.worker(position, **plan) for position in (one, other)]
    for worker in workers:
        worker.wait_for("end")
        assert not worker.told("failed")
    executions = sum(len(worker.told("execution")) for worker in workers)
    show(f"two unrelated records in one slot, at once in two processes: {executions} executions")
    assert executions <= 10
    marked_once(ground, 2)


def test_two_groups_on_one_topic_do_each_record_once_each(ground: Ground) -> None:
    """They run at once, and neither ends the other's transactions."""
    plan: dict[str, Any] = {"start_at": time.time() + 2, "work": "pausing_order"}
    positions = [1, 2]
    groups = ("billing", "shipping")
    workers = [ground.worker(*positions, subscription={"group": group}, **plan) for group in groups]
    for worker in workers:
        worker.wait_for("end")
        assert not worker.told("failed")
    found = ground.effects()
    assert found["orders"] == {1: 2, 2: 2}
    assert (found["taken"], found["changes"]) == (4, {4})
    keys = [(marker["_id"]["group"], marker["_id"]["position"]) for marker in ground.database[work.MARKERS].find()]
    assert sorted(keys) == sorted(itertools.product(groups, positions))


def test_slots_are_what_all_releases_agree_on() -> None:
    """Test vectors: two releases that run at once must meet in the same sessions."""
    by_position = slot_of(RecordKey("orders", 3, 1234, group="g"), "shop.on_order", "shop")
    by_hash = slot_of(RecordKey("job-7", group="g"), "shop.on_job", "shop")
    assert str(uuid.UUID(bytes=by_position)) == "67080877-e08a-5a2c-bf0f-f9b8b58ce057"
    assert str(uuid.UUID(bytes=by_hash)) == "45e5194e-9d56-53eb-a62e-eb33a6cd65e0"
