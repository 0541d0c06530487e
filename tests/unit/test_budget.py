"""The time that a record may take, on a clock that the test moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferetry import Budget
from saferetry.errors import ConfigurationError


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_budget_counts_down_from_its_making(clock: Clock) -> None:
    budget = Budget(30, clock=clock)
    assert budget.remaining() == 30
    clock.now += 12.5
    assert budget.remaining() == 17.5


@pytest.mark.parametrize("passed", [30.0, 30.001, 1e9])
def test_a_budget_that_is_spent_is_zero_and_never_below(passed: float, clock: Clock) -> None:
    budget = Budget(30, clock=clock)
    clock.now += passed
    assert budget.remaining() == 0.0


@pytest.mark.parametrize("seconds", [0, -1, 0.0, -0.5, math.inf, -math.inf, math.nan, True, None, "30", [30], 1j])
def test_a_budget_is_a_finite_number_above_zero(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^budget is .*: give seconds, a finite number above 0$"):
        Budget(seconds)


def test_a_budget_of_a_wrong_type_is_named_by_its_type_alone() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Budget({"card": "4111 1111"})  # type: ignore[arg-type]  # that is the test
    assert "4111" not in str(caught.value)
    assert "dict" in str(caught.value)


def test_a_real_clock_is_used_by_itself() -> None:
    assert 0 < Budget(1e-3).remaining() <= 1e-3


@pytest.mark.parametrize(("inner", "outer", "remaining"), [(10, 30, 10), (30, 10, 10), (10, 10, 10)])
def test_of_two_budgets_the_one_that_ends_first_holds(inner: float, outer: float, remaining: float, clock: Clock) -> None:
    assert Budget(inner, clock=clock).within(Budget(outer, clock=clock)).remaining() == remaining


def test_without_an_outer_budget_the_own_one_holds(clock: Clock) -> None:
    budget = Budget(10, clock=clock)
    assert budget.within(None) is budget


@given(
    inner=st.floats(0.001, 1e6),
    outer=st.floats(0.001, 1e6),
    later=st.floats(0, 1e6),
    passed=st.floats(0, 1e6),
)
def test_an_inner_budget_only_shortens(inner: float, outer: float, later: float, passed: float) -> None:
    clock = Clock()
    around = Budget(outer, clock=clock)
    clock.now += later
    inside = Budget(inner, clock=clock).within(around)
    clock.now += passed
    assert inside.remaining() <= around.remaining() + 1e-6
