"""Rules of the comparison: what is a regression, what is known, what is listed for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.driver_suite.comparison import MISSING, Known, compare, read_known
from tests.driver_suite.outcomes import FAILED, PASSED, SKIPPED, Outcome, read_outcomes
from tests.driver_suite.running import MODES, Side

TEST = "test/test_x.py::TestX::test_it"
ASSERTION = 'self.assertEqual(1, command["n"])'
LISTED = {TEST: Known("cause", "reason", ASSERTION)}
MOST_IN_DEFAULT = 12


def ended(outcome: str, assertion: str = "") -> dict[str, Outcome]:
    return {TEST: Outcome(TEST, outcome, assertion)}


@pytest.mark.parametrize("raw", [FAILED, SKIPPED])
@pytest.mark.parametrize("ours", [PASSED, FAILED, SKIPPED])
@pytest.mark.parametrize("known", [{}, LISTED])
def test_what_fails_with_the_drivers_clients_says_nothing(raw: str, ours: str, known: dict[str, Known]) -> None:
    compared = compare(ended(raw), ended(ours, ASSERTION), known)
    assert (compared.raw_passed, compared.ours_passed, *map(len, (compared.regressions, compared.fixed))) == (0, 0, 0, 0)


@pytest.mark.parametrize("ours", [FAILED, SKIPPED])
def test_what_passes_with_the_drivers_clients_alone_is_a_regression(ours: str) -> None:
    compared = compare(ended(PASSED), ended(ours, ASSERTION), {})
    assert (compared.raw_passed, compared.ours_passed, list(compared.regressions)) == (1, 0, [TEST])


def test_what_does_not_come_to_an_end_is_a_regression() -> None:
    compared = compare(ended(PASSED), {}, {})
    assert compared.regressions[TEST].error == MISSING


def test_what_is_listed_and_fails_there_is_known() -> None:
    compared = compare(ended(PASSED), ended(FAILED, ASSERTION), LISTED)
    assert (dict(compared.regressions), dict(compared.known)) == ({}, LISTED)


def test_what_is_listed_and_fails_elsewhere_is_a_regression() -> None:
    assert list(compare(ended(PASSED), ended(FAILED, "self.assertTrue(x)"), LISTED).regressions) == [TEST]


def test_what_is_listed_and_passes_is_told() -> None:
    compared = compare(ended(PASSED), ended(PASSED), LISTED)
    assert (compared.ours_passed, compared.fixed) == (1, [TEST])


def test_of_several_outcomes_of_a_test_the_gravest_counts(tmp_path: Path) -> None:
    path = tmp_path / "outcomes"
    path.write_text("".join(f'{{"test": "t", "outcome": "{outcome}"}}\n' for outcome in (SKIPPED, FAILED, PASSED)))
    assert read_outcomes(path)["t"].outcome == FAILED


def test_a_run_that_wrote_nothing_has_no_outcomes(tmp_path: Path) -> None:
    assert read_outcomes(tmp_path / "outcomes") == {}


def entry(cause: str = "c", reason: str = "r", assertion: str = "a", test: str = "t") -> str:
    return f'[[default]]\ncause = "{cause}"\nreason = "{reason}"\n[default.tests]\n"{test}" = "{assertion}"\n'


@pytest.mark.parametrize("text", [entry(cause=""), entry(reason=" "), entry(assertion=""), entry() + entry(cause="d")])
def test_an_entry_without_reason_or_twice_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="t is listed twice, or without cause, reason or assertion"):
        read_known("default", path)


def test_the_list_is_short_where_saferetry_is_to_go_unnoticed() -> None:
    assert not read_known(Side.DISABLED.value)
    assert len(read_known(Side.DEFAULT.value)) <= MOST_IN_DEFAULT
    assert all(test.startswith("test/") for mode in MODES for test in read_known(mode.value))
