"""Run the driver's own test suite with its clients and with ours, and compare: ``python -m tests.driver_suite --help``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.driver_suite.files import find_files
from tests.driver_suite.report import Report
from tests.driver_suite.running import MODES, Side
from tests.driver_suite.sdist import unpack
from tests.driver_suite.suite import Suite
from tests.driver_suite.table import Table, versions


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if something passed and nothing differs that is not known to."""
    parser = argparse.ArgumentParser(prog="driver-suite", description=__doc__)
    parser.add_argument("files", nargs="*", help="paths in the suite, or names like `bulk`; default: all that are relevant")
    parser.add_argument("--mode", action="append", type=Side, choices=MODES, help="default: all three")
    parser.add_argument("--jobs", type=int, default=2, help="files at the same time")
    parser.add_argument("--out", type=Path, default=Path(".out/driver-suite"), help="for the suite, logs and results")
    parser.add_argument("--docs", type=Path, help="page whose table is written anew, with the newest result of each file")
    options = parser.parse_args(arguments)
    source = unpack(options.out)
    files = find_files(source, options.files)
    if not files:
        parser.error(f"no such files in the suite: {' '.join(options.files)}")
    report = Report(options.mode or MODES)
    table = Table(options.out / "results.jsonl", versions())
    suite = Suite(source, options.out / "logs", options.mode or MODES)
    for result in suite.compare_all(files, options.jobs):
        report.add(result)
        table.add(result)
    report.finish()
    if options.docs:
        table.write(options.docs)
    return 0 if report.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
