"""Failures that a test puts between a client and its server in memory."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pymongo.errors import AutoReconnect, PyMongoError, ServerSelectionTimeoutError

from saferetry.errors import ConfigurationError


class Point(enum.Enum):
    """Say where a call fails."""

    BEFORE_SENDING = enum.auto()  # no server can be had
    REQUEST = enum.auto()  # on the way to the server
    SERVER = enum.auto()  # the server answers with an error and changes nothing
    REPLY = enum.auto()  # on the way back: the server has done it


@dataclass
class Fault:
    """Be failures of one kind.

    Attributes:
        point: Where they strike.
        make: Makes the driver's error.
        method: The method they strike; empty: every one.
        collection: The collection they strike; empty: every one.
        times: How many calls of the driver's are still to fail.
        after: How many are to go through before.
    """

    point: Point
    make: Callable[[], PyMongoError]
    method: str
    collection: str
    times: int
    after: int

    def reaches(self, method: str, collection: str, *, is_own: bool) -> bool:
        """Whether it is about a call; one of saferetry's own has to be named."""
        is_named = self.collection == collection or not (self.collection or is_own)
        return bool(self.times) and is_named and self.method in ("", method)

    def strike(self) -> bool:
        """Count a call it is about; whether that fails."""
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return True


class Faults:
    """Let calls of one client fail as on a bad network; see ``saferetry.testing.faults``.

    A call of the driver's is counted once, its own resend included: what a lost reply means to plain PyMongo, too, is that
    both were lost. Methods are named as in PyMongo, and ``commit_transaction`` is what ends a record of guarantee
    "transaction". The record's marker is only struck by a fault that names its collection.
    """

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def lose_reply(self, method: str = "", *, collection: str = "", times: int = 1, after: int = 0) -> None:
        """Let the server do it, and its answer not arrive: AutoReconnect.

        Args:
            method: As ``insert_one``; empty: every one.
            collection: Its name without the database; empty: every one.
            times: How many calls fail.
            after: How many go through before.

        Raises:
            ConfigurationError: ``times`` is below 1, or ``after`` below 0.
        """
        self._add(Fault(Point.REPLY, _lost_reply, method, collection, times, after))

    def lose_request(self, method: str = "", *, collection: str = "", times: int = 1, after: int = 0) -> None:
        """Let the request not arrive, which the client cannot tell from a lost reply: AutoReconnect."""
        self._add(Fault(Point.REQUEST, _lost_request, method, collection, times, after))

    def fail_before_sending(self, method: str = "", *, collection: str = "", times: int = 1, after: int = 0) -> None:
        """Let no server be had, so that nothing is sent: ServerSelectionTimeoutError."""
        self._add(Fault(Point.BEFORE_SENDING, _no_server, method, collection, times, after))

    def answer(self, error: PyMongoError, method: str = "", *, collection: str = "", times: int = 1, after: int = 0) -> None:
        """Let the server answer with an error and change nothing, as ``pymongo.errors.ExecutionTimeout("...", 50)``."""
        self._add(Fault(Point.SERVER, lambda: error, method, collection, times, after))

    def clear(self) -> None:
        """Let nothing fail any more."""
        with self._lock:
            self._faults.clear()

    @property
    def pending(self) -> int:
        """How many failures have not struck yet."""
        with self._lock:
            return sum(fault.times for fault in self._faults)

    def strike(self, method: str, collection: str = "", *, is_own: bool = False) -> Fault | None:
        """Return the failure that strikes a call, if one does."""
        with self._lock:
            reaching = (fault for fault in self._faults if fault.reaches(method, collection, is_own=is_own))
            return next((fault for fault in reaching if fault.strike()), None)

    def _add(self, fault: Fault) -> None:
        if fault.times < 1 or fault.after < 0:
            raise ConfigurationError(f"faults: times is {fault.times}, after {fault.after}: give 1 or more, and 0 or more")
        with self._lock:
            self._faults.append(fault)


def _lost_reply() -> AutoReconnect:
    return AutoReconnect("connection closed (a test lost the reply)")


def _lost_request() -> AutoReconnect:
    return AutoReconnect("connection closed (a test lost the request)")


def _no_server() -> ServerSelectionTimeoutError:
    return ServerSelectionTimeoutError("no server (a test let none be had)")
