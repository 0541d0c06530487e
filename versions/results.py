"""The results so far: kept in a file, since a whole run takes hours, and shown as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from versions.plan import SUITES, Cell
from versions.running import Result

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def load(file: Path) -> dict[tuple[Cell, str], Result]:
    """Return what a file holds, by cell and suite; nothing if there is none."""
    if not file.exists():
        return {}
    rows = [Result(**{**row, "cell": Cell(**row["cell"])}) for row in json.loads(file.read_text())]
    return {(row.cell, row.suite): row for row in rows}


def save(file: Path, results: Iterable[Result]) -> None:
    """Write a file anew."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".new")
    scratch.write_text(json.dumps([asdict(row) for row in results], indent=1) + "\n")
    scratch.replace(file)


def _order(cell: Cell) -> tuple[list[int], ...]:
    return tuple([int(part) for part in name.split(".")] for name in (cell.driver, cell.server, cell.python))


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table: a line for each cell, a column for each suite."""
    by_cell: dict[Cell, dict[str, Result]] = {}
    for row in results:
        by_cell.setdefault(row.cell, {})[row.suite] = row
    lines = [f"| PyMongo | mongod | Python | {' | '.join(SUITES)} |", f"|---|---|---|{'---|' * len(SUITES)}"]
    for cell in sorted(by_cell, key=_order):
        shown = [_shown(by_cell[cell].get(suite)) for suite in SUITES]
        lines.append(f"| {cell.driver} | {cell.server} | {cell.python} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(row: Result | None) -> str:
    if row is None:
        return "not run"
    text = f"{row.passed:,}"
    if row.skipped:
        text += f", {row.skipped} skipped"
    if row.rerun:
        text += f", {row.rerun} rerun"
    if row.is_good:
        return text
    return f"**{row.failed} failed**, {text}" if row.failed else f"**exit code {row.exit_code}**, {text}"


def summary(results: Sequence[Result]) -> str:
    """Return one sentence on all of them."""
    failed = sum(row.failed for row in results)
    passed = sum(row.passed for row in results)
    cells = len({row.cell for row in results})
    days = sorted({row.day for row in results})
    when = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "never"
    return f"{cells} combinations, {passed:,} tests passed, {failed} failed; measured {when}"


def write(document: Path, results: Sequence[Result]) -> None:
    """Put table and summary between the marks of a document.

    Raises:
        ValueError: It has no marks.
    """
    text = document.read_text()
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{document} has no place for the table: {BEGIN} ... {END}")
    document.write_text(f"{before}{BEGIN}\n{table(results)}\n\n{summary(results)}.\n{END}{after}")
