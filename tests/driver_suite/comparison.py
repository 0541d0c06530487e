"""Two runs of the same tests compared: what passes with the driver's clients and not with ours."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.driver_suite.outcomes import PASSED, SKIPPED, Outcome

KNOWN = Path(__file__).with_name("known.toml")
MISSING = "did not end"


@dataclass(frozen=True)
class Known:
    """Say that a test is known to fail with our clients.

    Attributes:
        cause: Short name of the reason.
        reason: Why that is right.
        assertion: The statement of the suite's that fails.
    """

    cause: str
    reason: str
    assertion: str


@dataclass(frozen=True)
class Comparison:
    """Hold what a comparison of one file came to; all by test id.

    Attributes:
        raw_passed: How many tests pass with the driver's clients.
        ours_passed: How many of these pass with ours.
        regressions: Those that do not and are not known to.
        known: Those that do not, for a known reason.
        fixed: Those that pass although they are known not to.
    """

    raw_passed: int
    ours_passed: int
    regressions: Mapping[str, Outcome]
    known: Mapping[str, Known]
    fixed: Collection[str]


def read_known(mode: str, path: Path = KNOWN) -> dict[str, Known]:
    """Return the known differences of a mode by test id.

    Raises:
        ValueError: An entry lacks its reason or its assertion, or a test is listed twice.
    """
    known: dict[str, Known] = {}
    for cause in tomllib.loads(path.read_text(encoding="utf-8")).get(mode, []):
        for test, assertion in cause["tests"].items():
            entry = Known(cause["cause"], cause["reason"].strip(), assertion)
            if test in known or not all((entry.cause, entry.reason, entry.assertion)):
                raise ValueError(f"{path.name}: {test} is listed twice, or without cause, reason or assertion")
            known[test] = entry
    return known


def compare(raw: Mapping[str, Outcome], ours: Mapping[str, Outcome], known: Mapping[str, Known]) -> Comparison:
    """Compare the outcomes of the same tests."""
    should_pass = [test for test, outcome in raw.items() if outcome.outcome == PASSED]
    ended = {test: ours.get(test, Outcome(test, SKIPPED, error=MISSING)) for test in should_pass}
    different = {test: outcome for test, outcome in ended.items() if outcome.outcome != PASSED}
    explained = {
        test: entry for test, entry in known.items() if test in different and entry.assertion == different[test].assertion
    }
    return Comparison(
        len(should_pass),
        len(should_pass) - len(different),
        {test: outcome for test, outcome in different.items() if test not in explained},
        explained,
        [test for test in should_pass if test in known and test not in different],
    )
