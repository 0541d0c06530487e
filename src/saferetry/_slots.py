"""Slots: the server sessions in which the transactions of records run, the same in every process.

A record's slot follows from its identity, so that a new execution of it, here or elsewhere, starts its transaction on the same
session with a higher number: the server then aborts what a dead or stalled execution left open, and refuses its next
statement. Slots are bounded, since the server keeps every session it has seen for half an hour.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import threading
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from bson.binary import UUID_SUBTYPE, Binary
from bson.int64 import Int64

from saferetry._addresses import Address
from saferetry._identity import RecordKey

# All processes of all releases must agree on these.
_NAMESPACE = bytes.fromhex("6d2f0c526b0f5a3c9a551f5f6a0e7c11")
_SCHEME = 1
_POSITIONS = 256
_HASHED = 65_536

Turn = Future[None]


def slot_of(key: RecordKey, name: str, marker_database: str) -> bytes:
    """Return the session id (a UUID's bytes) in which a record's transactions run."""
    if key.position is not None:
        place = (key.stream, key.partition, key.position % _POSITIONS)
        return _session_id(marker_database, name, key.group, key.epoch, *place)
    digest = hashlib.sha256(repr((name, key.group, key.epoch, key.stream, key.partition)).encode()).digest()
    return _session_id(marker_database, int.from_bytes(digest[:8], "big") % _HASHED)


@functools.lru_cache(4 * _POSITIONS, typed=True)  # as repr, it tells an enumeration from its value
def _session_id(*parts: object) -> bytes:
    identity = (_SCHEME, *parts)
    hashed = bytearray(hashlib.sha1(_NAMESPACE + repr(identity).encode(), usedforsecurity=False).digest()[:16])
    hashed[6], hashed[8] = hashed[6] & 0x0F | 0x50, hashed[8] & 0x3F | 0x80  # as uuid.uuid5 marks it
    return bytes(hashed)


@dataclass(slots=True)
class _Slot:
    last_number: int = 0
    holders: list[Hashable] = field(default_factory=list)
    line: list[tuple[Hashable, Turn]] = field(default_factory=list)
    session_id: Mapping[str, Any] | None = None

    def hand_over(self) -> None:
        """Let the first in line have the slot if it is free, and whoever has the same key."""
        if self.holders:
            return
        line, self.line = self.line, []
        for key, turn in line:
            if self.holders and self.holders[0] != key:
                self.line.append((key, turn))
            elif turn.set_running_or_notify_cancel():
                self.holders.append(key)
                turn.set_result(None)


class Slots:
    """Know which slots this process uses, and their last numbers; thread-safe, and empty after a fork."""

    def __init__(self) -> None:
        self.start_anew()
        _ALL.add(self)

    def __deepcopy__(self, memo: object) -> Slots:
        """Return new ones: what a copied client does has its own numbers."""
        return Slots()

    def start_anew(self) -> None:
        """Know of no slot: a lock that another thread held when this process was forked would be taken for ever."""
        self._lock = threading.Lock()
        self._slots: dict[bytes, _Slot] = {}
        self._all_are_taken = False

    def take(self, slot: bytes, key: Hashable) -> Turn | None:
        """Take a slot that is free or taken for the same key (None); another key stands in line.

        Returns:
            The turn of one that stands in line: done when the slot is taken for it, which it is unless ``cancel()`` says True.
        """
        with self._lock:
            taken = self._slots.get(slot)
            if taken is None:
                taken = self._slots[slot] = _Slot()
            if not self._all_are_taken and (not taken.holders or taken.holders[0] == key):  # all of them have the same one
                taken.holders.append(key)
                return None
            turn = Turn()
            taken.line.append((key, turn))
            return turn

    def give_back(self, slot: bytes, key: Hashable) -> None:
        """Give back what was taken once."""
        with self._lock:
            taken = self._slots.get(slot)
            if taken is not None and key in taken.holders:  # else it was taken before a fork
                taken.holders.remove(key)
                if taken.line:
                    taken.hand_over()

    def try_take_all(self) -> bool:
        """Take all slots, unless one is in use, so that no record of this process begins until they are given back."""
        with self._lock:
            if self._all_are_taken or any(slot.holders for slot in self._slots.values()):
                return False
            self._all_are_taken = True
            return True

    def give_all_back(self) -> None:
        """Let records begin again."""
        with self._lock:
            self._all_are_taken = False
            for slot in self._slots.values():
                slot.hand_over()

    def address(self, slot: bytes, now: float, newer: int = 0) -> Address:
        """Return the slot with a number above all known ones.

        Args:
            slot: A slot that was taken.
            now: Seconds since 1970; the clocks of several processes make the numbers rise.
            newer: A number that the server said was newer.
        """
        with self._lock:
            taken = self._slots.get(slot) or self._slots.setdefault(slot, _Slot())  # a process forked meanwhile has none
            taken.last_number = max(int(now * 1_000_000), taken.last_number + 1, newer + 1)
            if taken.session_id is None:
                taken.session_id = {"id": Binary(slot, UUID_SUBTYPE)}
            return Address(taken.session_id, Int64(taken.last_number))


_ALL: WeakSet[Slots] = WeakSet()


def _start_anew() -> None:
    for slots in list(_ALL):
        slots.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def stand_in_line(turn: Turn, seconds: float) -> None:
    """Wait until a slot is taken.

    Raises:
        TimeoutError: It is not in time.
    """
    turn.result(seconds)


async def stand_in_line_async(turn: Turn, seconds: float) -> None:
    """Wait until a slot is taken.

    Raises:
        TimeoutError: It is not in time.
    """
    async with asyncio.timeout(seconds):
        await asyncio.wrap_future(turn)
