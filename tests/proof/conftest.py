"""The ground of the proof: a database of the test's own, consumers here and in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient, common
from pymongo.read_concern import ReadConcern

from saferetry.lab.processes import TellingProcess
from saferetry.lab.replica_set import ReplicaSet
from tests.conftest import FIGURE
from tests.proof import work
from tests.proof.consuming import Consumer
from tests.proof.work import RawDatabase, Work
from tests.support import Mode, Mongod, Proxy, random_name

ROOT = Path(__file__).parents[2]


class Ground:
    """Where one test runs.

    Attributes:
        name: of the database.
        database: seen by a plain client, as the majority has it.
    """

    def __init__(
        self, uri: str, admin: MongoClient[dict[str, Any]], name: str, stack: ExitStack, port: int | None = None
    ) -> None:
        self.uri = uri
        self._port = port
        self.admin = admin
        self.name = name
        self.database: RawDatabase = admin.get_database(name, read_concern=ReadConcern("majority"))
        self._stack = stack

    def start_anew(self, prepare: Callable[[RawDatabase], None] = work.prepare) -> None:
        """Drop and prepare the database; the transactions of the dead would keep it from being dropped."""
        self.admin.admin.command("killAllSessions", [])
        self.admin.drop_database(self.name)
        prepare(self.database)

    def consumer(self, work: Work = work.order, *, uri: str | None = None, **arguments: Any) -> Consumer:
        """Return a consumer in this process."""
        return self._stack.enter_context(Consumer(uri or self.uri, self.name, work, **arguments))

    def worker(self, *positions: int, uri: str | None = None, **plan: Any) -> TellingProcess:
        """Start a consumer in another process, which handles these records."""
        plan = {"uri": uri or self.uri, "database": self.name, "positions": positions, **plan}
        return self._stack.enter_context(TellingProcess("tests.proof.worker", plan, folder=ROOT))

    def proxy(self, *, mode: Mode, command: str | None = None, port: int | None = None, **fault: Any) -> Proxy:
        """Return a proxy before the server or a port, with a fault that strikes once; consumers that come later close first."""
        port = port or self._port
        assert port is not None
        return self._stack.enter_context(Proxy(port, command=command, mode=mode, times=1, **fault))

    def proxy_losing_every(self, count: int) -> Proxy:
        """Return a proxy before the server that loses each so many-th reply."""
        assert self._port is not None
        return self._stack.enter_context(Proxy(self._port, mode="close", times=10**9, skip=count, every=count))

    def effects(self) -> dict[str, Any]:
        """Return what `work.order` did."""
        return work.effects(self.database)


@pytest.fixture(autouse=True)
def quick_discovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a lost server be looked at again at once (the driver waits 0.5 s at least)."""
    monkeypatch.setattr(common, "MIN_HEARTBEAT_INTERVAL", 0.02)


@pytest.fixture
def ground(mongod: Mongod, admin: MongoClient[dict[str, Any]], database_name: str) -> Iterator[Ground]:
    """A prepared database on `mongod`."""
    with ExitStack() as stack:
        ground = Ground(mongod.uri, admin, database_name, stack, mongod.port)
        work.prepare(ground.database)
        yield ground
    admin.admin.command("killAllSessions", [])  # the transactions of the dead keep the database from being dropped


@pytest.fixture(scope="session")
def servers() -> Iterator[ReplicaSet]:
    """A replica set of three; a test that kills a member heals it."""
    with ReplicaSet() as servers:
        yield servers


@pytest.fixture
def majority_ground(servers: ReplicaSet) -> Iterator[Ground]:
    """A prepared database on `servers`, which are whole before and after."""
    servers.heal()
    with on_replica_set(servers) as ground:
        work.prepare(ground.database)
        yield ground
        for member in servers.members:
            servers.proxy_of(member).recover()
        servers.heal()


@contextmanager
def on_replica_set(servers: ReplicaSet) -> Iterator[Ground]:
    """Give an empty database on a replica set."""
    with MongoClient[dict[str, Any]](servers.uri, w="majority") as admin, ExitStack() as stack:
        yield Ground(servers.uri, admin, random_name("test"), stack)


@pytest.fixture
def app_name() -> str:
    """The appName of the consumers that a test looks for."""
    return random_name("app")


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Keep a measured figure for the end of the run."""

    def keep(text: str) -> None:
        record_property(FIGURE, text)

    return keep
