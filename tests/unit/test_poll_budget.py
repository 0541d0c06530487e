"""The time between two polls: what fits, what is cut, and how the records of a poll share it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferetry import Budget, MongoClient, Settings, current_record, handler
from saferetry.errors import ConfigurationError
from saferetry.kafka import PollBudget
from saferetry.kafka._arithmetic import PollArithmetic
from saferetry.kafka._poll_budget import MARGIN
from tests.unit.test_budget import Clock

QUICK = Settings(longest_execution_ms=100)
R33 = PollArithmetic(interval=300_000, records=500, longest=100, first_wait=100, longest_wait=10_000)


# the arithmetic


@pytest.mark.parametrize(
    ("executions", "needed", "fits"), [(1, 50_000, True), (2, 150_000, True), (3, 300_000, False), (4, 550_000, False)]
)
def test_r33_the_waits_and_every_record_of_the_poll_count(executions: int, needed: int, fits: bool) -> None:
    assert R33.needed(executions) == needed
    assert R33.fits(executions) is fits


def test_no_wait_counts_as_longer_than_the_cap() -> None:
    assert PollArithmetic(1, 1, 1, first_wait=100, longest_wait=250).waits(5) == 100 + 200 + 250 + 250


@given(interval=st.integers(1, 10**7), records=st.integers(1, 1000), longest=st.integers(1, 10**5), wanted=st.integers(1, 10))
def test_what_is_said_to_fit_fits_and_one_more_does_not(interval: int, records: int, longest: int, wanted: int) -> None:
    terms = PollArithmetic(interval, records, longest, first_wait=100, longest_wait=10_000)
    most = terms.most_executions(wanted)
    assert all(terms.fits(executions) for executions in range(1, most + 1))
    assert most == wanted or not terms.fits(most + 1)


# before the start


def test_r33_of_four_executions_two_fit_and_a_warning_shows_the_sum(caplog: pytest.LogCaptureFixture) -> None:
    assert PollBudget(300_000, 500, settings=QUICK).executions == 2
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message == (
        "poll budget: 4 executions do not fit: 500 records x (100 ms x 4 executions + 700 ms of waits) = 550,000 ms, "
        "max.poll.interval.ms 300,000. To have them, let a poll return 272 records at most, raise max.poll.interval.ms above "
        "550,000, or shorten the client's time limits. A handler is executed 2 times at most: 500 records x (100 ms x 2 "
        "executions + 100 ms of waits) = 150,000 ms, max.poll.interval.ms 300,000"
    )


def test_what_the_warning_offers_would_fit() -> None:
    assert PollBudget(300_000, 272, settings=QUICK).executions == 4
    assert PollBudget(300_000, 273, settings=QUICK).executions == 3
    assert PollBudget(550_001, 500, settings=QUICK).executions == 4


def test_r33_strict_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigurationError, match=r"4 executions do not fit: 500 records .* 2 would fit"):
        PollBudget(300_000, 500, settings=Settings(longest_execution_ms=100, strict=True))


def test_what_fits_is_reported_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saferetry")
    assert PollBudget(300_000, 1, settings=QUICK).executions == 4
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "1 records x (100 ms x 4 executions + 700 ms of waits) = 1,100 ms, max.poll.interval.ms 300,000" in caplog.text


def test_r35_a_configured_execution_that_alone_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"Not even one execution fits: 500 records x \(700 ms x 1 executions"):
        PollBudget(300_000, 500, settings=Settings(longest_execution_ms=700))


def test_an_assumed_execution_that_does_not_fit_is_a_warning_and_under_strict_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert PollBudget(300_000, 500, settings=Settings()).executions == 1
    assert "Not even one execution fits" in caplog.text
    with pytest.raises(ConfigurationError, match="Not even one execution fits"):
        PollBudget(300_000, 500, settings=Settings(strict=True))


def test_the_longest_execution_is_a_server_selection_and_two_sends_without_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "saferetry")
    options: dict[str, Any] = {"serverSelectionTimeoutMS": 3_000, "socketTimeoutMS": 2_000, "connect": False}
    with MongoClient[dict[str, Any]](**options, saferetry=Settings()) as client:
        PollBudget(300_000, 1, client=client)
    assert "(7,000 ms x 4 executions" in caplog.text


def test_without_a_socket_timeout_the_servers_limit_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saferetry")
    with MongoClient[dict[str, Any]](
        serverSelectionTimeoutMS=3_000, connect=False, saferetry=Settings(max_time_ms=500)
    ) as client:
        PollBudget(300_000, 1, client=client)
    assert "(4,000 ms x 4 executions" in caplog.text


# where the numbers come from


def test_the_numbers_come_from_variables(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saferetry")
    for name, value in (("MAX_POLL_INTERVAL_MS", "60000"), ("MAX_POLL_RECORDS", "7"), ("LONGEST_EXECUTION_MS", "10")):
        monkeypatch.setenv(f"SAFERETRY_{name}", value)
    PollBudget()
    assert "7 records x (10 ms x 4" in caplog.text
    assert "max.poll.interval.ms 60,000" in caplog.text


@pytest.mark.parametrize(
    ("config", "library", "records", "interval"),
    [
        ({"bootstrap.servers": "b", "max.poll.interval.ms": 60_000}, None, 1, 60_000),
        ({"bootstrap.servers": "b", "max.poll.interval.ms": "60000"}, None, 1, 60_000),
        ({"bootstrap.servers": "b"}, None, 1, 300_000),
        ({"max_poll_interval_ms": 60_000, "max_poll_records": 10}, None, 10, 60_000),
        ({"max_poll_interval_ms": 60_000}, "kafka-python", 500, 60_000),
        ({"max_poll_records": 3}, "aiokafka", 3, 300_000),
        ({"max.poll.records": 4, "max.poll.interval.ms": 9_000}, None, 4, 9_000),
    ],
)
def test_a_configuration_gives_the_numbers_in_either_spelling(
    config: dict[str, Any], library: Any, records: int, interval: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "saferetry")
    PollBudget.from_config(config, library=library, settings=Settings(longest_execution_ms=1, max_executions=1))
    assert f"{records} records x (1 ms x 1 executions + 0 ms of waits) = {records} ms" in caplog.text
    assert f"max.poll.interval.ms {interval:,}" in caplog.text


def test_consume_of_n_is_told_beside_the_configuration(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saferetry")
    PollBudget.from_config({"bootstrap.servers": "b"}, max_poll_records=20, settings=QUICK)
    assert "20 records" in caplog.text


@pytest.mark.parametrize("library", ["aiokafka", None])
def test_a_client_without_a_limit_of_its_own_must_be_told_one(library: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_poll_records is not known"):
        PollBudget.from_config({"max_poll_interval_ms": 60_000}, library=library, settings=QUICK)


@pytest.mark.parametrize(
    ("interval", "records", "message"),
    [
        (None, 1, "max_poll_interval_ms is not known"),
        (1_000, None, "max_poll_records is not known"),
        (0, 1, "max_poll_interval_ms is 0: give a whole number above 0"),
        (1_000, True, "max_poll_records is True"),
        (1_000, "5", "max_poll_records is '5'"),
    ],
)
def test_numbers_that_are_none_are_refused(interval: Any, records: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PollBudget(interval, records, settings=QUICK)


def test_a_configuration_with_a_wrong_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"max\.poll\.interval\.ms of the configuration is no whole number"):
        PollBudget.from_config({"max.poll.interval.ms": "soon"}, settings=QUICK)


@pytest.mark.parametrize(
    ("config", "warns"),
    [
        ({}, True),
        ({"enable.auto.commit": True}, True),
        ({"enable_auto_commit": True}, True),
        ({"enable.auto.commit": "true"}, True),
        ({"enable.auto.commit": False}, False),
        ({"enable.auto.commit": "false"}, False),
        ({"enable_auto_commit": False}, False),
        ({"enable.auto.offset.store": False}, False),
    ],
)
def test_a_consumer_that_commits_by_itself_is_warned_of(
    config: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    PollBudget.from_config(config, max_poll_records=1, settings=QUICK)
    assert ("commits by itself what it has polled" in caplog.text) is warns


def test_strict_refuses_a_consumer_that_commits_by_itself() -> None:
    with pytest.raises(ConfigurationError, match="commits by itself"):
        PollBudget.from_config({}, max_poll_records=1, settings=Settings(longest_execution_ms=100, strict=True))


# at run time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budget(clock: Clock, *, records: int = 1, longest: int = 1_000, interval: int = 10_000) -> PollBudget:
    return PollBudget(interval, records, settings=Settings(longest_execution_ms=longest, max_executions=1), clock=clock)


def test_a_record_has_the_interval_less_its_margin_from_the_moment_poll_returned(clock: Clock) -> None:
    poll = budget(clock)
    poll.start()
    clock.now += 2
    assert poll("record").remaining() == pytest.approx(10 * (1 - MARGIN) - 2)


def test_each_record_leaves_a_reserve_for_those_after_it(clock: Clock) -> None:
    poll = budget(clock, records=3)
    poll.start(3)
    assert poll("first").remaining() == pytest.approx(9 - 2)
    clock.now += 0.5
    assert poll("second").remaining() == pytest.approx(8.5 - 1)
    clock.now += 0.5
    assert poll("third").remaining() == pytest.approx(8)


def test_where_the_reserve_is_not_there_the_records_share_evenly(clock: Clock) -> None:
    poll = budget(clock, records=3)
    poll.start(["a", "b", "c"])
    clock.now += 7.5
    assert poll("a").remaining() == pytest.approx(0.5)
    assert poll("b").remaining() == pytest.approx(0.75)


def test_a_budget_that_is_spent_is_still_one(clock: Clock) -> None:
    poll = budget(clock)
    poll.start()
    clock.now += 1_000
    assert 0 < poll("late").remaining() <= 0.001


def test_the_next_poll_begins_anew(clock: Clock) -> None:
    poll = budget(clock)
    poll.start()
    clock.now += 8
    poll.start()
    assert poll("record").remaining() == pytest.approx(9)


@pytest.mark.parametrize(
    ("returned", "first"), [(1, 9), (2, 8), (["a", "b"], 8), ({"p0": ["a"], "p1": ["b", "c"]}, 7), ([], 9), (None, 8)]
)
def test_what_poll_returned_is_counted(returned: Any, first: float, clock: Clock) -> None:
    poll = budget(clock, records=2)
    poll.start(returned)
    assert poll("first").remaining() == pytest.approx(first)


@pytest.mark.parametrize("returned", ["a", -1, True, b"message", object()])
def test_what_is_no_number_of_records_is_refused(returned: Any, clock: Clock) -> None:
    with pytest.raises(ConfigurationError, match=r"start\(\) got a"):
        budget(clock).start(returned)


def test_a_record_before_the_first_poll_is_refused(clock: Clock) -> None:
    with pytest.raises(ConfigurationError, match=r"call start\(\) each time when poll\(\) has returned"):
        budget(clock)("record")


@given(records=st.integers(1, 50), spent=st.lists(st.floats(0, 1), min_size=50, max_size=50))
def test_records_that_keep_to_their_budgets_are_done_in_time(records: int, spent: list[float]) -> None:
    clock = Clock()
    poll = budget(clock, records=records, longest=100)
    poll.start(records)
    begin = clock.now
    for _, share in zip(range(records), spent, strict=False):
        clock.now += poll("record").remaining() * share
    assert clock.now - begin <= 10 * (1 - MARGIN) + records * 0.001 + 1e-6


# given to a handler


def test_a_handler_is_executed_as_often_as_fits() -> None:
    poll = PollBudget(300_000, 500, settings=Settings(longest_execution_ms=100))
    poll.start()
    executions = []

    @handler(name="t", budget=poll, retry_on=ConnectionError)
    def on_order(message: str) -> None:
        record = current_record()
        executions.append(record.execution if record else 0)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        on_order("message")
    assert executions == [1, 2]


def test_a_nested_budget_keeps_the_fewest_executions(clock: Clock) -> None:
    inner, outer = Budget(5, clock=clock), Budget(9, executions=2, clock=clock)
    assert (inner.within(outer).executions, inner.within(outer).remaining()) == (2, 5)
    assert (outer.within(inner).executions, outer.within(inner).remaining()) == (2, 5)
    assert inner.executions is None
