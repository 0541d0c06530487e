"""The table of the documentation: the newest result of every file and mode, kept in a file and written out."""

from __future__ import annotations

import datetime as dt
import json
import platform
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pymongo

from saferetry.lab.mongod import Mongod
from tests.driver_suite.comparison import read_known
from tests.driver_suite.running import MODES, Side
from tests.driver_suite.suite import Result

_PLACE = re.compile(r"(?<=<!-- driver-suite:begin -->\n).*(?=<!-- driver-suite:end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """Be a result as it is kept: numbers of tests.

    Attributes:
        file: The file.
        mode: The mode's name.
        raw: How many pass with the driver's clients.
        ours: How many of these pass with ours.
        regressions: How many do not, without being known to.
        causes: How many do not, by the cause that is known.
        versions: What they were run with.
    """

    file: str
    mode: str
    raw: int
    ours: int
    regressions: int
    causes: dict[str, int]
    versions: str


def versions() -> str:
    """Return what tests are run with here."""
    with Mongod() as mongod:
        return f"PyMongo {pymongo.version}, server {mongod.version}, Python {platform.python_version()}"


class Table:
    """Keep rows in a file.

    Args:
        path: The file; rows of other versions in it are left out.
        run_with: The versions.
    """

    def __init__(self, path: Path, run_with: str) -> None:
        self._path = path
        self._run_with = run_with

    def add(self, result: Result) -> None:
        """Keep a result."""
        compared = result.comparison
        causes = Counter(entry.cause for entry in compared.known.values())
        numbers = (compared.raw_passed, compared.ours_passed, len(compared.regressions))
        row = Row(result.file, result.mode.value, *numbers, dict(causes), self._run_with)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def write(self, page: Path) -> None:
        """Write the table of a documentation page anew."""
        text = page.read_text(encoding="utf-8")
        page.write_text(_PLACE.sub(lambda _: "\n".join(self._lines()) + "\n", text), encoding="utf-8")

    def _rows(self) -> dict[tuple[str, Side], Row]:
        rows = [Row(**json.loads(line)) for line in self._path.read_text(encoding="utf-8").splitlines()]
        return {(row.file, Side(row.mode)): row for row in rows if row.versions == self._run_with}  # the newest wins

    def _lines(self) -> Iterator[str]:
        rows = self._rows()
        by_mode = {mode: [row for (_, of_mode), row in rows.items() if of_mode is mode] for mode in MODES}
        yield f"Measured on {dt.datetime.now(dt.UTC).date()} with {self._run_with}. Numbers of tests:"
        yield ""
        yield "| mode | pass with PyMongo's clients | of these with saferetry's | differed once | known | regressions |"
        yield "|---|---|---|---|---|---|"
        for mode, found in by_mode.items():
            known = sum(sum(row.causes.values()) for row in found)
            raw, ours, regressions = (sum(getattr(row, name) for row in found) for name in ("raw", "ours", "regressions"))
            yield f"| {mode.value} | {raw:,} | {ours:,} | {raw - ours - known - regressions} | {known} | {regressions} |"
        for mode, found in by_mode.items():
            yield from _causes(mode, found)
        yield ""
        yield "| file | PyMongo's |" + "".join(f" {mode.value} |" for mode in MODES)
        yield "|---|---|" + "---|" * len(MODES)
        raw_by_file: dict[str, int] = {}
        for (file, _), row in sorted(rows.items(), key=lambda item: item[0][0]):
            raw_by_file[file] = max(row.raw, raw_by_file.get(file, 0))
        for file, raw in raw_by_file.items():
            cells = [str(rows[file, mode].ours) if (file, mode) in rows else "" for mode in MODES]
            if raw:
                yield f"| `{file}` | {raw} |" + "".join(f" {cell} |" for cell in cells)
        if silent := [f"`{file}`" for file, raw in raw_by_file.items() if not raw]:
            yield from ("", f"Whole files that skip with PyMongo's clients too (one node of this server): {', '.join(silent)}.")


def _causes(mode: Side, rows: Sequence[Row]) -> Iterator[str]:
    causes: Counter[str] = Counter()
    for row in rows:
        causes.update(row.causes)
    if causes:
        yield from ("", f"Known differences, mode {mode.value}:", "")
    reasons = {entry.cause: " ".join(entry.reason.split()) for entry in read_known(mode.value).values()}
    for cause, count in causes.most_common():
        yield f"- **{cause}** ({count}): {reasons[cause]}"
