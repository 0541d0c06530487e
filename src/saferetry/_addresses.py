"""Addresses of commands: a session id of our own and a transaction number, used for one command only.

The server remembers ``(lsid, txnNumber, stmtId)`` of what it applied and answers a second send from memory
(https://github.com/mongodb/specifications, retryable writes). A session id may be used again with the next number once its
last command is settled; one whose command is not settled is never used again.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bson.binary import UUID_SUBTYPE, Binary
from bson.int64 import Int64

MOST_IDLE = 1_000
ALWAYS_KNOWN = 10.0  # seconds: no server forgets a session sooner
LONGEST_IDLE = 15 * 60.0  # seconds: half of localLogicalSessionTimeoutMinutes' default


@dataclass(slots=True, eq=False)
class Address:
    """Where the server remembers one command."""

    session_id: Mapping[str, Any]
    number: Int64
    process: int = field(default_factory=os.getpid)  # two processes must never share a session


class AddressPool:
    """Hand out addresses; thread-safe, and empty after a fork."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._idle: deque[tuple[float, Address]] = deque(maxlen=MOST_IDLE)
        self.discarded = 0

    def __deepcopy__(self, memo: object) -> AddressPool:
        """Return an empty one: two clients with one address would answer for each other's writes."""
        return AddressPool(self._clock)

    def acquire(self, longest_idle: Callable[..., float] = lambda: LONGEST_IDLE, *of: Any) -> Address:
        """Return an address that no other command uses or has used.

        Args:
            longest_idle: Returns the seconds after which the server may have forgotten a session that nobody uses.
            *of: Its arguments.
        """
        try:
            released, address = self._idle.pop()
        except IndexError:
            return Address({"id": Binary(uuid.uuid4().bytes, UUID_SUBTYPE)}, Int64(1))
        # The newest is on the right: where that one will not do, the others will not either.
        idle = self._clock() - released
        is_too_old = idle > ALWAYS_KNOWN and idle > longest_idle(*of)
        if is_too_old or address.process != os.getpid():
            self._idle.clear()
            return self.acquire(longest_idle, *of)
        return Address(address.session_id, Int64(address.number + 1), address.process)

    def release(self, address: Address) -> None:
        """Take back the address of a settled command."""
        if address.process == os.getpid():
            self._idle.append((self._clock(), address))

    def discard(self, address: Address) -> None:
        """Drop an address for good, since its command is not settled."""
        del address
        self.discarded += 1
