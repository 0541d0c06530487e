"""Some files of the driver's own suite; the whole: `make driver-suite`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.driver_suite.files import SLICE
from tests.driver_suite.running import REPOSITORY, Side
from tests.driver_suite.sdist import unpack
from tests.driver_suite.suite import Suite

# One worker: the suite is downloaded once. Each side of a file has a mongod and a pytest of its own.
pytestmark = [pytest.mark.xdist_group("driver-suite"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def source() -> Path:
    return unpack(REPOSITORY / ".out" / "driver-suite")


@pytest.mark.parametrize("file", SLICE)
def test_the_drivers_own_tests_pass_with_our_clients(
    file: str, source: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    results = Suite(source, tmp_path, (Side.DEFAULT, Side.RECORD)).compare_file(file)

    assert [result.mode for result in results] == [Side.DEFAULT, Side.RECORD]
    for result in results:
        compared = result.comparison
        assert compared.raw_passed > 0
        assert not compared.regressions
        assert not compared.fixed
        record_property("figure", f"{file} [{result.mode.value}]: raw {compared.raw_passed}, ours {compared.ours_passed}")
