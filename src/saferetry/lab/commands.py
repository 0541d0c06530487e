"""A listener that remembers every command a client sends."""

from __future__ import annotations

import threading
from typing import Any

from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent


class CommandLog(CommandListener):
    """Remember what a client sends and what comes back, in order. Thread-safe.

    Give it to a client as `event_listeners=[log]`. Each command_started event is one send: the driver's own resends
    are events too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[CommandStartedEvent] = []
        self._succeeded: list[CommandSucceededEvent] = []
        self._failed: list[CommandFailedEvent] = []

    @property
    def started_events(self) -> list[CommandStartedEvent]:
        """A copy of the command_started events so far."""
        with self._lock:
            return list(self._started)

    @property
    def succeeded_events(self) -> list[CommandSucceededEvent]:
        """A copy of the command_succeeded events so far; an error in the reply's writeErrors is one of these."""
        with self._lock:
            return list(self._succeeded)

    @property
    def failed_events(self) -> list[CommandFailedEvent]:
        """A copy of the command_failed events so far."""
        with self._lock:
            return list(self._failed)

    def sends(self, *names: str) -> int:
        """Count the sends of commands with these names, e.g. `sends("insert")`; without a name all sends."""
        return len(self.commands(*names))

    def commands(self, *names: str) -> list[dict[str, Any]]:
        """Return the command documents sent, in order, of commands with these names; without a name all."""
        return [dict(event.command) for event in self.started_events if not names or event.command_name in names]

    def names(self) -> list[str]:
        """Return the names of the commands sent, in order."""
        return [event.command_name for event in self.started_events]

    def clear(self) -> None:
        """Forget everything so far."""
        with self._lock:
            self._started.clear()
            self._succeeded.clear()
            self._failed.clear()

    def started(self, event: CommandStartedEvent) -> None:
        """Remember the event; called by the driver."""
        with self._lock:
            self._started.append(event)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Remember the event; called by the driver."""
        with self._lock:
            self._succeeded.append(event)

    def failed(self, event: CommandFailedEvent) -> None:
        """Remember the event; called by the driver."""
        with self._lock:
            self._failed.append(event)
