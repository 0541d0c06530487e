"""Files of the driver's suite, each run with the driver's clients and with ours; what differs is run again alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from tests.driver_suite.comparison import Comparison, compare, read_known
from tests.driver_suite.files import IN_RECORD, is_one_of
from tests.driver_suite.outcomes import PASSED, Outcome
from tests.driver_suite.running import Side, run

RERUNS = 2


@dataclass(frozen=True)
class Result:
    """Say how one file compares in one mode.

    Attributes:
        file: The file.
        mode: The mode.
        comparison: What differs.
        unsteady: Tests that differed and did not when they were run again alone, and how that was.
    """

    file: str
    mode: Side
    comparison: Comparison
    unsteady: dict[str, str]


class Suite:
    """Be an unpacked suite.

    Args:
        source: Where it is unpacked.
        logs: Folder for the output of pytest.
        modes: The modes that are compared with the driver's own clients.
    """

    def __init__(self, source: Path, logs: Path, modes: Sequence[Side]) -> None:
        self._source = source.absolute()
        self._logs = logs.absolute()
        self._logs.mkdir(parents=True, exist_ok=True)
        self._modes = modes
        self._known = {mode: read_known(mode.value) for mode in modes}

    def compare_all(self, files: Sequence[str], jobs: int) -> Iterator[Result]:
        """Yield the results of files, several files at the same time."""
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self.compare_file, file) for file in files]
            for future in as_completed(futures):
                yield from future.result()

    def compare_file(self, file: str) -> list[Result]:
        """Return the results of a file, one for each mode."""
        modes = [mode for mode in self._modes if mode is not Side.RECORD or is_one_of(file, IN_RECORD)]
        if not modes:
            return []
        raw = run(self._source, [file], Side.RAW, self._log(file, Side.RAW))
        return [self._compare(file, mode, raw) for mode in modes]

    def _compare(self, file: str, mode: Side, raw: dict[str, Outcome]) -> Result:
        ours = run(self._source, [file], mode, self._log(file, mode))
        comparison = compare(raw, ours, self._known[mode])
        unsteady: dict[str, str] = {}
        for again in range(1, RERUNS + 1):
            suspects = list(comparison.regressions)
            if not suspects:
                break
            raw_again = run(self._source, suspects, Side.RAW, self._log(file, Side.RAW, again))
            ours_again = run(self._source, suspects, mode, self._log(file, mode, again))
            for test in suspects:
                raw_passes, ours_passes = (_passes(outcomes, test) for outcomes in (raw_again, ours_again))
                if ours_passes or not raw_passes:
                    unsteady[test] = f"alone, run {again + 1}: raw {_said(raw_passes)}, ours {_said(ours_passes)}"
            comparison = replace(
                comparison,
                regressions={test: outcome for test, outcome in comparison.regressions.items() if test not in unsteady},
            )
        return Result(file, mode, comparison, unsteady)

    def _log(self, file: str, side: Side, again: int = 0) -> Path:
        name = file.removesuffix(".py").replace("/", ".")
        return self._logs / f"{name}.{side.value}{f'.{again + 1}' if again else ''}.log"


def _passes(outcomes: dict[str, Outcome], test: str) -> bool:
    return test in outcomes and outcomes[test].outcome == PASSED


def _said(passes: bool) -> str:
    return "passed" if passes else "failed"
