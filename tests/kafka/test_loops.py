"""The loops: what is committed, what waits, what stops, and what a rebalance does to a record in work."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from saferetry import Settings, current_record, handler
from saferetry.errors import ConfigurationError, PartitionLostError
from saferetry.kafka import PollBudget, kafka_key
from saferetry.kafka import _consuming as consuming
from tests.kafka.loops import Consumed, FakeConsumer
from tests.support import eventually

P0, P1 = ("t", 0), ("t", 1)


@pytest.fixture(params=["sync", "async"])
def half(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_BACKOFF_BASE_MS", "20")
    monkeypatch.setenv("SAFERETRY_BACKOFF_CAP_MS", "20")


def nothing(message: Any) -> None:
    pass


class Gate:
    """A handler that waits inside its record, for one message or for all."""

    def __init__(self, partition: int = 0, offset: int | None = None) -> None:
        self._where = partition, offset
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.ends: list[str] = []

    def __call__(self, message: Any) -> None:
        if message.partition() != self._where[0] or self._where[1] not in (None, message.offset()):
            return
        self.entered.set()
        assert self.opened.wait(20)
        try:
            record = current_record()
            assert record is not None
            record.check_held()  # what a write does first
        except PartitionLostError:
            self.ends.append("lost")
            raise
        self.ends.append("done")


def until_committed(consumed: Consumed, offsets: dict[Any, int]) -> None:
    eventually(lambda: consumed.error is not None or consumed.fake.committed == offsets)


# what is done is committed


def test_every_message_is_handled_once_in_its_partitions_order_and_committed(half: str) -> None:
    consumed = Consumed(half, FakeConsumer(25, 7), nothing)
    until_committed(consumed, {P0: 25, P1: 7})
    consumed.stop()
    assert consumed.end() is None
    assert consumed.seen == {0: list(range(25)), 1: list(range(7))}
    assert consumed.fake.is_closed


def test_no_offset_is_committed_before_its_record_is_done(half: str) -> None:
    gate = Gate(offset=3)
    consumed = Consumed(half, FakeConsumer(5), gate)
    assert gate.entered.wait(20)
    until_committed(consumed, {P0: 3})
    time.sleep(0.05)
    assert consumed.fake.committed == {P0: 3}
    gate.opened.set()
    until_committed(consumed, {P0: 5})
    consumed.stop()
    assert consumed.end() is None


def test_offsets_are_committed_after_so_many_records(half: str) -> None:
    consumed = Consumed(half, FakeConsumer(30), nothing, commit_records=10, commit_seconds=1_000.0)
    eventually(lambda: consumed.fake.committed.get(P0, 0) >= 20)
    consumed.stop()
    consumed.end()
    assert consumed.fake.committed == {P0: len(consumed.seen[0])}  # the last ones at the stop
    assert len(consumed.fake.commits) <= 4


def test_a_commit_that_fails_is_made_again_later(half: str, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeConsumer(3)
    fake.commit_errors = [OSError("secret"), OSError("secret")]
    consumed = Consumed(half, fake, nothing)
    until_committed(consumed, {P0: 3})
    consumed.stop()
    assert consumed.end() is None
    assert "offsets of 1 partitions were not committed: OSError" in caplog.text
    assert "secret" not in caplog.text


# what is not done


@pytest.mark.parametrize("kind", [ValueError, OperationFailure])
def test_an_error_that_does_not_pass_ends_the_loop_and_its_offset_stays(half: str, kind: type[Exception]) -> None:
    def work(message: Any) -> None:
        if message.offset() == 4:
            raise kind("not done")

    consumed = Consumed(half, FakeConsumer(10), work)
    assert isinstance(consumed.end(), kind)
    assert consumed.fake.committed == {P0: 4}
    assert consumed.seen == {0: [0, 1, 2, 3, 4]}
    assert consumed.fake.is_closed


def test_a_record_that_is_put_off_holds_up_its_partition_alone(half: str) -> None:
    failures = 3

    def work(message: Any) -> None:
        nonlocal failures
        if (message.partition(), message.offset()) == (0, 2) and failures:
            failures -= 1
            raise AutoReconnect("gone")

    consumed = Consumed(half, FakeConsumer(6, 40), work)
    until_committed(consumed, {P0: 6, P1: 40})
    consumed.stop()
    assert consumed.end() is None
    assert consumed.seen == {0: [0, 1, 2, 2, 2, 2, 3, 4, 5], 1: list(range(40))}
    between = consumed.order[consumed.order.index((0, 2)) : consumed.order.index((0, 3))]
    assert any(partition == 1 for partition, _ in between)


def test_a_partition_that_is_put_off_is_paused_while_polls_go_on(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_BACKOFF_BASE_MS", "60000")
    monkeypatch.setenv("SAFERETRY_BACKOFF_CAP_MS", "60000")

    def work(message: Any) -> None:
        if message.partition() == 0:
            raise AutoReconnect("gone")

    consumed = Consumed(half, FakeConsumer(500, 3), work)
    eventually(lambda: consumed.fake.paused == {P0})
    before = consumed.fake.polls
    eventually(lambda: consumed.fake.polls > before + 3)
    consumed.stop()
    assert consumed.end() is None
    assert consumed.fake.committed == {P1: 3}


def test_a_partition_does_not_starve_behind_one_that_has_much(half: str) -> None:
    """The fake hands a partition out to its end before the next one, as librdkafka does with what it has fetched."""
    consumed = Consumed(half, FakeConsumer(100_000, 3, 0), lambda message: time.sleep(0.002))
    eventually(lambda: consumed.error is not None or len(consumed.seen[1]) == 3)
    assert consumed.error is None
    assert len(consumed.seen[0]) < 5_000
    eventually(lambda: P0 not in consumed.fake.paused)
    consumed.stop()
    assert consumed.end() is None


def test_exceptions_that_the_user_names_are_put_off_too(half: str) -> None:
    busy = [True, True]

    def work(message: Any) -> None:
        if busy and busy.pop():
            raise ConnectionRefusedError

    consumed = Consumed(half, FakeConsumer(2), work, put_off_on=(ConnectionError,))
    until_committed(consumed, {P0: 2})
    consumed.stop()
    assert consumed.end() is None


def test_a_record_whose_effect_could_be_repeated_stops_the_consumer(half: str) -> None:
    def work(message: Any) -> None:
        record = current_record()
        assert record is not None
        record.note_effect("insert_one on shop.orders is applied")
        raise AutoReconnect("gone")

    consumed = Consumed(half, FakeConsumer(2), work)
    error = consumed.end()
    assert isinstance(error, AutoReconnect)
    assert "is not handled again here, since insert_one on shop.orders is applied" in "".join(error.__notes__)
    assert consumed.fake.committed == {}


def test_a_recoverer_that_took_the_record_lets_the_consumer_go_on() -> None:
    taken = []

    @handler(key=kafka_key("g"), name="t", recoverer=lambda failure: taken.append(failure.argument.offset()))
    def on_order(message: Any) -> None:
        if message.offset() == 1:
            raise ValueError

    consumed = Consumed("sync", FakeConsumer(3), on_order)
    until_committed(consumed, {P0: 3})
    consumed.stop()
    assert consumed.end() is None
    assert taken == [1]


@pytest.mark.parametrize("result", [iter([1]), (number for number in [1])], ids=["an iterator", "a generator"])
def test_a_result_that_is_work_to_be_done_is_no_result(result: Any) -> None:
    consumed = Consumed("sync", FakeConsumer(1), lambda message: result)
    if type(result).__name__ == "generator":
        assert isinstance(consumed.end(), ConfigurationError)
        assert consumed.fake.committed == {}
    else:
        until_committed(consumed, {P0: 1})
        consumed.stop()
        assert consumed.end() is None


def test_a_coroutine_function_is_no_handler_for_threads_and_a_function_none_for_asyncio() -> None:
    async def on_order(message: Any) -> None: ...

    for work, is_async in ((on_order, False), (nothing, True), (None, False)):
        loose: Any = work
        terms: Any = None
        with pytest.raises(ConfigurationError, match="run: "):
            consuming.Consuming(terms, loose, time.monotonic, is_async=is_async)


# time


def test_each_record_has_the_budget_of_a_poll_for_itself(half: str) -> None:
    budgets: list[float] = []

    def work(message: Any) -> None:
        record = current_record()
        assert record is not None
        budgets.append(record.remaining())
        time.sleep(0.01)

    consumed = Consumed(half, FakeConsumer(20), work)
    until_committed(consumed, {P0: 20})
    consumed.stop()
    consumed.end()
    assert all(50 < budget <= 54 for budget in budgets)


def test_polls_go_on_while_a_record_is_in_work_and_no_more_is_taken_in_than_fits(half: str) -> None:
    gate = Gate()
    consumed = Consumed(half, FakeConsumer(1_000), gate)
    assert gate.entered.wait(20)
    eventually(lambda: consumed.fake.paused == {P0})
    before = consumed.fake.polls
    eventually(lambda: consumed.fake.polls > before + 5)
    assert consumed.fake._next[P0] <= 60
    gate.opened.set()
    until_committed(consumed, {P0: 1_000})
    consumed.stop()
    assert consumed.end() is None


def test_polls_of_one_message_wait_for_it_too(half: str) -> None:
    fake = FakeConsumer(5)
    consumed = Consumed(half, fake, nothing, max_records=1)
    until_committed(consumed, {P0: 5})
    consumed.stop()
    assert consumed.end() is None
    assert fake.longest_wait == consuming.POLL


# stopping


def test_a_stop_finishes_the_record_in_work_and_begins_no_other(half: str) -> None:
    gate = Gate(offset=2)
    consumed = Consumed(half, FakeConsumer(9), gate)
    assert gate.entered.wait(20)
    consumed.stop()
    gate.opened.set()
    assert consumed.end() is None
    assert (gate.ends, consumed.seen[0], consumed.fake.committed) == (["done"], [0, 1, 2], {P0: 3})


def test_a_stop_that_cannot_wait_gives_the_record_in_work_up(half: str) -> None:
    gate = Gate(offset=2)
    consumed = Consumed(half, FakeConsumer(9), gate, stop_seconds=0.05)
    assert gate.entered.wait(20)
    consumed.stop()
    eventually(consumed.is_told_lost)
    gate.opened.set()
    assert consumed.end() is None
    eventually(lambda: gate.ends == ["lost"])
    assert consumed.fake.committed == {P0: 2}


def test_a_handler_that_does_not_return_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(offset=0)
    consumed = Consumed("sync", FakeConsumer(2), gate, stop_seconds=0.05)
    assert gate.entered.wait(20)
    consumed.stop()
    assert consumed.end() is None
    assert "the handler did not return in its time" in caplog.text
    gate.opened.set()
    eventually(lambda: gate.ends == ["lost"])
    assert consumed.fake.committed == {}


def test_a_cancellation_cancels_the_handler_and_commits_what_is_done() -> None:
    gate = Gate(offset=2)
    consumed = Consumed("async", FakeConsumer(9), gate)
    assert gate.entered.wait(20)
    consumed.cancel()
    gate.opened.set()  # the thread in which the handler waits cannot be cancelled
    assert type(consumed.end()).__name__ == "CancelledError"
    assert consumed.fake.committed == {P0: 2}
    assert consumed.fake.is_closed


def test_an_error_of_the_library_ends_the_loop_when_the_record_in_work_has_ended(half: str) -> None:
    def break_down(fake: FakeConsumer) -> Any:
        raise OSError("broken")

    gate = Gate(offset=1)
    consumed = Consumed(half, FakeConsumer(9), gate)
    assert gate.entered.wait(20)
    consumed.fake.events.append(break_down)
    eventually(lambda: not consumed.fake.events)
    gate.opened.set()
    assert isinstance(consumed.end(), OSError)
    assert consumed.fake.committed == {P0: 2}


# rebalances


def test_a_revocation_waits_for_the_record_in_work_and_commits_it(half: str) -> None:
    gate = Gate(offset=2)
    consumed = Consumed(half, FakeConsumer(9, 5), gate)
    assert gate.entered.wait(20)
    consumed.fake.events.append(lambda fake: fake.revoke([P0]))
    eventually(lambda: consumed.is_leaving(P0))
    gate.opened.set()
    until_committed(consumed, {P0: 3, P1: 5})
    consumed.stop()
    assert consumed.end() is None
    assert (gate.ends, consumed.seen[0]) == (["done"], [0, 1, 2])


def test_a_revocation_does_not_wait_longer_than_the_records_budget(half: str) -> None:
    gate = Gate(offset=2)
    budget = PollBudget(400, 1, settings=Settings(longest_execution_ms=1))
    consumed = Consumed(half, FakeConsumer(9), gate, budget=budget)
    assert gate.entered.wait(20)
    consumed.fake.events.append(lambda fake: fake.revoke([P0]))
    eventually(consumed.is_told_lost)
    gate.opened.set()
    eventually(lambda: gate.ends == ["lost"])
    consumed.stop()
    assert consumed.end() is None
    assert consumed.fake.committed == {P0: 2}


def test_a_loss_tells_the_record_in_work_at_once_and_commits_nothing_of_it(half: str) -> None:
    gate = Gate(offset=2)
    consumed = Consumed(half, FakeConsumer(9), gate, commit_seconds=1_000.0)
    assert gate.entered.wait(20)
    consumed.fake.events.append(lambda fake: fake.lose([P0]))
    eventually(consumed.is_told_lost)
    gate.opened.set()
    eventually(lambda: gate.ends == ["lost"])
    consumed.stop()
    assert consumed.end() is None
    assert consumed.fake.committed == {}


def test_a_partition_that_comes_back_is_consumed_from_where_it_was_committed(half: str) -> None:
    consumed = Consumed(half, FakeConsumer(5), nothing)
    until_committed(consumed, {P0: 5})
    consumed.fake.log[P0] = 8
    consumed.fake.events += [lambda fake: fake.revoke([P0]), lambda fake: fake.assign([P0])]
    until_committed(consumed, {P0: 8})
    consumed.stop()
    assert consumed.end() is None
    assert consumed.seen[0] == list(range(8))


def test_a_partition_that_was_put_off_and_comes_back_is_resumed(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_BACKOFF_BASE_MS", "60000")
    monkeypatch.setenv("SAFERETRY_BACKOFF_CAP_MS", "60000")
    is_broken = True

    def work(message: Any) -> None:
        if is_broken:
            raise AutoReconnect("gone")

    consumed = Consumed(half, FakeConsumer(4), work)
    eventually(lambda: consumed.fake.paused == {P0})
    is_broken = False
    consumed.fake.events += [lambda fake: fake.revoke([P0]), lambda fake: fake.assign([P0])]
    until_committed(consumed, {P0: 4})
    consumed.stop()
    assert consumed.end() is None
    assert consumed.seen[0] == [0, 0, 1, 2, 3]
    assert consumed.fake.paused == set() or consumed.fake.is_closed


def test_a_process_that_stood_still_commits_nothing_before_it_has_heard_of_the_group(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "FROZEN", 0.5)
    gate = Gate(offset=2)
    consumed = Consumed(half, FakeConsumer(3), gate)
    assert gate.entered.wait(20)
    until_committed(consumed, {P0: 2})

    def freeze(fake: FakeConsumer) -> None:
        gate.opened.set()
        time.sleep(0.8)

    consumed.fake.events += [freeze, *[lambda fake: None] * 5, lambda fake: fake.lose([P0])]
    eventually(lambda: not consumed.fake.events)
    consumed.stop()
    assert consumed.end() is None
    assert consumed.fake.committed == {P0: 2}


# what is told


def test_progress_and_lag_are_logged_without_contents(half: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saferetry")
    gate = Gate(offset=3)
    consumed = Consumed(half, FakeConsumer(10), gate, report_seconds=0.05)
    assert gate.entered.wait(20)
    eventually(lambda: progress(caplog) and progress(caplog)[-1]["partitions"][0]["lag"] == 7)
    (partition,) = progress(caplog)[-1]["partitions"]
    expected = {"topic": "t", "partition": 0, "done": 3, "position": 3, "committed": 3, "lag": 7, "waiting": 6, "put_off": 0}
    eventually(lambda: progress(caplog)[-1]["partitions"][0] == expected)
    assert partition.keys() == expected.keys()
    gate.opened.set()
    consumed.stop()
    consumed.end()
    assert "left" not in caplog.text  # the messages' value


def progress(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    with contextlib.suppress(RuntimeError):
        told = [record.__dict__.get("saferetry") for record in list(caplog.records)]
        return [facts for facts in told if facts and facts["event"] == "progress"]
    return []


TERMS: dict[str, dict[str, Any]] = {
    "no topics": {"topics": ()},
    "a topic without a name": {"topics": ("",)},
    "no group": {"group": None},
    "no records": {"max_records": 0},
    "no commits": {"commit_records": True},
    "no time": {"commit_seconds": 0},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
def test_terms_that_cannot_work_are_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="run: "):
        Consumed("sync", FakeConsumer(), nothing, **terms)
