"""Whether and when to try again: decisions row by row, the jitter's laws, and the time that must be left."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferetry._outcomes import SUCCESS, Facts, Outcome, Reading, Signal, settle
from saferetry._policy import (
    DRIVER_RETRYABLE_CODES,
    RETRYABLE_CODES,
    SHORTEST_CALL,
    Decision,
    FullJitter,
    decide,
    enough_time,
    is_passing,
)
from saferetry._settings import Settings

RESEND, FINAL, REFUSED = Decision.RESEND, Decision.FINAL, Decision.REFUSED
NOT_SENT, NOT_APPLIED, APPLIED = Outcome.NOT_SENT, Outcome.NOT_APPLIED, Outcome.APPLIED
UNKNOWN, UNVERIFIABLE = Outcome.UNKNOWN, Outcome.UNVERIFIABLE
NETWORK, SELECTION = Reading(Signal.NETWORK), Reading(Signal.SELECTION)
OVERLOAD = frozenset({"RetryableError", "SystemOverloadedError"})


def reading(signal: Signal, code: int | None = None, *labels: str) -> Reading:
    return Reading(signal, code, frozenset(labels))


# --- which errors may go away by themselves --------------------------------------------------------------------------------

PASSING: Mapping[str, tuple[Reading, bool]] = {
    "success": (SUCCESS, False),
    "no server": (SELECTION, True),
    "network": (NETWORK, True),
    "encoding": (reading(Signal.ENCODING), False),
    "cancelled": (reading(Signal.OTHER), False),
    "not primary": (reading(Signal.COMMAND_ERROR, 10107), True),
    "not primary, in a bulk": (reading(Signal.WRITE_ERROR, 10107), True),
    "maxTimeMS": (reading(Signal.COMMAND_ERROR, 50), True),
    "write conflict": (reading(Signal.COMMAND_ERROR, 112), True),
    "throttled": (reading(Signal.COMMAND_ERROR, 16500), True),
    "interrupted": (reading(Signal.COMMAND_ERROR, 11601), True),
    "lock timeout": (reading(Signal.COMMAND_ERROR, 24), True),
    "duplicate": (reading(Signal.WRITE_ERROR, 11000), False),
    "unauthorized": (reading(Signal.COMMAND_ERROR, 13), False),
    "unlisted": (reading(Signal.COMMAND_ERROR, 301), False),
    "unlisted with the driver's label": (reading(Signal.COMMAND_ERROR, 301, "RetryableWriteError"), True),
    "unlisted with another label": (reading(Signal.COMMAND_ERROR, 301, "NoWritesPerformed"), False),
    "overload": (reading(Signal.COMMAND_ERROR, 462, *OVERLOAD), True),
    "half of overload": (reading(Signal.COMMAND_ERROR, 462, "RetryableError"), False),
    "no code": (reading(Signal.COMMAND_ERROR), False),
    "history lost": (reading(Signal.COMMAND_ERROR, 217, "RetryableWriteError"), False),
    "newer number": (reading(Signal.COMMAND_ERROR, 225, "RetryableWriteError"), False),
    "wtimeout": (reading(Signal.WRITE_CONCERN, 64), False),
    "maxTimeMS while waiting": (reading(Signal.WRITE_CONCERN, 50), False),
    "shutdown while waiting": (reading(Signal.WRITE_CONCERN, 91), True),
    "step-down while waiting": (reading(Signal.WRITE_CONCERN, 189), True),
}


@pytest.mark.parametrize(("said", "passes"), PASSING.values(), ids=PASSING.keys())
def test_an_error_passes_or_stays(said: Reading, passes: bool) -> None:
    assert is_passing(said) is passes


@pytest.mark.parametrize("code", sorted(RETRYABLE_CODES))
def test_a_retryable_code_passes_as_a_command_error(code: int) -> None:
    assert is_passing(reading(Signal.COMMAND_ERROR, code))


@pytest.mark.parametrize("code", sorted(DRIVER_RETRYABLE_CODES))
def test_the_drivers_codes_pass_as_a_write_concern_error(code: int) -> None:
    assert is_passing(reading(Signal.WRITE_CONCERN, code))


def test_the_drivers_codes_are_those_of_the_installed_driver() -> None:
    from pymongo import helpers_shared  # noqa: PLC0415 - private, and only here

    assert DRIVER_RETRYABLE_CODES == helpers_shared._RETRYABLE_ERROR_CODES


# --- what follows ----------------------------------------------------------------------------------------------------------


def decided(facts: Facts, outcome: Outcome, *, repeatable: bool = False, id_protected: bool = False) -> Decision:
    return decide(facts, outcome, repeatable=repeatable, id_protected=id_protected)


UNNUMBERED = Facts(NETWORK, numbered=False)
MULTI = Facts(NETWORK, numbered=False, multi=True)
SHUTDOWN_WHILE_WAITING = reading(Signal.WRITE_CONCERN, 91)
DECISIONS: Mapping[str, tuple[Decision, Decision]] = {
    "nothing was sent": (decided(Facts(SELECTION, sent=0), NOT_SENT), RESEND),
    "nothing was sent of a multi write": (decided(Facts(NETWORK, sent=0, multi=True), NOT_SENT), RESEND),
    "nothing was applied": (decided(Facts(reading(Signal.COMMAND_ERROR, 50)), NOT_APPLIED), RESEND),
    "nothing was applied of a multi write": (
        decided(Facts(reading(Signal.COMMAND_ERROR, 462, *OVERLOAD), multi=True, numbered=False), NOT_APPLIED),
        RESEND,
    ),
    "the data is at fault": (decided(Facts(reading(Signal.WRITE_ERROR, 11000)), NOT_APPLIED), FINAL),
    "lost reply, numbered": (decided(Facts(NETWORK), UNKNOWN), RESEND),
    "lost reply, not numbered": (decided(UNNUMBERED, UNKNOWN), REFUSED),
    "lost reply, not numbered, repeatable": (decided(UNNUMBERED, UNKNOWN, repeatable=True), RESEND),
    "lost reply, not numbered, with an _id of its own": (decided(UNNUMBERED, UNKNOWN, id_protected=True), RESEND),
    "lost reply of a multi write": (decided(MULTI, UNKNOWN), REFUSED),
    "lost reply of a multi write, repeatable": (decided(MULTI, UNKNOWN, repeatable=True), RESEND),
    "lost reply on a session of the user's": (decided(Facts(NETWORK, sent=0, foreign=True), UNKNOWN), REFUSED),
    "the same, repeatable": (decided(Facts(NETWORK, sent=0, foreign=True), UNKNOWN, repeatable=True), REFUSED),
    "unknown, and the error stays": (decided(Facts(reading(Signal.COMMAND_ERROR, 217), sent=2), UNKNOWN), FINAL),
    "cancelled": (decided(Facts(reading(Signal.OTHER)), UNKNOWN), FINAL),
    "cancelled, repeatable": (decided(Facts(reading(Signal.OTHER)), UNKNOWN, repeatable=True), FINAL),
    "applied, the server shut down while waiting": (decided(Facts(SHUTDOWN_WHILE_WAITING), APPLIED), RESEND),
    "applied, not numbered": (decided(Facts(SHUTDOWN_WHILE_WAITING, numbered=False), APPLIED), FINAL),
    "applied, multi": (decided(Facts(SHUTDOWN_WHILE_WAITING, multi=True), APPLIED), FINAL),
    "applied, not numbered, repeatable": (
        decided(Facts(SHUTDOWN_WHILE_WAITING, numbered=False), APPLIED, repeatable=True),
        FINAL,
    ),
    "applied, wtimeout": (decided(Facts(reading(Signal.WRITE_CONCERN, 64)), APPLIED), FINAL),
    "nobody was asked": (decided(Facts(NETWORK, sent=0, acknowledged=False), UNVERIFIABLE), FINAL),
    "nobody was asked, repeatable": (
        decided(Facts(NETWORK, sent=0, acknowledged=False), UNVERIFIABLE, repeatable=True),
        FINAL,
    ),
}


@pytest.mark.parametrize(("decision", "expected"), DECISIONS.values(), ids=DECISIONS.keys())
def test_a_failed_driver_call_is_followed_by(decision: Decision, expected: Decision) -> None:
    assert decision is expected


@given(
    signal=st.sampled_from(list(Signal)),
    code=st.sampled_from([None, 50, 91, 112, 189, 217, 225, 10107, 11000, 11600, 11602, 99999]),
    sent=st.integers(0, 2),
    unsettled=st.integers(0, 2),
    multi=st.booleans(),
    foreign=st.booleans(),
)
def test_what_has_no_number_and_may_have_been_applied_is_never_sent_again(
    *, signal: Signal, code: int | None, sent: int, unsettled: int, multi: bool, foreign: bool
) -> None:
    facts = Facts(Reading(signal, code), sent, unsettled, numbered=False, multi=multi, foreign=foreign)
    outcome = settle(facts)
    if outcome.is_effect:
        assert decided(facts, outcome) is not RESEND


# --- the waits -------------------------------------------------------------------------------------------------------------


def waits(settings: Settings, seed: int | None = None, attempts: int = 3) -> list[float]:
    """Return the waits before attempts 2, 3, ... of one client."""
    wait: Callable[[Any], float] = FullJitter(settings, random.Random(settings.seed if seed is None else seed))
    return [wait(SimpleNamespace(attempt_number=number)) for number in range(1, attempts + 1)]


@given(
    base=st.integers(1, 60_000),
    cap=st.integers(1, 86_400_000),
    seed=st.integers(0, 2**32),
    attempts=st.integers(1, 100),
)
def test_a_wait_is_between_zero_and_the_growing_capped_limit(base: int, cap: int, seed: int, attempts: int) -> None:
    settings = Settings(backoff_base_ms=base, backoff_cap_ms=max(base, cap))
    for number, wait in enumerate(waits(settings, seed, attempts)):
        assert 0 <= wait <= min(max(base, cap), base * 2**number) / 1000


@given(st.integers(0, 2**63 - 1))
def test_a_seed_makes_the_waits_repeatable(seed: int) -> None:
    assert waits(Settings(seed=seed)) == waits(Settings(seed=seed))


def test_a_thousand_clients_do_not_come_back_together() -> None:
    clients = [waits(Settings(), seed) for seed in range(1000)]
    firsts = sorted(first for first, *_ in clients)
    assert firsts[-1] / firsts[0] >= 2
    assert sum(one == other for one, other in pairwise(firsts)) <= 10
    assert max(firsts) > 0.09  # the whole span is used, not a band of it
    assert min(firsts) < 0.01


def test_two_attempts_of_one_client_seldom_wait_equally_long() -> None:
    pairs = [pair for seed in range(1000) for pair in pairwise(waits(Settings(), seed))]
    assert sum(one == other for one, other in pairs) <= len(pairs) / 100


# --- the time that must be left --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remaining", "wait", "longest", "is_enough"),
    [
        (1.0, 0.0, 0.0, True),
        (SHORTEST_CALL, 0.0, 0.0, True),
        (SHORTEST_CALL / 2, 0.0, 0.0, False),
        (0.0, 0.0, 0.0, False),
        (1.0, 0.5, 0.5, True),
        (1.0, 0.5, 0.51, False),
        (1.0, 0.95, 0.01, False),  # a call is taken to need at least SHORTEST_CALL
        (60.0, 10.0, 20.0, True),
    ],
)
def test_another_attempt_needs_its_wait_and_the_longest_call_so_far(
    remaining: float, wait: float, longest: float, is_enough: bool
) -> None:
    assert enough_time(remaining, wait, longest) is is_enough


def test_the_shortest_call_is_100_ms() -> None:
    assert SHORTEST_CALL == 0.1
