"""The stage of one run: a database and an appName of its own, and everything that is measured."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from saferetry.lab.commands import CommandLog
from saferetry.lab.consuming import Ending, Message, Way, Write
from saferetry.lab.operations import PeakCopies, end_transactions, wait_until_idle
from saferetry.lab.proxy import Mode, Proxy
from saferetry.lab.server import Server

COLLECTION = "records"


class FaultMissingError(RuntimeError):
    """A fault that a scenario is about did not take place, so its numbers say nothing."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The numbers of one run; all of them measured, except `expected`.

    Attributes:
        executions: times the handler was executed.
        sends: command_started events of the write command.
        peak_copies: distinct writes the server's engine ran at a time, at most.
        effects: see the scenario; read when the server ran nothing of this run any more.
        expected: what `effects` should be.
        seconds: until the consumer went on to its next message.
        seen: what the consumer saw in the end.
        left_group: whether it was taken for dead meanwhile; None: that is not what the scenario is about.
    """

    executions: int
    sends: int
    peak_copies: int
    effects: int
    expected: int
    seconds: float
    seen: str
    left_group: bool | None = None

    def as_json(self) -> dict[str, int | float]:
        """Return the numbers as they stand in the file of `--json`."""
        group = {} if self.left_group is None else {"left_group": self.left_group}
        return {
            "executions": self.executions,
            "sends": self.sends,
            "peak_copies": self.peak_copies,
            "effects": self.effects,
            "expected": self.expected,
            "seconds": round(self.seconds, 3),
            **group,
        }


class Stage:
    """Where one scenario plays once, in one way of consuming.

    Attributes:
        admin: a plain client that no fault hits.
        records: the collection the handler writes to, seen through `admin`.
        log: of the commands the consumer's client sent.
        app_name: of the consumer's client.
        ending: how the handling ended, once `consume` has returned.
    """

    def __init__(self, server: Server, admin: MongoClient[dict[str, Any]], consume: Callable[[Message], Ending]) -> None:
        self.admin = admin
        self.log = CommandLog()
        self._server = server
        self._consume = consume
        self._ending: Ending | None = None
        self._sent_elsewhere: Counter[str] = Counter()
        self.app_name = f"lab_{uuid.uuid4().hex[:12]}"
        self._watch = PeakCopies(admin, self.app_name, all_users=server.sees_all_users)
        self.records: Collection[dict[str, Any]] = admin[self.app_name][COLLECTION]

    @property
    def ending(self) -> Ending:
        """How the handling ended.

        Raises:
            RuntimeError: nothing was consumed yet.
        """
        if self._ending is None:
            raise RuntimeError("nothing was consumed yet")
        return self._ending

    @property
    def uri(self) -> str:
        """The server's connection string."""
        return self._server.uri

    def uri_through(self, proxy: Proxy) -> str:
        """Return the server's connection string through a proxy before it."""
        return self._server.uri_through(proxy)

    def proxy(self, command: str, mode: Mode, times: int, on_hit: Callable[[], object] | None = None) -> Proxy:
        """Return a proxy before the server; see `Proxy`."""
        return Proxy(self._server.port, None, mode, times, command=command, on_hit=on_hit, target_host=self._server.host)

    @property
    def namespace(self) -> str:
        """The "database.collection" the handler writes to."""
        return self.records.full_name

    @property
    def peak_copies(self) -> int:
        """Distinct writes of the consumer that were in the engine at a time, at most, so far."""
        return self._watch.peak

    def consume(
        self, write: Write, *, proxy: Proxy | None = None, socket_timeout: float | None = None, budget: float = 30.0
    ) -> None:
        """Let the consumer handle one message whose handler calls `write`, and return when it has ended.

        Args:
            write: the handler's body.
            proxy: to connect through.
            socket_timeout: the client's, in seconds; None for the driver's default, which is to wait for ever.
            budget: seconds after which the consumer, if it minds, gives up.
        """
        options: dict[str, Any] = {"appName": self.app_name}
        if socket_timeout is not None:
            options["socketTimeoutMS"] = round(socket_timeout * 1000)
        uri = self._server.uri_through(proxy) if proxy else self._server.uri
        database = self.records.database.name
        self._hand_over(Message(uri, options, database, self.records.name, write, self.log, budget))

    def consume_elsewhere(self, handle: Callable[[Way], Ending]) -> None:
        """Let processes that can be killed handle one message, and return when it has ended.

        Args:
            handle: starts and ends them, given the way of consuming; their clients have this stage's appName.
        """
        database, collection = self.records.database.name, self.records.name
        self._hand_over(Message(self._server.uri, {}, database, collection, _write_nothing, self.log, 0.0, handle))

    def note_sent(self, commands: Iterable[str]) -> None:
        """Count commands that another process sent, by their names."""
        self._sent_elsewhere.update(commands)

    def sends(self, *commands: str) -> int:
        """Count the sends of commands with these names, in all processes."""
        return self.log.sends(*commands) + sum(self._sent_elsewhere[command] for command in commands)

    def _hand_over(self, message: Message) -> None:
        with self._watch:
            self._ending = self._consume(message)

    @contextmanager
    def held_until_seen(self, hold: AbstractContextManager[Callable[[], None]]) -> Iterator[None]:
        """Keep `hold` on until the first copy was seen in the engine, so that it can be counted; not without failpoints.

        Args:
            hold: `hold_inserts` or `hold_updates` on this stage's namespace.
        """
        if not self._server.has_failpoints:
            yield
            return
        left = threading.Event()

        def release_when_seen(release: Callable[[], None]) -> None:
            while not self.peak_copies and not left.wait(0.005):
                pass
            release()

        with hold as release:
            thread = threading.Thread(target=release_when_seen, args=(release,), name="held-until-seen")
            thread.start()
            try:
                yield
            finally:
                left.set()
                thread.join()

    def settle(self) -> None:
        """Wait until the server runs nothing of the consumer's any more (at most 30 seconds)."""
        wait_until_idle(self.admin, self.app_name, all_users=self._server.sees_all_users)

    def clear(self) -> None:
        """Empty the stage's database, and before that end the transactions whose locks a dead consumer has left.

        A user with readWrite may drop collections, not databases; with its last collection a database is gone.
        """
        end_transactions(self.admin, self.app_name, all_users=self._server.sees_all_users)
        database = self.records.database
        for collection in database.list_collection_names():
            database.drop_collection(collection)


def _write_nothing(records: Collection[dict[str, Any]]) -> None:
    """Be the body of a handler that runs elsewhere."""
