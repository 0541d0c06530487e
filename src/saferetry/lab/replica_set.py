"""A replica set of several mongods of our own: a primary to kill, to step down, and to cut off from its followers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pymongo import MongoClient
from pymongo.errors import AutoReconnect, PyMongoError

from saferetry.lab.failpoints import failpoint
from saferetry.lab.mongod import Mongod, MongodError
from saferetry.lab.proxy import Proxy

_NAME = "rs0"
_LOOK = 0.05  # seconds between two looks for a primary


class ReplicaSet:
    """Members on 127.0.0.1, each behind a `Proxy` of its own, under whose address the set knows it.

    So whatever a client sends to the primary can be cut or lose its reply at `proxy_of(primary)`. Use it as a context
    manager. Its methods may be called from any thread, from one at a time.

    Attributes:
        members: the servers, primary or not.

    Example:
        with ReplicaSet() as servers:
            client = MongoClient(servers.uri)
            servers.primary().kill()
    """

    def __init__(
        self,
        size: int = 3,
        *,
        binary: str | Path | None = None,
        election_timeout: float = 2.0,
        parameters: Mapping[str, object] | None = None,
        proxied: bool = True,
    ) -> None:
        """Describe it; nothing is started yet.

        Args:
            size: number of members.
            binary: path of a mongod; see `find_binary`.
            election_timeout: seconds without a primary after which another is elected.
            parameters: server parameters of each member.
            proxied: whether each member is behind a proxy; without, measured times are the servers' own.
        """
        self.members = [Mongod(binary, replica_set=_NAME, initiate=False, parameters=parameters) for _ in range(size)]
        self._election_timeout = election_timeout
        self._proxied = proxied
        self._proxies: dict[int, Proxy] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def uri(self) -> str:
        """The connection string; it has a query part."""
        return f"mongodb://{','.join(self._host(member) for member in self.members)}/?replicaSet={_NAME}"

    @property
    def version(self) -> str:
        """The servers' version."""
        return self.members[0].version

    def start(self) -> Self:
        """Start the members, make them a set, and wait for a primary with all others as secondaries.

        Raises:
            MongodError: one did not start, or there was no primary in time.
        """
        for member in self.members:
            self._stack.callback(member.stop)
            member.start()
            if self._proxied:
                self._proxies[member.port] = self._stack.enter_context(Proxy(member.port))
        config = {
            "_id": _NAME,
            "members": [{"_id": number, "host": self._host(member)} for number, member in enumerate(self.members)],
            "settings": {
                "electionTimeoutMillis": round(self._election_timeout * 1000),
                "heartbeatIntervalMillis": 500,
                "chainingAllowed": False,
            },
        }
        with self.direct(self.members[0]) as client:
            client.admin.command("replSetInitiate", config)
        self.settle()
        return self

    def stop(self) -> None:
        """End all members and remove their folders. May be called again."""
        self._stack.close()

    def direct(self, member: Mongod) -> MongoClient[dict[str, Any]]:
        """Return a plain client of one member, past its proxy; the caller closes it."""
        return MongoClient("127.0.0.1", member.port, directConnection=True, serverSelectionTimeoutMS=2000)

    def proxy_of(self, member: Mongod) -> Proxy:
        """Return the proxy through which clients and the other members reach a member."""
        return self._proxies[member.port]

    def primary(self, timeout: float = 60.0) -> Mongod:
        """Return the member that is primary now, as soon as there is one.

        Raises:
            MongodError: there was none in `timeout` seconds.
        """
        return self._when(lambda states: states.index("PRIMARY") if "PRIMARY" in states else None, timeout)

    def settle(self, timeout: float = 60.0) -> Mongod:
        """Wait until there is one primary and all others are its secondaries; return the primary.

        Raises:
            MongodError: that was not so in `timeout` seconds.
        """
        wanted = sorted(["PRIMARY", *["SECONDARY"] * (len(self.members) - 1)])
        return self._when(lambda states: states.index("PRIMARY") if sorted(states) == wanted else None, timeout)

    def heal(self) -> Mongod:
        """Start what was killed, and wait until the set is whole; return the primary."""
        for member in self.members:
            with contextlib.suppress(MongodError):
                if member.pid:
                    continue
            member.restart()
        return self.settle()

    def step_down(self) -> None:
        """Let the primary step down; another one is elected, which takes a moment."""
        primary = self.settle()
        for member in self.members:
            if member is not primary:  # one that stepped down a moment ago may be elected again
                with self.direct(member) as client:
                    client.admin.command("replSetFreeze", 0)
        with self.direct(primary) as client, contextlib.suppress(AutoReconnect):
            client.admin.command("replSetStepDown", 10, secondaryCatchUpPeriodSecs=5)

    @contextmanager
    def cut_off_primary(self) -> Iterator[Mongod]:
        """Let no secondary fetch what the primary writes meanwhile, so that it is there and nowhere else; give the primary.

        Heartbeats go on, so that it stays primary, until it is killed, say.
        """
        primary = self.primary()
        with ExitStack() as stack:
            for member in self.members:
                if member is not primary:
                    client = stack.enter_context(self.direct(member))
                    stack.enter_context(failpoint(client, "stopReplProducer"))
            yield primary

    def _host(self, member: Mongod) -> str:
        proxy = self._proxies.get(member.port)
        return f"127.0.0.1:{proxy.port if proxy else member.port}"

    def _when(self, choose: Callable[[list[str]], int | None], timeout: float) -> Mongod:
        deadline = time.monotonic() + timeout
        states: list[str] = []
        while time.monotonic() < deadline:
            states = [self._state(member) for member in self.members]
            chosen = choose(states)
            if chosen is not None:
                return self.members[chosen]
            time.sleep(_LOOK)
        raise MongodError(f"after {timeout:g} s the members are {states}")

    def _state(self, member: Mongod) -> str:
        try:
            with MongoClient[dict[str, Any]](
                "127.0.0.1", member.port, directConnection=True, serverSelectionTimeoutMS=300
            ) as client:
                hello = client.admin.command("isMaster")
        except PyMongoError as exc:
            return type(exc).__name__
        if hello["ismaster"]:
            return "PRIMARY"
        return "SECONDARY" if hello.get("secondary") else "OTHER"
