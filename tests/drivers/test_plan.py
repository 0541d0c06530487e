"""Which combinations `make matrix` runs, and what it makes of their output."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from versions import results
from versions.plan import DRIVERS, PYTHONS, SERVERS, Cell, covering, whole
from versions.running import Result, summed_up

CELL = Cell("4.9.2", "4.4.2", "3.11")
names = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)


@given(names, names, names)
def test_the_selection_covers_what_it_says(drivers: list[str], servers: list[str], pythons: list[str]) -> None:
    cells = covering(drivers, servers, pythons)
    assert len(set(cells)) == len(cells)
    assert set(cells) <= set(whole(drivers, servers, pythons))
    assert {cell.driver for cell in cells if cell.server == servers[-1]} == set(drivers)
    for server in servers:
        assert {drivers[0], drivers[-1]} <= {cell.driver for cell in cells if cell.server == server}


def test_the_oldest_and_the_newest_driver_meet_both_pythons() -> None:
    cells = covering([*DRIVERS, "4.20.1"], SERVERS, PYTHONS)
    for driver in (DRIVERS[0], "4.20.1"):
        assert {cell.python for cell in cells if cell.driver == driver} == set(PYTHONS)
    assert len(cells) == 12
    assert len(whole([*DRIVERS, "4.20.1"], SERVERS, PYTHONS)) == 48


@pytest.mark.parametrize(
    ("line", "exit_code", "numbers", "is_good"),
    [
        ("302 passed in 114.63s (0:01:54)", 0, (302, 0, 0, 0, 114.63), True),
        ("1 failed, 1218 passed, 2 skipped, 3 rerun in 187.56s", 1, (1218, 1, 2, 3, 187.56), False),
        ("10 passed, 2 errors in 1.00s", 1, (10, 2, 0, 0, 1.0), False),
        ("1633 passed, 2 skipped in 93.1s", 1, (1633, 0, 2, 0, 93.1), False),  # skipped without leave
        ("no tests ran in 0.01s", 5, (0, 0, 0, 0, 0.01), False),
        ("", 0, (0, 0, 0, 0, 0.0), False),
        ("E   ModuleNotFoundError", 4, (0, 0, 0, 0, 0.0), False),
    ],
)
def test_the_last_line_of_pytest_is_read(
    line: str, exit_code: int, numbers: tuple[int, int, int, int, float], is_good: bool
) -> None:
    row = summed_up(CELL, "unit", line, exit_code, "abc")
    assert (row.passed, row.failed, row.skipped, row.rerun, row.seconds) == numbers
    assert row.is_good is is_good


def row(
    cell: Cell, suite: str, *, passed: int = 7, failed: int = 0, skipped: int = 0, exit_code: int = 0, day: str = "2026-11-30"
) -> Result:
    return Result(cell, suite, passed, failed, skipped, 0, 1.0, exit_code, "abc", day)


def test_the_table_says_what_failed_and_what_was_not_run() -> None:
    rows = [
        row(Cell("4.13.2", "6.0.27", "3.13"), "unit", passed=1633, skipped=2),
        row(CELL, "matrix", failed=2, exit_code=1),
        row(CELL, "unit", exit_code=1, day="2026-12-01"),
    ]
    assert results.table(rows).splitlines()[2:] == [
        "| 4.9.2 | 4.4.2 | 3.11 | **exit code 1**, 7 | not run | not run | not run | **2 failed**, 7 | not run |",
        "| 4.13.2 | 6.0.27 | 3.13 | 1,633, 2 skipped | not run | not run | not run | not run | not run |",
    ]
    assert results.summary(rows) == "2 combinations, 1,647 tests passed, 2 failed; measured 2026-11-30 to 2026-12-01"


def test_results_are_kept_and_put_into_the_document(tmp_path: Path) -> None:
    rows = {(CELL, "unit"): row(CELL, "unit"), (CELL, "cases"): row(CELL, "cases", failed=1)}
    results.save(tmp_path / "results.json", rows.values())
    assert results.load(tmp_path / "results.json") == rows
    assert results.load(tmp_path / "none.json") == {}
    document = tmp_path / "versions.md"
    document.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    results.write(document, list(rows.values()))
    text = document.read_text()
    assert text.startswith(f"before\n{results.BEGIN}\n| PyMongo |")
    assert text.endswith(f"measured 2026-11-30.\n{results.END}\nafter\n")
    assert "old" not in text


def test_a_document_without_a_place_for_the_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "versions.md").write_text("text")
    with pytest.raises(ValueError, match="no place for the table"):
        results.write(tmp_path / "versions.md", [row(CELL, "unit")])
