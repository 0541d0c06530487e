"""What goes wrong: a script for a lane's proxy, which knows the commands of each record and counts what it saw take place."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pymongo
from pymongo.errors import OperationFailure

from saferetry.lab.operations import copies
from saferetry.lab.operations import running as running_operations
from saferetry.lab.proxy import Mode, Proxy, Strike
from tests.campaign.schedule import KINDS, Fault
from tests.support import eventually

_OWNER = re.compile(rb"r\d{6}")
_SESSION = re.compile(rb"\x05id\x00\x10\x00\x00\x00\x04(.{16})", re.DOTALL)
_NOT_THE_RECORDS = frozenset({"killSessions", "endSessions", "ping", "listIndexes", "createIndexes"})
_MODES: Mapping[str, Mode] = {
    "lost reply": "close",
    "lost reply, silent": "drop_reply",
    "reply cut": "cut_reply",
    "request cut": "cut",
    "request lost": "drop",
    "request late": "delay",
    "reply late": "delay_reply",
    "reply throttled": "throttle",
    "disconnected": "notice",
    "server error": "notice",
    "server closes": "notice",
    "write concern error": "notice",
    "task cancelled": "notice",
    "process killed before": "cut",
    "process killed after": "close",
    "process stopped": "notice",
    "copy held": "notice",
    "primary killed": "notice",
    "primary stepped down": "notice",
}
GIVEN_UP = "copy held until given up"

_HOLDS = ("hangDuringBatchInsert", "hangDuringBatchUpdate", "hangDuringBatchRemove", "hangBeforeFindAndModifyPerformsUpdate")
_QUEUED = 0.1  # seconds that the last send waits behind the held copy
_WRITES = ["insert", "update", "delete", "findAndModify", "commitTransaction"]
_FAILING = [*_WRITES, "find", "aggregate", "distinct", "abortTransaction"]

Observed = Counter[tuple[str, str]]  # (kind of fault, method it befell)


class Failures:
    """Let the server answer one lane with errors; failCommand is one setting, so one delivery has it at a time."""

    def __init__(self, admin: pymongo.MongoClient[dict[str, Any]]) -> None:
        self.admin = admin
        self.lock = threading.Lock()
        self._before = self._ended()

    def start(self, app_name: str, fault: Fault) -> None:
        """Let the next commands of the clients with this appName fail, once what failed before was counted."""
        data: dict[str, Any] = {"appName": app_name, "failCommands": _FAILING}
        match fault.kind:
            case "server closes":
                data["closeConnection"] = True
            case "write concern error":
                data |= {"failCommands": _WRITES, "writeConcernError": {"code": fault.code, "errmsg": "injected"}}
            case _:
                data |= {"errorCode": fault.code, **({"errorLabels": list(fault.labels)} if fault.labels else {})}
        self.admin.admin.command("configureFailPoint", "failCommand", mode={"times": fault.times}, data=data)

    def stop(self) -> int:
        """End it, and return how often it fired since it was last ended."""
        before, self._before = self._before, self._ended()
        return self._before - before

    def _ended(self) -> int:
        """Switch it off, and return how often it fired since the server was started."""
        return int(self.admin.admin.command("configureFailPoint", "failCommand", mode="off")["count"])


class Hold:
    """Hold the copies of writes in the engine, of all clients, so that it needs the server for itself."""

    def __init__(self, admin: pymongo.MongoClient[dict[str, Any]]) -> None:
        self._admin = admin
        self._names: list[str] = []

    def start(self, app_name: str, then: Callable[[], None]) -> None:
        """Hold what comes, and do something as soon as it is held."""
        for name in _HOLDS:
            with contextlib.suppress(OperationFailure):  # 4.4 has not all of them
                self._admin.admin.command("configureFailPoint", name, mode="alwaysOn", data={"shouldCheckForInterrupt": False})
                self._names.append(name)
        threading.Thread(target=self._when_held, args=(app_name, then), name="when-held").start()

    def _when_held(self, app_name: str, then: Callable[[], None]) -> None:
        eventually(lambda: copies(running_operations(self._admin, app_name)) or not self._names)
        then()

    def release(self) -> bool:
        """Let go; whether something was held."""
        names, self._names = self._names, []
        for name in names:
            self._admin.admin.command("configureFailPoint", name, mode="off")
        return bool(names)


@dataclass
class Actors:
    """What a fault can do beside what the proxy does.

    Attributes:
        app_name: of the lane's clients.
        where: the method that the record is at.
        kill: ends the process.
        pause: stops the process for some seconds.
        cancel: cancels the task.
    """

    app_name: str
    where: Callable[[], str] = lambda: ""
    kill: Callable[[], object] = lambda: None
    pause: Callable[[float], object] = lambda _: None
    cancel: Callable[[], object] = lambda: None


@dataclass
class _Running:
    """One delivery."""

    app_name: str
    faults: Sequence[Fault]
    actors: Actors
    seen: int = 0
    late_until: float = 0.0
    observed: Observed = field(default_factory=Counter)
    armed: tuple[Fault, str] | None = None  # the error that the server is told to make, and the method where it began


class Script:
    """Decide what befalls each command of the lanes that go through some proxies.

    Args:
        failures: of the server.

    Attributes:
        proxies: that it is in force at.
        disasters: what can happen to servers; each says whether it does.
    """

    def __init__(self, failures: Failures) -> None:
        self.proxies: list[Proxy] = []
        self.disasters: dict[str, Callable[[], bool]] = {}
        self._failures = failures
        self._lock = threading.Lock()
        self._running: dict[bytes, list[_Running]] = {}
        self._owner_of: dict[bytes, bytes] = {}
        self._hold = Hold(failures.admin)

    @contextmanager
    def reserved(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Have the server's errors for a delivery that needs them."""
        if not any(KINDS[fault.kind].is_error for fault in faults):
            yield
            return
        with self._failures.lock:
            self._failures.stop()
            yield

    def begin(self, owner: str, faults: Sequence[Fault], actors: Actors) -> None:
        """Let faults befall a record's commands from now on; where two lanes share proxies, those of the first."""
        with self._lock:
            self._running.setdefault(owner.encode(), []).append(_Running(actors.app_name, faults, actors))

    def end(self, owner: str, app_name: str) -> Observed:
        """End that; return what took place, once all that was late has arrived."""
        with self._lock:
            here = self._running[owner.encode()]
            running = next(found for found in here if found.app_name == app_name)
            here.remove(running)
            if not here:
                del self._running[owner.encode()]
        if any(KINDS[fault.kind].is_error for fault in running.faults):
            self._stop_failures(running)
        if self._hold.release():
            running.observed[GIVEN_UP, running.actors.where()] += 1
        time.sleep(max(0.0, running.late_until - time.monotonic()))
        return running.observed

    def _stop_failures(self, running: _Running) -> None:
        """End the error that the server is told to make, and count how often it took place."""
        fired = self._failures.stop()
        if running.armed is not None:
            fault, where = running.armed
            running.observed[fault.kind, where] += fired

    def __call__(self, command: str, frame: bytes) -> Strike | None:
        """Return what befalls a command."""
        if command in _NOT_THE_RECORDS:
            return None
        with self._lock:
            owner = self._owner(frame)
            if owner not in self._running:
                return None
            running = self._running[owner][0]
            place = running.seen
            running.seen += 1
            for fault in running.faults:
                length = 1 if KINDS[fault.kind].is_error else fault.times
                if fault.kind == "copy held" and fault.place < place <= fault.place + fault.times:
                    return self._strike_behind(fault, place)
                if fault.place <= place < fault.place + length:
                    return self._strike(running, fault, running.actors.where() or command)
        return None

    def _owner(self, frame: bytes) -> bytes | None:
        session = _SESSION.search(frame)
        found = next((match[0] for match in _OWNER.finditer(frame) if match[0] in self._running), None)
        if session is None:
            return found
        if found is not None:
            self._owner_of[session[1]] = found
        return self._owner_of.get(session[1])

    def _disconnect(self) -> None:
        for proxy in self.proxies:
            proxy.disconnect()

    def _strike_behind(self, fault: Fault, place: int) -> Strike:
        """Return what befalls a send behind a held copy: it is cut, the last one waits for the copy's session."""
        if place < fault.place + fault.times:
            return Strike("cut")
        return Strike("notice", 0.0, threading.Timer(_QUEUED, self._hold.release).start)

    def _strike(self, running: _Running, fault: Fault, where: str) -> Strike:
        def take_place() -> None:
            happens = self.disasters.get(fault.kind)
            if not KINDS[fault.kind].is_error and (happens is None or happens()):
                running.observed[fault.kind, where] += 1
            match fault.kind:
                case "request late":
                    running.late_until = max(running.late_until, time.monotonic() + fault.delay + 0.05)
                case "disconnected":
                    self._disconnect()
                case "server error" | "server closes" | "write concern error":
                    self._stop_failures(running)
                    running.armed = fault, where
                    self._failures.start(running.app_name, fault)
                case "task cancelled":
                    running.actors.cancel()
                case "process killed before" | "process killed after":
                    running.actors.kill()
                case "process stopped":
                    running.actors.pause(fault.delay)
                case "copy held":
                    self._hold.start(running.app_name, self._disconnect)

        return Strike(_MODES[fault.kind], fault.delay if _MODES[fault.kind] != "notice" else 0.0, take_place)
