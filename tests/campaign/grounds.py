"""Where a campaign takes place: one node, with a proxy for each lane, or three nodes, each behind one for all lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import pymongo
from pymongo.errors import ConnectionFailure, OperationFailure
from pymongo.read_concern import ReadConcern

from saferetry._policy import RETRYABLE_CODES
from saferetry.lab.mongod import Mongod
from saferetry.lab.proxy import Proxy
from saferetry.lab.replica_set import ReplicaSet
from tests.campaign.faults import Failures, Script
from tests.support import random_name

RawClient = pymongo.MongoClient[dict[str, Any]]
T = TypeVar("T")
_PATIENCE = 60.0  # seconds
_DOWN = 0.3  # seconds that a killed member stays down


def patiently(ask: Callable[[], T]) -> T:
    """Ask again while there is no primary, or the connection is lost with those of the lanes."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return ask()
        except (ConnectionFailure, OperationFailure) as exc:
            passes = isinstance(exc, ConnectionFailure) or exc.code in RETRYABLE_CODES
            if time.monotonic() > deadline or not passes:
                raise
            time.sleep(0.05)


class Ground(Protocol):
    """Servers, and how lanes reach them.

    Attributes:
        admin: a plain client, past the lanes' proxies.
        clean: a plain client of the server that the oracle asks.
        read_concern: with which is looked at what records have.
        options: of the lanes' clients.
    """

    admin: RawClient
    clean: RawClient
    read_concern: ReadConcern
    options: dict[str, Any]

    def attached(self, script: Script | None = None) -> AbstractContextManager[tuple[Script, str]]:
        """Give a lane its script, and the URI under which that is in force."""

    def prepare(self, database: str) -> None:
        """Make the users that may use a database."""

    def settle(self) -> None:
        """Wait until the servers are whole again, and what they have can no more be taken back."""


class OneNode:
    """One node."""

    def __init__(self, port: int, admin: RawClient) -> None:
        self.options: dict[str, Any] = {}
        self.read_concern = ReadConcern("local")
        self.admin = self.clean = admin
        self._port = port
        self._failures = Failures(admin)

    @contextmanager
    def attached(self, script: Script | None = None) -> Iterator[tuple[Script, str]]:
        """Put a proxy between a lane and the server."""
        script = Script(self._failures)
        with Proxy(self._port) as proxy:
            proxy.follow(script)
            script.proxies.append(proxy)
            yield script, proxy.uri()

    def prepare(self, database: str) -> None:
        """Nobody is asked for a password."""

    def settle(self) -> None:
        """Nothing was taken back."""


class ThreeNodes:
    """A replica set of three; its members are killed and step down."""

    def __init__(self, servers: ReplicaSet, admin: RawClient, clean: RawClient) -> None:
        self.admin = admin
        self.clean = clean
        self.read_concern = ReadConcern("majority")
        self.options: dict[str, Any] = {"w": "majority", "serverSelectionTimeoutMS": 20_000}
        self._servers = servers
        self._script = Script(Failures(admin))
        self._script.disasters.update({"primary killed": self._kill_primary, "primary stepped down": self._step_down})
        self._disaster = threading.Lock()  # one at a time
        self._is_whole = threading.Event()
        self._is_whole.set()
        for member in servers.members:
            proxy = servers.proxy_of(member)
            proxy.follow(self._script)
            self._script.proxies.append(proxy)

    @contextmanager
    def attached(self, script: Script | None = None) -> Iterator[tuple[Script, str]]:
        """Let a lane share the proxies with the others."""
        yield self._script, self._servers.uri

    def prepare(self, database: str) -> None:
        """Nobody is asked for a password."""

    def settle(self) -> None:
        """Wait until all members are there, and a majority has all that there is."""
        self._is_whole.wait()
        barrier = self.admin.get_database("barrier", write_concern=pymongo.WriteConcern("majority")).c
        patiently(lambda: barrier.insert_one({}))

    def _kill_primary(self) -> bool:
        if not self._disaster.acquire(blocking=False):
            return False
        self._is_whole.clear()
        primary = self._servers.primary()
        primary.kill()

        def heal() -> None:
            try:
                time.sleep(_DOWN)
                self._servers.heal()
            finally:
                self._is_whole.set()
                self._disaster.release()

        threading.Thread(target=heal, name="heal").start()
        return True

    def _step_down(self) -> bool:
        if not self._disaster.acquire(blocking=False):
            return False
        self._is_whole.clear()

        def step_down() -> None:
            try:
                self._servers.step_down()
                self._servers.settle()
            finally:
                self._is_whole.set()
                self._disaster.release()

        threading.Thread(target=step_down, name="step-down").start()
        return True


@contextmanager
def one_node(binary: str | None = None) -> Iterator[tuple[OneNode, str]]:
    """Start a node; give it and its version."""
    with Mongod(binary) as mongod, pymongo.MongoClient[dict[str, Any]](mongod.uri, appName=random_name("admin")) as admin:
        yield OneNode(mongod.port, admin), mongod.version


@contextmanager
def three_nodes(binary: str | None = None) -> Iterator[tuple[ThreeNodes, str]]:
    """Start three nodes, and one more for the oracle; give them and their version."""
    with (
        Mongod(binary) as alone,
        ReplicaSet(binary=binary) as servers,
        pymongo.MongoClient[dict[str, Any]](servers.uri, w="majority") as admin,
        pymongo.MongoClient[dict[str, Any]](alone.uri) as clean,
    ):
        yield ThreeNodes(servers, admin, clean), servers.version
