"""What was polled, what is done and what may be committed, partition by partition. No I/O, no clock, no lock here.

The records of a partition are handled one after another in their order, and one that is not done is handled again before
those after it. So what is done has no gaps, and the offset after the last record done is the one to commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from saferetry.kafka._message import Message

Place = tuple[str, int]


@dataclass(eq=False)
class Partition:
    """Be one assignment of a partition to this consumer; a new one begins when it is assigned again.

    Attributes:
        place: Topic and partition.
        waiting: Messages that were polled and are not done, in their order, but for the one in work.
        position: The offset after the last record done, which may be committed; None: nothing is done yet.
        committed: The offset that was committed.
        not_before: When its first record may be handled again.
        failures: How often in a row its first record was put off.
        done: How many records of it are done.
        is_leaving: It is being taken away: no further record of it begins.
        is_gone: It was taken away: nothing of it is committed.
    """

    place: Place
    waiting: deque[Message] = field(default_factory=deque)
    position: int | None = None
    committed: int | None = None
    not_before: float = 0.0
    failures: int = 0
    done: int = 0
    is_leaving: bool = False
    is_gone: bool = False
    newest: int = -1


class Ledger:
    """Know the partitions that are assigned, and their records."""

    def __init__(self) -> None:
        self._partitions: dict[Place, Partition] = {}
        self._in_work: tuple[Partition, Message] | None = None

    # partitions

    @property
    def partitions(self) -> Mapping[Place, Partition]:
        """The partitions that are assigned."""
        return self._partitions

    def assign(self, places: Iterable[Place]) -> None:
        """Begin with partitions anew."""
        for place in places:
            self._partitions[place] = Partition(place)

    def leave(self, places: Iterable[Place]) -> None:
        """Begin no further record of partitions; what was polled of them comes again elsewhere."""
        for place in places:
            if (partition := self._partitions.get(place)) is not None:
                partition.is_leaving = True
                partition.waiting.clear()

    def forget(self, places: Iterable[Place]) -> None:
        """Have nothing more to do with partitions: a record of them that is still in work counts for nothing."""
        for place in places:
            if (partition := self._partitions.pop(place, None)) is not None:
                partition.is_gone = True

    # records

    def add(self, message: Message) -> bool:
        """Take a message in that was polled; one that is not ours, or was seen, is passed over."""
        partition = self._partitions.get(message.place)
        if partition is None or partition.is_leaving or message.offset <= partition.newest:
            return False
        partition.newest = message.offset
        partition.waiting.append(message)
        return True

    def take(self, now: float) -> tuple[Partition, Message] | None:
        """Begin with a record, of one partition after another; None: there is none to begin with."""
        for place, partition in self._partitions.items():
            if partition.waiting and partition.not_before <= now and not partition.is_leaving:
                self._partitions[place] = self._partitions.pop(place)  # the others come first next time
                self._in_work = partition, partition.waiting.popleft()
                return self._in_work
        return None

    def done(self, partition: Partition, message: Message) -> None:
        """Take note that the record in work is done."""
        self._in_work = None
        partition.position = message.offset + 1
        partition.failures = 0
        partition.done += 1

    def put_off(self, partition: Partition, message: Message, until: float) -> None:
        """Take note that the record in work is not done, and comes first again, later."""
        self._in_work = None
        if not (partition.is_leaving or partition.is_gone):
            partition.waiting.appendleft(message)
        partition.failures += 1
        partition.not_before = until

    def give_up(self) -> None:
        """Take note that the record in work is not done and is not handled again here."""
        self._in_work = None

    def is_in_work(self, places: Iterable[Place]) -> bool:
        """Whether a record of these partitions is in work."""
        return self._in_work is not None and self._in_work[0].place in set(places)

    def backlog(self, now: float) -> int:
        """Return how many records could begin; those that wait for one that was put off must not hold up the others."""
        held_up = self.put_off_at(now)
        return sum(len(partition.waiting) for place, partition in self._partitions.items() if place not in held_up)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until the first record that was put off is due; None: there is none."""
        waits = [partition.not_before - now for partition in self._partitions.values() if partition.waiting]
        return max(0.0, min(waits)) if waits else None

    def put_off_at(self, now: float) -> set[Place]:
        """Return the partitions that wait for their first record to be due: no more is to be polled of them."""
        return {place for place, partition in self._partitions.items() if partition.failures and partition.not_before > now}

    # offsets

    def to_commit(self, places: Iterable[Place] | None = None) -> dict[Place, int]:
        """Return the offsets that may be committed and are not, of all partitions or some."""
        wanted = self._partitions.keys() if places is None else set(places)
        return {
            place: partition.position
            for place, partition in self._partitions.items()
            if place in wanted and partition.position is not None and partition.position != partition.committed
        }

    def committed(self, offsets: Mapping[Place, int]) -> None:
        """Take note of offsets that were committed."""
        for place, offset in offsets.items():
            if (partition := self._partitions.get(place)) is not None:
                partition.committed = offset
