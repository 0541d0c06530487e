"""What a run of the driver's suite prints, and the table that it leaves in the documentation."""

from __future__ import annotations

import datetime as dt
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pymongo

from saferetry.lab.mongod import Mongod
from tests.driver_suite.comparison import Known
from tests.driver_suite.running import Side
from tests.driver_suite.suite import Result

_TABLE = re.compile(r"(?<=<!-- driver-suite:begin -->\n).*(?=<!-- driver-suite:end -->)", re.DOTALL)


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

    def write_table(self, page: Path) -> None:
        """Write what a documentation page says of the last run anew."""
        text = page.read_text(encoding="utf-8")
        page.write_text(_TABLE.sub(lambda _: "\n".join(self._page()) + "\n", text), encoding="utf-8")

    def _sums(self, mode: Side) -> tuple[int, int, int]:
        compared = [result.comparison for result in self._results if result.mode is mode]
        sums = (sum(c.raw_passed for c in compared), sum(c.ours_passed for c in compared))
        return *sums, sum(len(c.regressions) for c in compared)

    def _causes(self, mode: Side) -> Counter[Known]:
        """Count the tests of each cause; the entries of one cause are alike but for the assertion."""
        found = [entry for result in self._results if result.mode is mode for entry in result.comparison.known.values()]
        return Counter(Known(entry.cause, entry.reason, "") for entry in found)

    def _page(self) -> Iterator[str]:
        with Mongod() as mongod:
            server = mongod.version
        today = dt.datetime.now(dt.UTC).date()
        yield f"Measured on {today} with PyMongo {pymongo.version}, server {server}, Python {platform.python_version()}:"
        yield ""
        yield "| mode | pass with PyMongo's clients | of these with saferetry's | known differences | regressions |"
        yield "|---|---|---|---|---|"
        for mode in self._modes:
            raw, ours, regressions = self._sums(mode)
            yield f"| {mode.value} | {raw:,} | {ours:,} | {self._causes(mode).total()} | {regressions} |"
        yield from (
            "",
            "| file | raw |" + "".join(f" {mode.value} |" for mode in self._modes),
            "|---|" + "---|" * (1 + len(self._modes)),
        )
        for file in sorted({result.file for result in self._results}):
            by_mode = {result.mode: result.comparison for result in self._results if result.file == file}
            raw_passed = next(iter(by_mode.values())).raw_passed
            cells = [str(by_mode[mode].ours_passed) if mode in by_mode else "" for mode in self._modes]
            yield f"| `{file}` | {raw_passed} |" + "".join(f" {cell} |" for cell in cells)
        for mode in self._modes:
            if causes := self._causes(mode):
                yield from ("", f"Known differences in the mode {mode.value}:", "")
                for cause, count in causes.most_common():
                    yield f"- **{cause.cause}** ({count}): {' '.join(cause.reason.split())}"
        yield ""


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
