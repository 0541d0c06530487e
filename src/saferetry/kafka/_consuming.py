"""The handling of a consumer's records: what is decided between polls. No I/O here; the caller locks.

``_run`` and ``_arun`` are the loops around it, for threads and for asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from saferetry._handler import guarantee_of
from saferetry._handling import Exceptions
from saferetry._identity import RecordKey
from saferetry._record import Record
from saferetry._settings import Settings
from saferetry.errors import ConfigurationError, PartitionLostError
from saferetry.kafka._ledger import Ledger, Partition, Place
from saferetry.kafka._message import Message
from saferetry.kafka._poll_budget import PollBudget
from saferetry.kafka._verdict import RecordVerdict, verdict_on

logger = logging.getLogger("saferetry")

POLL = 0.1  # seconds that one poll waits for a message
FROZEN = 3.0  # seconds that a poll may take too long before the process passes for one that stood still
LAST_SECONDS = 2.0  # for a record that was told to end
MOST_DOUBLINGS = 16
_STARVED = 1.0  # seconds
_ENOUGH, _TOO_MUCH = 2, 4  # polls' worth of messages that wait: all together, and of one partition


@dataclass(frozen=True)
class Terms:
    """Hold what ``run`` was given.

    Attributes:
        topics: What is subscribed to.
        group: The consumer group.
        budget: Makes each record's budget.
        put_off_on: Exceptions that the user expects to pass.
        commit_records: Records done after which offsets are committed.
        commit_seconds: Seconds after which they are.
        max_records: Messages that one poll returns at most.
        stop_seconds: What the record in work may take when the consumer is to stop; None: its budget.
        report_seconds: Seconds between two reports.
    """

    topics: tuple[str, ...]
    group: str
    budget: PollBudget
    put_off_on: Exceptions
    commit_records: int
    commit_seconds: float
    max_records: int
    stop_seconds: float | None
    report_seconds: float

    def __post_init__(self) -> None:
        """Check every part."""
        faults = []
        if not self.topics or not all(isinstance(topic, str) and topic for topic in self.topics):
            faults.append("topics must name one or more topics")
        if not isinstance(self.group, str):
            faults.append("group must be text")
        for name in ("commit_records", "max_records"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                faults.append(f"{name} must be a whole number above 0")
        for name in ("commit_seconds", "report_seconds", "stop_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                faults.append(f"{name} must be a number of seconds above 0")
        if faults:
            raise ConfigurationError("run: " + "; ".join(faults))


class Consuming:
    """Be the handling of one consumer's records.

    Attributes:
        ledger: Its partitions and their records.
        failure: What ended it, if something did.
        is_stopping: No further record begins.
        has_given_up: The record in work was told that it is lost, and did not end.
    """

    def __init__(
        self, terms: Terms, handler: Callable[[Any], Any], clock: Callable[[], float], *, is_async: bool = False
    ) -> None:
        if not callable(handler):
            raise ConfigurationError(f"run: the handler is a {type(handler).__name__}, which cannot be called")
        is_coroutine = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - of an instance
        if is_coroutine is not is_async:
            raise ConfigurationError("run: use run with a plain function as handler, arun with a coroutine function")
        self.terms = terms
        self.ledger = Ledger()
        self.failure: BaseException | None = None
        self.is_stopping = False
        self.has_given_up = False
        self._clock = clock
        self._settings = Settings.from_env()
        self._rng = random.Random(self._settings.seed)  # noqa: S311 - jitter, no secret
        self._is_transaction = guarantee_of(handler) == "transaction"
        self._paused: set[Place] = set()
        self._fresh: set[Place] = set()  # newly assigned; the library may remember that they were paused before
        self._favoured: set[Place] = set()
        self._starving_since: float | None = None
        self._in_work: Record | None = None
        self._uncommitted = 0
        self._committed_at = self._reported_at = clock()
        self._no_commit_before = 0.0
        self._polled_at = clock()

    # records

    def take(self) -> tuple[Partition, Message] | None:
        """Begin with a record, if there is one."""
        return None if self.is_stopping else self.ledger.take(self._clock())

    def record_of(self, message: Message) -> Record:
        """Return the scope of a record, whose budget begins now."""
        self.terms.budget.start(1)
        key = RecordKey(message.topic, message.partition, message.offset, group=self.terms.group)
        self._in_work = Record(key, budget=self.terms.budget(message), settings=self._settings, name="consumed")
        return self._in_work

    @staticmethod
    def check_result(result: Any) -> None:
        """Refuse a result that is work still to be done.

        Raises:
            ConfigurationError: It is.
        """
        if inspect.isgenerator(result) or inspect.isasyncgen(result) or inspect.isawaitable(result):
            raise ConfigurationError(
                f"run: the handler returned a {type(result).__name__}, whose work would run after its record has ended"
            )

    def settle(self, partition: Partition, message: Message, record: Record, exc: BaseException | None) -> None:
        """Take in how a record ended."""
        self._in_work = None
        effect = "" if self._is_transaction else record.effect()
        is_told = isinstance(exc, (PartitionLostError, asyncio.CancelledError)) and (partition.is_leaving or self.is_stopping)
        if is_told or (partition.is_gone and not isinstance(exc, (KeyboardInterrupt, SystemExit))):
            self.ledger.give_up()  # another consumer handles it
            self._log("given up", message, exc)
            return
        match verdict_on(exc, put_off_on=self.terms.put_off_on, effect=effect):
            case RecordVerdict.DONE:
                self.ledger.done(partition, message)
                self._uncommitted += 1
            case RecordVerdict.PUT_OFF:
                wait = self._wait_after(partition.failures)
                self.ledger.put_off(partition, message, self._clock() + wait)
                self._log(f"put off for {wait:.3f} s", message, exc, level=logging.WARNING)
            case RecordVerdict.STOP:
                self.ledger.give_up()
                self._log("not done, the consumer stops", message, exc, level=logging.ERROR)
                self._stop_with(exc, effect)

    def _stop_with(self, exc: BaseException | None, effect: str) -> None:
        if effect and exc is not None:
            exc.add_note(f'saferetry: the record is not handled again here, since {effect}: use guarantee "transaction"')
        assert exc is not None  # noqa: S101 - only an error stops a consumer
        self.fail(exc)

    def _wait_after(self, failures: int) -> float:
        limit = self._settings.backoff_base_ms * 2 ** min(failures, MOST_DOUBLINGS)
        return self._rng.uniform(0, min(self._settings.backoff_cap_ms, limit) / 1000)

    def _log(self, what: str, message: Message, exc: BaseException | None, level: int = logging.INFO) -> None:
        name = type(exc).__name__ if exc is not None else None
        logger.log(
            level,
            "record %s/%d/%d %s%s", message.topic, message.partition, message.offset, what, f": {name}" if name else "",
            extra={
                "saferetry": {
                    "event": "record",
                    "what": what,
                    "topic": message.topic,
                    "partition": message.partition,
                    "offset": message.offset,
                    "exception": name,
                }
            },
        )  # fmt: skip

    def patience(self) -> float:
        """Return the seconds that the record in work may still take when its partition, or the consumer, is to go."""
        left = self._in_work.remaining() if self._in_work is not None and not self.has_given_up else 0.0
        limit = self.terms.stop_seconds if self.is_stopping else None
        return left if limit is None else min(left, limit)

    def fail(self, exc: BaseException) -> None:
        """Let an error end everything."""
        self.failure = self.failure or exc
        self.is_stopping = True

    # polls

    def assigned(self, places: Iterable[Place]) -> None:
        """Take in partitions that were assigned."""
        self.ledger.assign(places)
        self._favoured.difference_update(places)
        self._paused.difference_update(places)
        self._fresh.update(places)

    def took(self, messages: Iterable[Message]) -> bool:
        """Take in what a poll returned; whether there is something to begin with."""
        now = self._clock()
        if now - self._polled_at > POLL + FROZEN:  # the partitions may be somebody else's, who has gone on
            self._no_commit_before = now + FROZEN
        self._polled_at = now
        added = [message.place for message in messages if self.ledger.add(message)]
        self._favoured.difference_update(added)
        return bool(added)

    def is_full(self) -> bool:
        """Whether more was polled than is soon handled."""
        return self.ledger.backlog(self._clock()) >= _ENOUGH * self.terms.max_records

    def appetite(self, seconds: float) -> tuple[int, float]:
        """Return how many messages the next poll may return, and how long it may wait for one.

        Where there is enough: one that is there, since polls have to go on, and no library has one that returns nothing.
        """
        return (1, 0.0) if self.is_full() else (self.terms.max_records, seconds)

    def pauses(self) -> tuple[set[Place], set[Place]]:
        """Return the partitions to pause and those to resume before the next poll.

        Libraries drop what they have fetched of a partition that is paused, so that is left for what takes long.
        """
        everything, most = self.ledger.partitions, self.terms.max_records
        wanted = set(everything) if self.is_stopping else self.ledger.put_off_at(self._clock())
        is_time_for_others = self._is_time_for_others(wanted)
        for place, partition in everything.items():
            waiting = len(partition.waiting)
            is_too_much = waiting >= _TOO_MUCH * most or (is_time_for_others and waiting >= most)
            if is_too_much or (place in self._paused and waiting > most // 2):
                wanted.add(place)
        to_pause, to_resume = wanted - self._paused, ((self._paused | self._fresh) & everything.keys()) - wanted
        self._paused, self._fresh = wanted, set()
        return to_pause, to_resume

    def _is_time_for_others(self, held_up: set[Place]) -> bool:
        """Whether partitions had nothing for a second while others have much: libraries hand one out to its end first.

        Once for each, until a message of it comes: it may have none.
        """
        partitions = self.ledger.partitions.items()
        starving = {place for place, partition in partitions if not partition.waiting} - held_up - self._favoured
        has_much = any(len(partition.waiting) >= self.terms.max_records for _, partition in partitions)
        if not (starving and has_much):
            self._starving_since = None
            return False
        now = self._clock()
        if self._starving_since is None:
            self._starving_since = now
        if now - self._starving_since < _STARVED:
            return False
        self._favoured |= starving
        self._starving_since = None
        return True

    # offsets

    def due_offsets(self) -> dict[Place, int]:
        """Return the offsets that are to be committed now."""
        now = self._clock()
        is_due = self._uncommitted >= self.terms.commit_records or now - self._committed_at >= self.terms.commit_seconds
        return self.ledger.to_commit() if is_due and now >= self._no_commit_before else {}

    def committed(self, offsets: Mapping[Place, int], error: Exception | None = None) -> None:
        """Take in how a commit ended."""
        self._committed_at = self._clock()
        if error is None:
            self.ledger.committed(offsets)
            self._uncommitted = 0
        else:  # the records are done all the same, and may come again
            name = _name_of(error)
            logger.warning(
                "offsets of %d partitions were not committed: %s", len(offsets), name,
                extra={"saferetry": {"event": "commit", "exception": name}},
            )  # fmt: skip

    # reports

    def is_report_due(self) -> bool:
        """Whether progress is to be reported."""
        return self._clock() - self._reported_at >= self.terms.report_seconds

    def report(self, highwater: Callable[[Place], int | None]) -> None:
        """Log progress and lag; the highwater is the offset after a partition's last message, as far as is known."""
        self._reported_at = self._clock()
        partitions = []
        for place, partition in self.ledger.partitions.items():
            try:
                high = highwater(place)
            except Exception:  # noqa: BLE001 - a library that does not know must not keep the consumer from leaving its group
                high = None
            lag = high - partition.position if high is not None and partition.position is not None else None
            partitions.append(
                {
                    "topic": place[0],
                    "partition": place[1],
                    "done": partition.done,
                    "position": partition.position,
                    "committed": partition.committed,
                    "lag": lag,
                    "waiting": len(partition.waiting),
                    "put_off": partition.failures,
                }
            )
        done = sum(partition.done for partition in self.ledger.partitions.values())
        logger.info(
            "consumer of group %s: %d partitions, %d records done", self.terms.group or "-", len(partitions), done,
            extra={"saferetry": {"event": "progress", "group": self.terms.group, "partitions": partitions}},
        )  # fmt: skip


def _name_of(error: Exception) -> str:
    """Return the error's class, and the code that confluent-kafka's carries."""
    code = getattr(error.args[0], "name", None) if error.args else None
    return f"{type(error).__name__} {code()}" if callable(code) else type(error).__name__


@contextlib.contextmanager
def record_entered(record: Record) -> Iterator[None]:
    """Be in a record."""
    record.enter()
    try:
        yield
    except BaseException as exc:
        record.leave(exc)
        raise
    else:
        record.leave(None)
