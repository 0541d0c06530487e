"""Run the tests on several drivers, servers and Pythons: `python -m versions`, or `make matrix`.

All that is downloaded, the logs and the results so far are below one folder (`--folder`). Exit code 0: nothing failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from versions import drivers, results, servers
from versions.commands import MissingError, output_of
from versions.plan import DRIVERS, PYTHONS, SERVERS, SUITES, Cell, covering, whole
from versions.running import Result, Setup, run

DOCUMENT = drivers.ROOT / "docs" / "versions.md"


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m versions", description=__doc__)
    parser.add_argument("--folder", type=Path, default=drivers.ROOT / ".versions")
    parser.add_argument("--all", action="store_true", help="every combination instead of a covering selection")
    parser.add_argument("--driver", action="append", help="only this PyMongo, e.g. 4.9.2; may be repeated")
    parser.add_argument("--server", action="append", choices=SERVERS, help="only this mongod")
    parser.add_argument("--python", action="append", help="only this Python, e.g. 3.13")
    parser.add_argument("--suite", action="append", choices=SUITES, help="only these tests")
    parser.add_argument("--missing", action="store_true", help="only what has no good result yet")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--reruns", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(drivers.ROOT)}")
    parser.add_argument("--list", action="store_true", help="show what would be run")
    return parser.parse_args(given)


def _cells(chosen: argparse.Namespace) -> list[Cell]:
    known = [*DRIVERS, drivers.newest(Path(sys.executable))]
    known = list(dict.fromkeys(known))
    cells = (whole if chosen.all else covering)(known, SERVERS, PYTHONS)
    if not chosen.all and (chosen.driver or chosen.server or chosen.python):
        cells = whole(chosen.driver or known, chosen.server or SERVERS[-1:], chosen.python or PYTHONS[:1])
    return cells


def _setup(cell: Cell, folder: Path) -> Setup:
    executable = drivers.python(cell.python, folder)
    setup = Setup(executable, drivers.driver(cell.driver, executable, folder), servers.install(cell.server, folder))
    setup.check(cell)
    return setup


def _commit() -> str:
    name = output_of(["git", "rev-parse", "--short", "HEAD"], cwd=drivers.ROOT).strip()
    changed = output_of(["git", "status", "--porcelain", "--untracked-files=no"], cwd=drivers.ROOT).strip()
    return f"{name}+" if changed else name


def _failures(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith(("FAILED ", "ERROR "))]


def _play(chosen: argparse.Namespace, cells: Sequence[Cell], file: Path) -> list[Result]:
    found = results.load(file)
    suites = [suite for suite in SUITES if not chosen.suite or suite in chosen.suite]
    commit = _commit()
    wanted = {
        cell: [suite for suite in suites if not chosen.missing or not ((row := found.get((cell, suite))) and row.is_good)]
        for cell in cells
    }
    setups = {cell: _setup(cell, chosen.folder) for cell in cells if wanted[cell]}  # all of them before hours are spent
    played = []
    for cell, setup in setups.items():
        for suite in wanted[cell]:
            log = chosen.folder / "logs" / f"{cell.driver}-{cell.server}-{cell.python}-{suite}.log"
            row = run(setup, cell, suite, log=log, workers=chosen.workers, reruns=chosen.reruns, commit=commit)
            print(f"{cell}, {suite}: {row.passed} passed, {row.failed} failed, {row.seconds:.0f} s", flush=True)
            for line in [] if row.is_good else [*_failures(log), f"see {log}"]:
                print(f"  {line}", flush=True)
            played.append(row)
            results.save(file, {**results.load(file), (cell, suite): row}.values())
    return played


def main(given: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    chosen = _arguments(given)
    file = chosen.folder / "results.json"
    try:
        cells = _cells(chosen)
        if chosen.list:
            print("\n".join(map(str, cells)))
            return 0
        played = _play(chosen, cells, file)
    except MissingError as exc:
        print(f"versions: {exc}", file=sys.stderr)
        return 2
    rows = list(results.load(file).values())
    print(f"\n{results.table(rows)}\n\n{results.summary(rows)}")
    if chosen.write:
        results.write(DOCUMENT, rows)
    return 0 if all(row.is_good for row in played) else 1


if __name__ == "__main__":
    sys.exit(main())
