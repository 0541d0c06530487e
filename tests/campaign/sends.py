"""What the clients of a lane sent, record by record and address by address, as the driver's own events tell."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

_WRITES = frozenset({"insert", "update", "delete", "findAndModify"})
Address = tuple[str, bytes, int, int]  # command, lsid, txnNumber, stmtId
_NO_NUMBER = -1


class Sends(CommandListener):
    """Count the sends of writes by the record that their comment names; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sends: dict[str, Counter[Address]] = {}

    def take(self, record: str) -> Counter[Address]:
        """Return the sends of a record so far, by address, and forget them."""
        with self._lock:
            return self._sends.pop(record, Counter())

    def started(self, event: CommandStartedEvent) -> None:
        """Count a send; called by the driver."""
        if event.command_name not in _WRITES:
            return
        command: Any = event.command
        comment = command.get("comment")
        if not isinstance(comment, dict) or "saferetry" not in comment:
            return
        number = command.get("txnNumber", _NO_NUMBER)
        session = command.get("lsid", {}).get("id", b"")  # a member that has just started takes none
        address = (event.command_name, bytes(session), number, command.get("stmtId", 0))
        with self._lock:
            self._sends.setdefault(comment["saferetry"]["record"], Counter())[address] += 1

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Nothing to count."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Nothing to count."""
