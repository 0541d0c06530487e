"""Tests of the driver's suite run by a pytest of their own, on a fresh mongod."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from saferetry.lab.mongod import Mongod
from tests.driver_suite.outcomes import Outcome, read_outcomes

REPOSITORY = Path(__file__).parents[2]
LONGEST_TEST = 150  # seconds
MORE_CACHE = ("--wiredTigerEngineConfigString", "cache_size=1G")  # some tests write more than the lab's servers hold
LONGEST_FILE = 1200.0  # seconds


class Side(enum.Enum):
    """Say whose clients the tests use, and how."""

    RAW = "raw"  # the driver's
    DISABLED = "disabled"  # ours with SAFERETRY_DISABLED=1
    DEFAULT = "default"  # ours
    RECORD = "record"  # ours, each test inside a record


MODES = (Side.DISABLED, Side.DEFAULT, Side.RECORD)
_OPTIONS: dict[Side, Sequence[str]] = {
    Side.RAW: (),
    Side.DISABLED: ("--swap",),
    Side.DEFAULT: ("--swap",),
    Side.RECORD: ("--swap", "--in-record"),
}


def run(suite: Path, tests: Sequence[str], side: Side, log: Path) -> dict[str, Outcome]:
    """Run tests (files or test ids) and return the outcomes of those that came to an end.

    Args:
        suite: Where the suite is unpacked.
        tests: Files or test ids, as pytest takes them.
        side: Whose clients they use.
        log: File for pytest's output.
    """
    with tempfile.TemporaryDirectory(prefix="driver-suite-") as folder, Mongod(extra_args=MORE_CACHE) as mongod:
        outcomes = Path(folder) / "outcomes.jsonl"
        command = [
            *(sys.executable, "-m", "pytest", "--override-ini=addopts=", "-m", "default or default_async"),
            *("--strict-markers", "--quiet", "--tb=short", f"--basetemp={folder}/tmp"),
            *("-p", "no:cacheprovider", "-p", "no:rerunfailures", "-p", "no:xdist", "-p", "no:hypothesispytest"),
            *(f"--timeout={LONGEST_TEST}", "--timeout-method=signal"),
            *("-p", "tests.driver_suite.swap", "-p", "tests.driver_suite.outcomes"),
            *(f"--outcomes={outcomes}", *_OPTIONS[side], *tests),
        ]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=suite, env=_environment(side, mongod.port), stdout=output, stderr=output, start_new_session=True
            )
            try:
                process.wait(LONGEST_FILE)
            except subprocess.TimeoutExpired:
                output.write(f"\nstopped after {LONGEST_FILE:g} s\n")
            finally:
                with contextlib.suppress(ProcessLookupError):  # with the children of its tests
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return read_outcomes(outcomes)


def _environment(side: Side, port: int) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SAFERETRY_", "PYTEST_"))}
    environment |= {"DB_IP": "127.0.0.1", "DB_PORT": str(port), "PYTHONPATH": str(REPOSITORY)}
    if side is Side.DISABLED:
        environment["SAFERETRY_DISABLED"] = "1"
    return environment
