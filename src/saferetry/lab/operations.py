"""What the server is doing for one client, by $currentOp."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pymongo import MongoClient

AnyClient = MongoClient[dict[str, Any]]

_HANDSHAKES = frozenset({"hello", "isMaster", "ismaster"})
_IDLE_LOOKS = 2
_WRITE_OPS = frozenset({"insert", "update", "remove"})
_WRITE_COMMANDS = frozenset({"insert", "update", "delete", "findAndModify"})


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that the server runs at present.

    Attributes:
        opid: the server's number for it.
        namespace: "database.collection"; "database.$cmd" before the command was looked at.
        is_write: whether it is an insert, update, delete or findAndModify.
        in_engine: whether it is past session checkout: running, or held by a failpoint. If not it waits until
            another operation of its session is done, and has done nothing so far.
        write: what tells one write from another: session and transaction number, or the opid where there is none.
        held_by: the failpoint that holds it, "" if none does.
    """

    opid: int
    namespace: str
    is_write: bool
    in_engine: bool
    write: tuple[object, ...]
    held_by: str


def running(client: AnyClient, app_name: str, *, all_users: bool = True) -> list[Operation]:
    """Return the operations of the clients with this appName, their server monitoring aside.

    Args:
        client: a plain client with another appName.
        app_name: of the clients looked at.
        all_users: whether other users' operations count too, which on servers with authentication needs a privilege.
    """
    pipeline: list[dict[str, Any]] = [
        {"$currentOp": {"allUsers": all_users}},
        {"$match": {"appName": app_name, "active": True}},
    ]
    return [_operation(document) for document in client.admin.aggregate(pipeline) if not _is_handshake(document)]


def copies(operations: list[Operation]) -> int:
    """Count the distinct writes that are in the engine."""
    return len({operation.write for operation in operations if operation.is_write and operation.in_engine})


def wait_until_idle(client: AnyClient, app_name: str, timeout: float = 30.0, *, all_users: bool = True) -> None:
    """Wait until the server runs nothing for the clients with this appName, in two looks 50 ms apart.

    One look is not enough: a command may still be on its way to the server.

    Args:
        client: a plain client with another appName.
        app_name: of the clients waited for.
        timeout: seconds.
        all_users: see `running`.

    Raises:
        TimeoutError: there was something during all of `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    idle_looks = 0
    while idle_looks < _IDLE_LOOKS:
        left = running(client, app_name, all_users=all_users)
        idle_looks = 0 if left else idle_looks + 1
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout:g} s the server still runs {left}")
        time.sleep(0.05)


def end_transactions(client: AnyClient, app_name: str, *, all_users: bool = True) -> int:
    """End the transactions that clients with this appName have left open, and return how many there were.

    Args:
        client: a plain client of the same database user.
        app_name: of the clients.
        all_users: see `running`.
    """
    pipeline: list[dict[str, Any]] = [
        {"$currentOp": {"allUsers": all_users, "idleSessions": True}},
        {"$match": {"appName": app_name, "transaction": {"$exists": True}}},
    ]
    sessions = [{"id": document["lsid"]["id"]} for document in client.admin.aggregate(pipeline)]
    if sessions:
        client.admin.command("killSessions", sessions)
    return len(sessions)


def _operation(document: dict[str, Any]) -> Operation:
    command = document.get("command", {})
    name = next(iter(command), "")
    # Measured on 4.4, 5.0 and 6.0: an operation with a transaction number that has its session checked out shows
    # `transaction`; one that waits for the session shows its command, number included, and no `transaction`. One
    # without a number never waits for its session.
    parameters = document.get("transaction", {}).get("parameters")
    in_engine = parameters is not None or "txnNumber" not in command
    session = document.get("lsid", {})
    if parameters is None:
        write: tuple[object, ...] = (document["opid"],)
    else:
        write = (session.get("id"), session.get("uid"), parameters.get("txnNumber"))
    return Operation(
        opid=document["opid"],
        namespace=document.get("ns", ""),
        is_write=document.get("op") in _WRITE_OPS or name in _WRITE_COMMANDS,
        in_engine=in_engine,
        write=write,
        held_by=document.get("failpointMsg") or document.get("msg") or "",  # `msg` up to 4.4
    )


def _is_handshake(document: dict[str, Any]) -> bool:
    return next(iter(document.get("command", {})), "") in _HANDSHAKES


class PeakCopies:
    """Watch, from a thread of its own, how many copies the engine runs at most for the clients with one appName.

    Example:
        with PeakCopies(admin, "lab-7f3a") as watch:
            ...
        print(watch.peak)
    """

    def __init__(self, client: AnyClient, app_name: str, interval: float = 0.02, *, all_users: bool = True) -> None:
        """Describe the watch; it looks every `interval` seconds while the context is open. `all_users`: see `running`."""
        self.peak = 0
        self._client = client
        self._app_name = app_name
        self._interval = interval
        self._all_users = all_users
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-copies", daemon=True)
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._error is not None and exc is None:
            raise self._error

    def _watch(self) -> None:
        try:
            while not self._ended.wait(self._interval):
                self.peak = max(self.peak, copies(running(self._client, self._app_name, all_users=self._all_users)))
        except Exception as exc:  # noqa: BLE001  a watch that died must not count as "saw nothing"
            self._error = exc
