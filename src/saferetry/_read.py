"""One read call of the user's inside a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tenacity import RetryCallState, retry_if_exception

from saferetry._decisions import tell
from saferetry._outcomes import read
from saferetry._policy import FullJitter, enough_time, is_passing
from saferetry._record import Record
from saferetry._seam import DriverCall, Guard, csot_remaining


@dataclass(frozen=True)
class ReadCall:
    """Be a read whose first command may be sent again.

    Attributes:
        record: The current record.
        client: Its client.
        guard: The client's guard.
        invoke: Makes the driver call.
        subject: Says what is read, for the log.
    """

    record: Record
    client: Any
    guard: Guard
    invoke: Callable[[], Any]
    subject: Callable[[], str]

    def controls(self) -> dict[str, Any]:
        """Return tenacity's rules."""
        return {
            "retry": retry_if_exception(lambda exc: is_passing(read(exc))),
            "stop": self._must_stop,
            "wait": FullJitter(self.guard.settings, self.guard.rng),
            "before_sleep": lambda state: tell("resent", self.subject(), wait=state.upcoming_sleep),
            "reraise": True,
        }

    def _must_stop(self, state: RetryCallState) -> bool:
        fits = enough_time(min(self.record.remaining(), csot_remaining()), state.upcoming_sleep, self.record.longest_call)
        return state.attempt_number >= self.guard.settings.max_attempts or not fits

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Announce one driver call."""
        started = self.record.clock()
        try:
            with DriverCall(self.client, is_write=False):
                yield
        finally:
            self.record.longest_call = max(self.record.longest_call, self.record.clock() - started)
