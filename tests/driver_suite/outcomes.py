"""What became of each test: written by the pytest process that runs them, as a plugin, and read by the one that compares."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_LONGEST_MESSAGE = 400
_GRAVER_FIRST = (FAILED, PASSED, SKIPPED)


@dataclass(frozen=True)
class Outcome:
    """Say how a test ended.

    Attributes:
        test: Its id.
        outcome: "passed", "failed" (its set-up and tear-down included) or "skipped".
        assertion: The last statement of the suite's own that the error came through.
        place: Where that is, `file:line`.
        error: The error's text, cut.
    """

    test: str
    outcome: str
    assertion: str = ""
    place: str = ""
    error: str = ""


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return the outcomes in a file by test id; of several of one test (phases, subtests) the gravest."""
    outcomes: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        outcome = Outcome(**json.loads(line))
        known = outcomes.get(outcome.test)
        if known is None or _GRAVER_FIRST.index(outcome.outcome) < _GRAVER_FIRST.index(known.outcome):
            outcomes[outcome.test] = outcome
    return outcomes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where outcomes are written."""
    parser.addoption("--outcomes", type=Path, required=True, help="file that gets a line for each outcome")


def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes as they come, so that a run that is cut short has told the rest."""
    config.pluginmanager.register(_Writer(config.option.outcomes, config.rootpath), "saferetry-outcomes")


class _Writer:
    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = root

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != PASSED:
            self._write(Outcome(report.nodeid, report.outcome, **self._explained(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(Outcome(report.nodeid, FAILED, **self._explained(report)))

    def _write(self, outcome: Outcome) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    def _explained(self, report: pytest.TestReport | pytest.CollectReport) -> Mapping[str, Any]:
        if report.outcome != FAILED:
            return {}
        crash = getattr(report.longrepr, "reprcrash", None)
        error = crash.message if crash else str(report.longrepr)
        last = {"assertion": "", "place": ""}
        for path, number in self._own_lines(report):
            last = {"assertion": _statement(path, number), "place": f"{path.relative_to(self._root)}:{number}"}
        return {**last, "error": error[:_LONGEST_MESSAGE]}

    def _own_lines(self, report: pytest.TestReport | pytest.CollectReport) -> Iterator[tuple[Path, int]]:
        traceback = getattr(report.longrepr, "reprtraceback", None)
        for entry in getattr(traceback, "reprentries", []):
            location = getattr(entry, "reprfileloc", None)
            path = self._root / location.path if location else self._root
            if location and path.is_relative_to(self._root / "test"):
                yield path, location.lineno


def _statement(path: Path, number: int) -> str:
    """Return the statement that a line belongs to, in one line; of a block its head."""
    source = path.read_text(encoding="utf-8")
    around = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt) and _spans(node, number)]
    innermost = max(around, key=lambda node: node.lineno)
    is_block = isinstance(innermost, (ast.With, ast.AsyncWith, ast.For, ast.AsyncFor, ast.If, ast.While, ast.Try))
    text = source.splitlines()[number - 1] if is_block else ast.get_source_segment(source, innermost)
    return " ".join((text or "").split())


def _spans(node: ast.stmt, number: int) -> bool:
    return node.lineno <= number <= (node.end_lineno or node.lineno)
