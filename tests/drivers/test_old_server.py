"""A server without comments on writes, with the last driver that talks to it, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from versions import drivers, servers
from versions.commands import MissingError
from versions.plan import Cell
from versions.running import Setup, run

FOLDER = drivers.ROOT / ".versions"
SERVER, DRIVER = "4.2.6", "4.13.2"
TABLE = "tests/deployments/test_table.py::test_"
TESTS = (
    f"{TABLE}a_write_is_tagged_where_the_server_takes_a_comment",
    f"{TABLE}a_handler_that_has_written_is_not_executed_again",
    f"{TABLE}a_commit_whose_reply_is_lost_is_done_once",
    f"{TABLE}a_standalone_refuses_a_transaction",
    f"{TABLE}strict_lets_repeatable_writes_and_reads_through",
)


@pytest.mark.timeout(300)  # it may have to be downloaded
def test_a_server_without_comments_passes_a_part_of_the_table_of_deployments(tmp_path: Path) -> None:
    executable = Path(sys.executable)
    try:
        setup = Setup(executable, drivers.driver(DRIVER, executable, FOLDER), servers.install(SERVER, FOLDER))
    except MissingError as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"this system has no OpenSSL 1.1 to give it: {exc}")
    cell = Cell(DRIVER, SERVER, "{}.{}".format(*sys.version_info))
    setup.check(cell)
    log = tmp_path / "pytest.log"
    ended = run(setup, cell, "deployments", tests=TESTS, log=log, workers=0, reruns=1, commit="")
    assert ended.is_good, log.read_text()[-5000:]
    assert ended.passed > 40
