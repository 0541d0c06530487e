"""What a run of the driver's suite prints."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from tests.driver_suite.comparison import Known
from tests.driver_suite.running import Side
from tests.driver_suite.suite import Result


class Report:
    """Collect results, and print them as they come.

    Args:
        modes: The modes that are run.
    """

    def __init__(self, modes: Sequence[Side]) -> None:
        self._modes = modes
        self._results: list[Result] = []

    def add(self, result: Result) -> None:
        """Take a result in and print it."""
        self._results.append(result)
        compared = result.comparison
        said = f"raw {compared.raw_passed}, ours {compared.ours_passed}, regressions {len(compared.regressions)}"
        also = f", known {len(compared.known)}" if compared.known else ""
        _print(f"{result.file} [{result.mode.value}]: {said}{also}")
        for test, outcome in compared.regressions.items():
            _print(f"  REGRESSION {test}\n    {outcome.outcome} at {outcome.place}: {outcome.assertion}\n    {outcome.error}")
        for test in compared.fixed:
            _print(f"  PASSES ALTHOUGH LISTED: {test}")
        for test, how in result.unsteady.items():
            _print(f"  differed once, not when run again alone: {test} ({how})")

    def finish(self) -> None:
        """Print the sums of each mode."""
        for mode in self._modes:
            raw, ours, regressions = self._sums(mode)
            _print(f"{mode.value}: raw {raw}, ours {ours}, regressions {regressions}")
            for cause, count in self._causes(mode).items():
                _print(f"  known, {count}: {cause.cause}")

    def is_good(self) -> bool:
        """Whether something passed with the driver's clients, and nothing differs but what is listed, all of which does."""
        compared = [result.comparison for result in self._results]
        return sum(c.raw_passed for c in compared) > 0 and not any(c.regressions or c.fixed for c in compared)

    def _sums(self, mode: Side) -> tuple[int, int, int]:
        compared = [result.comparison for result in self._results if result.mode is mode]
        sums = (sum(c.raw_passed for c in compared), sum(c.ours_passed for c in compared))
        return *sums, sum(len(c.regressions) for c in compared)

    def _causes(self, mode: Side) -> Counter[Known]:
        """Count the tests of each cause; the entries of one cause are alike but for the assertion."""
        found = [entry for result in self._results if result.mode is mode for entry in result.comparison.known.values()]
        return Counter(Known(entry.cause, entry.reason, "") for entry in found)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
