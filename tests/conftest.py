"""Fixtures on a real mongod, and the rule that no test is skipped in silence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.support import CommandLog, Mongod, Proxy, random_name

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
ENFORCE_OFF = "ALLOW_SKIPS"
FIGURE = "figure"

RawClient = MongoClient[dict[str, Any]]


@pytest.fixture(scope="session")
def mongod() -> Iterator[Mongod]:
    """A single-node replica set (LAB_MONGOD names the binary); a test that kills it must restart it."""
    with Mongod() as server:
        yield server


@pytest.fixture(scope="session")
def standalone() -> Iterator[Mongod]:
    """A mongod that is no replica set; started by the first test that asks for it."""
    with Mongod(replica_set=None) as server:
        yield server


@pytest.fixture(scope="session")
def admin(mongod: Mongod) -> Iterator[RawClient]:
    """A plain PyMongo client of `mongod`: sets failpoints and looks at what is really there."""
    with MongoClient[dict[str, Any]](mongod.uri, appName=random_name("admin")) as client:
        yield client


@pytest.fixture
def database_name(admin: RawClient) -> Iterator[str]:
    """The name of a database of this test's own on `mongod`, dropped afterwards."""
    name = random_name("test")
    yield name
    admin.drop_database(name)


@pytest.fixture
def log() -> CommandLog:
    """A log of commands, for `event_listeners=[log]`."""
    return CommandLog()


@pytest.fixture
def proxy(mongod: Mongod) -> Iterator[Callable[..., Proxy]]:
    """A factory of started proxies before `mongod` (or another `target_port=`), all closed afterwards.

    Takes what `Proxy` takes: `proxy(command="insert", times=2)`.
    """
    with ExitStack() as stack:

        def start(*args: Any, target_port: int | None = None, **kwargs: Any) -> Proxy:
            return stack.enter_context(Proxy(target_port or mongod.port, *args, **kwargs))

        yield start


# The rule: a skip or xfail that tests/allowed_skips.txt does not list fails the run.


def _allowed_skips() -> set[str]:
    lines = ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines()
    return {line.split("#")[0].strip() for line in lines} - {""}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session for every skip, xfail or xpass that is not listed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get(ENFORCE_OFF):
        return
    reports = [report for outcome in ("skipped", "xfailed", "xpassed") for report in reporter.stats.get(outcome, [])]
    unlisted = sorted({report.nodeid for report in reports} - _allowed_skips())
    if not unlisted:
        return
    session.config.stash[_UNLISTED] = unlisted
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_UNLISTED = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the figures that tests measured (property "figure"), and name the tests that were skipped without leave."""
    reports = [report for found in terminalreporter.stats.values() for report in found if hasattr(report, "user_properties")]
    figures = [(report.nodeid, value) for report in reports for name, value in report.user_properties if name == FIGURE]
    if figures:
        terminalreporter.section("measured")
        for node_id, figure in sorted(set(figures)):
            terminalreporter.write_line(f"{Path(node_id.split('::')[0]).stem}: {figure}")
    unlisted = config.stash.get(_UNLISTED, [])
    if unlisted:
        terminalreporter.section("skipped or xfailed, not listed", sep="=", red=True, bold=True)
        for node_id in unlisted:
            terminalreporter.write_line(node_id)
        terminalreporter.write_line(f"List them in {ALLOWED_SKIPS.name} with a reason, or set {ENFORCE_OFF}=1.")
