"""One suite run on one cell, and what pytest said at the end."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from versions.commands import MissingError, output_of
from versions.drivers import ROOT
from versions.plan import Cell

_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped|rerun)")
_SECONDS = re.compile(r" in ([\d.]+)s")


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one suite on one cell.

    Attributes:
        cell: where.
        suite: folder below `tests`.
        passed, failed, skipped, rerun: numbers of tests; errors count as failed; what failed first and then passed is
            in `rerun` and in `passed`.
        seconds: that pytest took.
        exit_code: pytest's.
        commit: of the checkout, with "+" if it was changed.
        day: when, as YYYY-MM-DD.
    """

    cell: Cell
    suite: str
    passed: int
    failed: int
    skipped: int
    rerun: int
    seconds: float
    exit_code: int
    commit: str
    day: str

    @property
    def is_good(self) -> bool:
        """Whether tests ran and none failed, nor was skipped without leave."""
        return self.exit_code == 0 and self.passed > 0


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a cell's parts are."""

    python: Path
    driver: Path
    mongod: Path

    def environment(self) -> dict[str, str]:
        """Return the variables under which the tests see them."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return {**ours, "PYTHONPATH": f"{self.driver}{os.pathsep}{ROOT / 'src'}", "LAB_MONGOD": str(self.mongod)}

    def check(self, cell: Cell) -> None:
        """See whether Python and driver are what the cell says, or all that follows would be about something else.

        Raises:
            MissingError: They are not.
        """
        look = "import sys, pymongo, saferetry; print(pymongo.version, '%d.%d' % sys.version_info[:2])"
        found = output_of([self.python, "-c", look], env=self.environment(), cwd=ROOT).split()
        if found != [cell.driver, cell.python]:
            raise MissingError(f"{cell}: PyMongo and Python found are {found}")


def run(
    setup: Setup,
    cell: Cell,
    suite: str,
    *,
    tests: Sequence[str] = (),
    log: Path,
    workers: int,
    reruns: int,
    commit: str,
) -> Result:
    """Run one suite, or some tests; the whole output goes into a file."""
    command = [
        *(str(setup.python), "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
        *("--numprocesses", str(workers), "--dist", "loadgroup", "--reruns", str(reruns)),
        *(tests or [f"tests/{suite}"]),
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        ended = subprocess.run(command, cwd=ROOT, env=setup.environment(), stdout=file, stderr=file, check=False)
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    return summed_up(cell, suite, last, ended.returncode, commit)


def summed_up(cell: Cell, suite: str, last_line: str, exit_code: int, commit: str) -> Result:
    """Return what pytest's last line says."""
    counts = {kind: int(count) for count, kind in _COUNT.findall(last_line)}
    seconds = _SECONDS.search(last_line)
    return Result(
        cell,
        suite,
        counts.get("passed", 0),
        counts.get("failed", 0) + counts.get("error", 0),
        counts.get("skipped", 0),
        counts.get("rerun", 0),
        float(seconds[1]) if seconds else 0.0,
        exit_code,
        commit,
        datetime.now(UTC).date().isoformat(),
    )
