"""Addresses: never the same one twice, whatever happens to clock, process and pool."""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Iterator

import pytest
from bson.binary import UUID_SUBTYPE
from bson.int64 import Int64
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from saferetry._addresses import LONGEST_IDLE, MOST_IDLE, Address, AddressPool

Numbered = tuple[bytes, int]


def named(address: Address) -> Numbered:
    return bytes(address.session_id["id"]), int(address.number)


def session_of(address: Address) -> bytes:
    return bytes(address.session_id["id"])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> AddressPool:
    return AddressPool(clock)


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be another process, as seen by the process id, from the first `next` on."""

    def become_a_child() -> Iterator[None]:
        monkeypatch.setattr("saferetry._addresses.os.getpid", lambda: -1)
        yield

    return become_a_child()


def test_a_new_address_is_a_random_uuid_with_number_1(pool: AddressPool) -> None:
    address = pool.acquire()
    assert address.session_id["id"].subtype == UUID_SUBTYPE
    assert len(address.session_id["id"]) == 16
    assert isinstance(address.number, Int64)  # the server takes nothing else
    assert address.number == 1


def test_two_at_a_time_are_of_two_sessions(pool: AddressPool) -> None:
    assert session_of(pool.acquire()) != session_of(pool.acquire())


def test_a_released_session_is_used_again_with_the_next_number(pool: AddressPool) -> None:
    first = pool.acquire()
    pool.release(first)
    second = pool.acquire()
    assert session_of(second) == session_of(first)
    assert second.number == 2
    assert isinstance(second.number, Int64)


def test_a_discarded_session_is_never_used_again(pool: AddressPool) -> None:
    first = pool.acquire()
    pool.discard(first)
    assert session_of(pool.acquire()) != session_of(first)
    assert pool.discarded == 1


def test_the_session_used_last_is_used_next(pool: AddressPool) -> None:
    one, other = pool.acquire(), pool.acquire()
    pool.release(one)
    pool.release(other)
    assert session_of(pool.acquire()) == session_of(other)


@pytest.mark.parametrize(("idle", "is_used_again"), [(0.0, True), (LONGEST_IDLE, True), (LONGEST_IDLE + 1, False)])
def test_a_session_idle_for_half_the_servers_memory_is_dropped(
    idle: float, is_used_again: bool, pool: AddressPool, clock: Clock
) -> None:
    first = pool.acquire()
    pool.release(first)
    clock.now += idle
    assert (session_of(pool.acquire()) == session_of(first)) is is_used_again


def test_the_servers_own_timeout_may_be_shorter(pool: AddressPool, clock: Clock) -> None:
    first = pool.acquire()
    pool.release(first)
    clock.now += 31
    assert session_of(pool.acquire(longest_idle=lambda: 30.0)) != session_of(first)


def test_with_one_all_older_ones_are_dropped(pool: AddressPool, clock: Clock) -> None:
    addresses = [pool.acquire() for _ in range(3)]
    for address in addresses:
        pool.release(address)
    clock.now += LONGEST_IDLE + 1
    sessions = {session_of(pool.acquire()) for _ in range(3)}
    assert not sessions & {session_of(address) for address in addresses}


def test_idle_sessions_are_bounded(pool: AddressPool) -> None:
    addresses = [pool.acquire() for _ in range(MOST_IDLE + 10)]
    for address in addresses:
        pool.release(address)
    again = {session_of(pool.acquire()) for _ in range(MOST_IDLE + 10)}
    assert len(again & {session_of(address) for address in addresses}) == MOST_IDLE


def test_a_child_process_uses_no_session_of_its_parent(pool: AddressPool, fork: Iterator[None]) -> None:
    first = pool.acquire()
    pool.release(first)
    next(fork)
    assert session_of(pool.acquire()) != session_of(first)


def test_a_child_that_releases_first_does_not_keep_its_parents_session(pool: AddressPool, fork: Iterator[None]) -> None:
    first = pool.acquire()
    next(fork)
    pool.release(first)
    assert session_of(pool.acquire()) != session_of(first)


def test_a_child_does_not_keep_its_parents_session_after_using_one_of_its_own(pool: AddressPool, fork: Iterator[None]) -> None:
    first = pool.acquire()
    next(fork)
    own = pool.acquire()
    pool.release(first)  # the parent releases it too, and both would go on with the same next number
    pool.discard(own)
    assert session_of(pool.acquire()) != session_of(first)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_real_child_uses_no_session_of_its_parent() -> None:
    pool = AddressPool()
    first = pool.acquire()
    pool.release(first)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads: the child only writes
        child = os.fork()
    if not child:
        os.write(writing, session_of(pool.acquire()))
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reading, 100)
    os.close(reading)
    os.close(writing)
    assert len(told) == 16
    assert told != session_of(first)
    assert session_of(pool.acquire()) == session_of(first)


def test_threads_never_get_the_same_address() -> None:
    pool = AddressPool()
    seen: list[Numbered] = []

    def work() -> None:
        for _ in range(300):
            address = pool.acquire()
            seen.append(named(address))
            pool.release(address)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == len(seen) == 2_400


class Pooling(RuleBasedStateMachine):
    """Take, give back, drop, wait and fork in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = AddressPool(self.clock)
        self.process = os.getpid()
        self.patch = pytest.MonkeyPatch()
        self.seen: set[Numbered] = set()
        self.discarded: set[bytes] = set()
        self.of_the_parent: set[bytes] = set()
        self.held: list[Address] = []

    def teardown(self) -> None:
        self.patch.undo()

    @rule(longest_idle=st.sampled_from([1.0, 60.0, LONGEST_IDLE]))
    def acquire(self, longest_idle: float) -> None:
        address = self.pool.acquire(lambda: longest_idle)
        assert named(address) not in self.seen
        assert address.number >= 1
        assert session_of(address) not in self.discarded | self.of_the_parent
        assert session_of(address) not in {session_of(other) for other in self.held}
        self.seen.add(named(address))
        self.held.append(address)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        address = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.discarded.add(session_of(address))
        self.pool.discard(address)

    @rule(seconds=st.sampled_from([0.5, 30.0, LONGEST_IDLE + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def fork(self) -> None:
        self.process += 1
        self.patch.setattr("saferetry._addresses.os.getpid", lambda: self.process)
        self.of_the_parent |= {session for session, _ in self.seen}
        self.held.clear()

    @invariant()
    def counts_what_was_discarded(self) -> None:
        assert self.pool.discarded == len(self.discarded)


class TestPooling(Pooling.TestCase):  # type: ignore[misc, valid-type]  # made at run time
    settings = settings(max_examples=25, stateful_step_count=25, deadline=None, database=None)


def test_a_deep_copy_shares_no_address() -> None:
    pool = AddressPool()
    pool.release(pool.acquire())
    assert copy.deepcopy(pool).acquire().session_id != pool.acquire().session_id
