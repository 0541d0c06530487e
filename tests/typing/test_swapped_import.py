"""Code written for PyMongo is to both type checkers the same with the import swapped: same types, same errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = Path(__file__).with_name("pymongo_shaped.py")
IMPORT = "from pymongo import AsyncMongoClient, MongoClient\n"
MODULE = re.compile(r"[\w.]+\.(?=(?:Async)?MongoClient\b)|\b(?:written|swapped)\.")

Findings = list[tuple[int, str]]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def mypy(files: list[Path]) -> dict[str, Findings]:
    output = run("mypy", "--strict", *map(str, files))  # with the project's own cache
    found: dict[str, Findings] = {file.stem: [] for file in files}
    for line in output.splitlines():
        if match := re.match(r"(?P<file>[^:]+):(?P<line>\d+): (?P<text>.*)", line):
            found[Path(match["file"]).stem].append((int(match["line"]), match["text"]))
    return found


def pyright(files: list[Path]) -> dict[str, Findings]:
    output = json.loads(run("pyright", "--pythonpath", sys.executable, "--outputjson", *map(str, files)))
    found: dict[str, Findings] = {file.stem: [] for file in files}
    for entry in output["generalDiagnostics"]:
        line = entry["range"]["start"]["line"] + 1
        found[Path(entry["file"]).stem].append((line, f"{entry['severity']}: {entry['message']} [{entry.get('rule', '')}]"))
    return found


def without_owners(findings: Findings) -> Findings:
    """Leave out whose client it is, in which of the two files, and what its type variable is called."""
    return [(line, MODULE.sub("", text).replace("_DocumentType", "Document")) for line, text in findings]


def lines(findings: Findings, *kinds: str) -> set[int]:
    return {line for line, text in findings if text.startswith(kinds)}


def marked(source: str, mark: str) -> set[int]:
    return {line for line, text in enumerate(source.splitlines(), 1) if mark in text}


@pytest.mark.parametrize("check", [mypy, pyright])
def test_code_for_pymongo_means_the_same_with_the_import_swapped(
    tmp_path: Path, check: Callable[[list[Path]], dict[str, Findings]]
) -> None:
    source = WRITTEN.read_text(encoding="utf-8")
    assert source.count(IMPORT) == 1
    written, swapped = tmp_path / "written.py", tmp_path / "swapped.py"
    written.write_text(source, encoding="utf-8")
    swapped.write_text(source.replace(IMPORT, IMPORT.replace("pymongo", "saferetry")), encoding="utf-8")

    found = check([written, swapped])

    assert without_owners(found["swapped"]) == without_owners(found["written"])
    assert lines(found["written"], "error") == marked(source, "# wrong")
    assert lines(found["written"], "note", "information") == marked(source, "reveal_type(")
