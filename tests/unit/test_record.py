"""One record: its scope, its budget, what it has written, and who else may see it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from saferetry import Budget, Outcome, Record, RecordKey, Settings, WriteView, current_record, propagate, record, repeatable
from saferetry._record import OPEN_RECORDS, OpenRecords, is_repeatable
from saferetry.errors import ConfigurationError, UnsettledWriteError


class FakeWrite:
    """A write call as a record sees it."""

    def __init__(self, outcome: Outcome, *, repeatable: bool = False, is_foreign: bool = False) -> None:
        self.outcome = outcome
        self.repeatable = repeatable
        self.is_foreign = is_foreign

    def orphan(self) -> None:
        return None

    def view(self) -> WriteView:
        return WriteView("insert_one", "shop.orders", self.outcome, 1, 1)


def failing_after(current: Record, outcome: Outcome) -> None:
    current.add(FakeWrite(outcome))
    raise KeyError


def made(*, strict: bool = False, seconds: float = 60, name: str = "on_order", key: Any = ("orders", 0, 17)) -> Record:
    settings = Settings(strict=strict)
    return Record(RecordKey.of(key) if key else None, budget=Budget(seconds), settings=settings, name=name)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    assert current_record() is None
    yield
    assert current_record() is None
    assert OPEN_RECORDS._threads == {}


# --- scope -----------------------------------------------------------------------------------------------------------------


def test_outside_there_is_no_record() -> None:
    assert current_record() is None


def test_inside_the_record_is_the_current_one() -> None:
    with record("a") as current:
        assert current_record() is current
        assert (current.key, current.execution, current.skipped, current.writes) == (RecordKey("a"), 1, False, ())
    assert current_record() is None


def test_a_record_needs_no_key() -> None:
    with record() as current:
        assert current.key is None
        assert current.tag is None


def test_a_record_has_its_name_in_messages() -> None:
    assert made().label() == "on_order (orders/0/17)"
    assert made(key=None).label() == "on_order"
    assert made(key=None, name="").label() == "without a name"


def test_an_error_leaves_and_the_record_ends() -> None:
    with pytest.raises(KeyError), record("a") as current:
        raise KeyError
    assert current.ended
    assert current_record() is None


def test_an_inner_record_gives_the_outer_one_back() -> None:
    with record("outer") as outer:
        with record("inner") as inner:
            assert current_record() is inner
        assert current_record() is outer
        assert inner.ended
        assert not outer.ended


async def test_asyncio_has_the_same() -> None:
    async with record("outer") as outer:
        async with record("inner") as inner:
            await asyncio.sleep(0)
            assert current_record() is inner
        assert current_record() is outer


async def test_tasks_inherit_the_record_and_do_not_change_that_of_others() -> None:
    async def work(name: str) -> tuple[Record | None, str]:
        seen = current_record()
        async with record(name) as own:
            await asyncio.sleep(0)
            assert current_record() is own
        return seen, name

    async with record("outer") as outer:
        results = await asyncio.gather(*(work(f"task {n}") for n in range(5)))
        assert all(seen is outer for seen, _ in results)
        assert current_record() is outer


def test_a_thread_does_not_inherit_the_record() -> None:
    with record("a"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_record).result() is None


def test_a_record_can_be_entered_once() -> None:
    once = record("a")
    with once:
        pass
    with pytest.raises(ConfigurationError, match=r"can be entered once: call record\(\.\.\.\) again"), once:
        pass


def test_a_record_cannot_be_entered_in_itself() -> None:
    once = record("a")
    with once, pytest.raises(ConfigurationError, match="can be entered once"):
        once.__enter__()


def test_a_record_cannot_be_entered_again_while_an_inner_one_is_open() -> None:
    once = record("a")
    with once, record("inner"), pytest.raises(ConfigurationError, match="can be entered once"):
        once.__enter__()


def test_a_record_cannot_be_entered_by_two_threads() -> None:
    once = record("a")

    def enter() -> None:
        with once:
            pass

    with once, ThreadPoolExecutor(1) as pool, pytest.raises(ConfigurationError, match="can be entered once"):
        pool.submit(enter).result()


def test_an_inner_record_that_was_not_closed_is_named_and_does_not_stay() -> None:
    outer = record("outer", name="consumer")
    outer.__enter__()
    inner = record("inner").__enter__()
    with pytest.raises(ConfigurationError, match=r"record consumer \(outer/0/None\) ends where it is not the current one"):
        outer.__exit__(None, None, None)
    assert current_record() is None
    OPEN_RECORDS.remove(inner)  # which nobody will close any more


def test_a_record_that_ends_in_another_context_is_named() -> None:
    opened = record("a", name="generator")
    contextvars.copy_context().run(opened.__enter__)
    with pytest.raises(ConfigurationError, match=r"generator .* ends where it is not the current one: it was entered in"):
        opened.__exit__(None, None, None)


def test_the_error_about_a_leak_is_chained_to_the_one_that_was_leaving() -> None:
    opened = record("a")
    contextvars.copy_context().run(opened.__enter__)
    cause = KeyError("x")
    with pytest.raises(ConfigurationError) as caught:
        opened.__exit__(KeyError, cause, None)
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("key", [7, ["a"], ("a", -1)])
def test_a_wrong_key_is_refused_at_once(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="record key: "):
        record(key)


@pytest.mark.parametrize("budget", [0, -1, "30", True])
def test_a_wrong_budget_is_refused_at_once(budget: Any) -> None:
    with pytest.raises(ConfigurationError, match="budget is"):
        record("a", budget=budget)


# --- budgets ---------------------------------------------------------------------------------------------------------------


def test_the_budget_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_BUDGET_MS", "5000")
    with record("a") as current:
        assert 4.9 < current.remaining() <= 5


def test_a_budget_may_be_given_in_seconds_or_as_one_that_counts_already() -> None:
    counting = Budget(20)
    with record("a", budget=3) as current:
        assert 2.9 < current.remaining() <= 3
    with record("a", budget=counting) as current:
        assert current.budget is counting


@pytest.mark.parametrize(("outer", "inner", "left"), [(30, 5, 5), (5, 30, 5)])
def test_an_inner_budget_only_shortens(outer: float, inner: float, left: float) -> None:
    with record("outer", budget=outer), record("inner", budget=inner) as current:
        assert left - 0.1 < current.remaining() <= left


def test_the_outer_budget_is_as_it_was_after_an_inner_record() -> None:
    with record("outer", budget=30) as outer:
        with record("inner", budget=5):
            pass
        assert outer.remaining() > 29


# --- what stands against another execution ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "stands_against_it"),
    [
        (Outcome.NOT_SENT, False),
        (Outcome.NOT_APPLIED, False),
        (Outcome.APPLIED, True),
        (Outcome.UNKNOWN, True),
        (Outcome.UNVERIFIABLE, True),
    ],
)
def test_a_write_stands_against_another_execution(outcome: Outcome, stands_against_it: bool) -> None:
    current = made()
    current.add(FakeWrite(outcome))
    assert bool(current.effect()) is stands_against_it
    if stands_against_it:
        assert current.effect() == f"insert_one on shop.orders is {outcome.value}"


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_repeatable_write_does_not(outcome: Outcome) -> None:
    current = made()
    current.add(FakeWrite(outcome, repeatable=True))
    assert current.effect() == ""


def test_a_write_past_the_guarded_methods_does() -> None:
    current = made()
    current.note_unannounced("collMod")
    assert current.effect() == "the command collMod was sent past the guarded methods"


def test_the_first_reason_is_kept() -> None:
    current = made()
    current.note_effect("first")
    current.note_effect("second")
    assert current.effect() == "first"


def test_the_effects_of_an_inner_record_are_those_of_the_outer_one() -> None:
    with record("outer") as outer:
        with record("inner") as inner:
            inner.add(FakeWrite(Outcome.APPLIED))
        assert outer.effect() == "in an inner record, insert_one on shop.orders is applied"


def test_a_repeatable_write_of_an_inner_record_is_none_of_the_outer_one() -> None:
    with record("outer") as outer:
        with record("inner") as inner:
            inner.add(FakeWrite(Outcome.APPLIED, repeatable=True))
        assert outer.effect() == ""


def test_an_inner_record_that_fails_still_tells_its_effects() -> None:
    with record("outer") as outer:
        with pytest.raises(KeyError), record("inner") as inner:
            failing_after(inner, Outcome.UNKNOWN)
        assert "in an inner record" in outer.effect()


# --- what is left open -----------------------------------------------------------------------------------------------------


def test_a_write_left_open_in_silence_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "saferetry"), record("a", name="on_order") as current:
        current.add(FakeWrite(Outcome.UNKNOWN))
        current.add(FakeWrite(Outcome.UNKNOWN))
    (message,) = [entry.getMessage() for entry in caplog.records]
    assert "record on_order (a/0/None) ended although 2 of its writes may or may not have been applied" in message
    assert "(first: insert_one on shop.orders); let the error leave the handler" in message


def test_under_strict_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_STRICT", "1")
    with (
        pytest.raises(UnsettledWriteError, match="1 of its writes may or may not have been applied") as caught,
        record("a") as r,
    ):
        r.add(FakeWrite(Outcome.UNKNOWN))
    assert [write.outcome for write in caught.value.writes] == [Outcome.UNKNOWN]
    assert current_record() is None


@pytest.mark.parametrize("outcome", [Outcome.NOT_SENT, Outcome.NOT_APPLIED, Outcome.APPLIED, Outcome.UNVERIFIABLE])
def test_any_other_outcome_is_the_handlers_own_business(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SAFERETRY_STRICT", "1")
    with record("a") as current:
        current.add(FakeWrite(outcome))
    assert not caplog.records


@pytest.mark.parametrize("write", [FakeWrite(Outcome.UNKNOWN, repeatable=True), FakeWrite(Outcome.UNKNOWN, is_foreign=True)])
def test_repeatable_and_foreign_writes_may_be_left_open(write: FakeWrite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_STRICT", "1")
    with record("a") as current:
        current.add(write)


def test_an_error_that_leaves_tells_it_by_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SAFERETRY_STRICT", "1")
    with pytest.raises(KeyError), record("a") as current:
        failing_after(current, Outcome.UNKNOWN)
    assert not caplog.records


# --- tags ------------------------------------------------------------------------------------------------------------------


def test_the_tag_names_the_record_by_its_hash_and_the_execution() -> None:
    current = made()
    assert current.tag == {"saferetry": {"record": RecordKey("orders", 0, 17).hashed(), "execution": 1}}


def test_the_tag_can_be_switched_off() -> None:
    assert Record(RecordKey("a"), budget=Budget(1), settings=Settings(tag=False)).tag is None


# --- repeatable ------------------------------------------------------------------------------------------------------------


def test_repeatable_holds_inside_and_not_after() -> None:
    assert not is_repeatable()
    with repeatable():
        assert is_repeatable()
        with repeatable():
            assert is_repeatable()
        assert is_repeatable()
    assert not is_repeatable()


def test_repeatable_ends_with_an_error() -> None:
    with pytest.raises(KeyError), repeatable():
        raise KeyError
    assert not is_repeatable()


async def test_repeatable_of_one_task_is_not_that_of_another() -> None:
    async def declare() -> None:
        with repeatable():
            await asyncio.sleep(0.01)

    task = asyncio.create_task(declare())
    await asyncio.sleep(0)
    assert not is_repeatable()
    await task


# --- propagate -------------------------------------------------------------------------------------------------------------


def seen() -> tuple[Record | None, bool]:
    return current_record(), is_repeatable()


def test_a_propagated_function_sees_the_record_in_another_thread() -> None:
    with record("a") as current, ThreadPoolExecutor(1) as pool:
        assert pool.submit(propagate(seen)).result() == (current, False)
        assert pool.submit(seen).result() == (None, False)


def test_a_propagated_function_sees_repeatable() -> None:
    with record("a") as current, ThreadPoolExecutor(1) as pool:
        with repeatable():
            bound = propagate(seen)
        assert pool.submit(bound).result() == (current, True)


def test_a_propagated_function_runs_in_several_threads_at_once() -> None:
    both = threading.Barrier(4)

    def work(number: int) -> tuple[int, Record | None]:
        both.wait(5)
        found = current_record()
        both.wait(5)
        return number, found

    with record("a") as current, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(propagate(work), range(4))) == [(number, current) for number in range(4)]
        assert list(pool.map(lambda _: current_record(), range(4))) == [None] * 4


def test_a_propagated_function_gives_the_threads_own_record_back() -> None:
    with record("a") as outer:
        bound = propagate(current_record)

        def work() -> tuple[Record | None, bool]:
            with record("of the thread") as own:
                return bound(), current_record() is own

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(work).result() == (outer, True)


def test_a_propagated_function_outside_a_record_sees_none() -> None:
    assert propagate(seen)() == (None, False)


def test_a_propagated_function_that_fails_leaves_nothing_behind() -> None:
    def fail() -> None:
        raise KeyError

    def work() -> Record | None:
        with pytest.raises(KeyError):
            bound()
        return current_record()

    with record("a"), ThreadPoolExecutor(1) as pool:
        bound = propagate(fail)
        assert pool.submit(work).result() is None


def test_a_propagated_function_keeps_name_arguments_and_result() -> None:
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    bound = propagate(add)
    assert (bound.__name__, bound.__doc__, bound(2, b=3)) == ("add", "Add.", 5)


def test_a_propagated_coroutine_function_is_one() -> None:
    async def look() -> Record | None:
        await asyncio.sleep(0)
        return current_record()

    with record("a") as current, ThreadPoolExecutor(1) as pool:
        bound = propagate(look)
        assert asyncio.iscoroutinefunction(bound)
        assert pool.submit(lambda: asyncio.run(bound())).result() is current


# --- open records of other threads -----------------------------------------------------------------------------------------


def run_in_thread(fn: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


def test_a_record_is_open_elsewhere_for_other_threads_only() -> None:
    with record("a") as current:
        assert OPEN_RECORDS.elsewhere() == []
        assert run_in_thread(OPEN_RECORDS.elsewhere) == [current]
    assert run_in_thread(OPEN_RECORDS.elsewhere) == []


def test_several_records_of_a_thread_are_open_elsewhere() -> None:
    with record("a") as outer, record("b") as inner:
        assert set(run_in_thread(OPEN_RECORDS.elsewhere)) == {outer, inner}


def test_a_record_made_here_and_entered_in_another_thread_is_open_there() -> None:
    made_here = record("a")
    entered, done = threading.Event(), threading.Event()

    def work() -> list[Record]:
        with made_here:
            entered.set()
            done.wait(5)
            return OPEN_RECORDS.elsewhere()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        entered.wait(5)
        here = OPEN_RECORDS.elsewhere()
        done.set()
        assert running.result() == []
    assert len(here) == 1


def test_forgetting_a_record_that_is_not_known_does_no_harm() -> None:
    records = OpenRecords()
    records.remove(made())
    assert records.elsewhere() == []


def test_knowing_of_many_threads_at_once() -> None:
    records = OpenRecords()
    all_records = [made() for _ in range(50)]

    def work(number: int) -> None:
        for _ in range(50):
            records.add(all_records[number])
            assert all_records[number] not in records.elsewhere()  # it is of this thread
            records.remove(all_records[number])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(50)))
    assert records.elsewhere() == []
