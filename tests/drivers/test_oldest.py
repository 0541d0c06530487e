"""The oldest driver that is promised, in a process of its own; `make matrix` runs all tests with it and others."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import Mongod
from versions import drivers
from versions.plan import DRIVERS, Cell
from versions.running import Setup, run

FOLDER = drivers.ROOT / ".versions"
TESTS = (
    "tests/unit/test_seam.py",
    "tests/cases/test_k01_k02_inserts_sent_again.py",
    "tests/cases/test_k05_bulks.py",
    "tests/transaction/test_marker_index.py",
)


def test_the_oldest_driver_passes_a_handful_of_tests(mongod: Mongod, tmp_path: Path) -> None:
    executable = Path(sys.executable)
    setup = Setup(executable, drivers.driver(DRIVERS[0], executable, FOLDER), mongod.binary)
    cell = Cell(DRIVERS[0], mongod.version, "{}.{}".format(*sys.version_info))
    setup.check(cell)
    log = tmp_path / "pytest.log"
    ended = run(setup, cell, "smoke", tests=TESTS, log=log, workers=0, reruns=1, commit="")
    assert ended.is_good, log.read_text()[-5000:]
    assert ended.passed > 200
