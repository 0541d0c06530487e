"""One record: its scope, its budget, and what it has written."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

from saferetry import _world
from saferetry._budget import Budget
from saferetry._identity import DerivedIds, RecordKey
from saferetry._losses import LOSSES
from saferetry._outcomes import Outcome, WriteView
from saferetry._seam import PAST_METHODS, REMEDY, SCOPE, Anchor, scope_here
from saferetry._settings import Settings
from saferetry.errors import ConfigurationError, PartitionLostError, UnprotectedWriteError, UnsettledWriteError

logger = logging.getLogger("saferetry")

P = ParamSpec("P")
R = TypeVar("R")


class Write(Protocol):
    """Say what a record keeps of one write call."""

    repeatable: bool

    @property
    def is_foreign(self) -> bool:
        """Whether it was made with a session of the user's, whose transaction decides."""

    @property
    def outcome(self) -> Outcome:
        """What became of it."""

    def view(self) -> WriteView:
        """Return what the user may see of it."""

    def orphan(self) -> tuple[Any, Any] | None:
        """Return client and address of what the server may be at work on for it just now, or None."""


class Record:
    """Be one execution of one record: the scope in which calls are protected.

    Attributes:
        key: The record's key, None where it has none.
        execution: Number of this execution, the first is 1.
        name: Name of the handler, or what ``record(name=...)`` said.
        budget: Time left for the record, all executions together.
        skipped: Whether another execution had done it, so that the handler need not run.
        ended: Whether the execution is over; a write in it is then refused.
    """

    skipped = False
    ended = False
    tag: Mapping[str, Any] | None = None
    longest_call = 0.0  # seconds
    derived_ids: DerivedIds | None = None
    transaction: Any = None  # the execution whose transaction its operations join
    unknown_call: Any = None  # the last write call, if it ended UNKNOWN: an equal next one is its repetition
    _effect = ""
    _was_refused = False
    _outer: Record | None = None

    def __init__(
        self,
        key: RecordKey | None,
        *,
        budget: Budget,
        settings: Settings,
        name: str = "",
        execution: int = 1,
        losses: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.key = key
        self.name = name
        self.execution = execution
        self.settings = settings
        self.clock = clock or _world.monotonic
        if settings.tag and key is not None:
            self.tag = {"saferetry": {"record": key.hashed(), "execution": execution}}
        self._budget = budget
        self._writes: list[Write] = []
        self._losses = LOSSES.count(key) if losses is None else losses  # of its partition, before its first execution
        self._anchor = Anchor(self)

    @property
    def writes(self) -> tuple[WriteView, ...]:
        """The write calls of this execution, oldest first."""
        return tuple(write.view() for write in self._writes)

    @property
    def budget(self) -> Budget:
        """Time left for the record."""
        return self._budget

    def remaining(self) -> float:
        """Return the seconds left in the budget."""
        return self._budget.remaining()

    @property
    def is_lost(self) -> bool:
        """Whether its partition, or that of a record around it, was taken away meanwhile."""
        return any(LOSSES.count(record.key) != record._losses for record in self.lineage())

    def check_held(self) -> None:
        """Refuse to write on after the partition was taken away.

        Raises:
            PartitionLostError: It was; nothing was sent.
        """
        if LOSSES.counts and self.is_lost:
            for record in self.lineage():
                record._was_refused = True
            raise self._loss()

    def _loss(self) -> PartitionLostError:
        return PartitionLostError(
            f"the partition of record {self.label()} was taken away: nothing more is sent for it; do not commit its offset, "
            "the partition's next consumer gets it"
        )

    def orphans(self) -> list[tuple[Any, Any]]:
        """Return client and address of everything that the server may be at work on for it just now."""
        return [orphan for write in list(self._writes) if (orphan := write.orphan()) is not None]

    def add(self, write: Write) -> None:
        """Take note of a write call."""
        self._writes.append(write)

    def note_effect(self, reason: str) -> None:
        """Take note of something that makes another execution unsafe; the first reason is kept."""
        self._effect = self._effect or reason

    def note_unannounced(self, command_name: str, *, strict: bool = False) -> None:
        """Take note of a write that no guarded method announced.

        Raises:
            ConfigurationError: The record's transaction, beside which it would be sent, would not undo it.
            UnprotectedWriteError: Strict refuses it.
            PartitionLostError: The record's partition was taken away.
        """
        self.check_held()
        if self.transaction is not None:
            raise ConfigurationError(
                f"the command {command_name} {PAST_METHODS}: beside the record's transaction it would be repeated with it. "
                f"{REMEDY}"
            )
        if strict and not is_repeatable():
            raise UnprotectedWriteError(f"the command {command_name} {PAST_METHODS}, which strict refuses. {REMEDY}")
        self.note_effect(f"the command {command_name} was sent past the guarded methods")

    def refuse_unannounced_read(self, command_name: str) -> NoReturn:
        """Refuse a read that no guarded method announced, beside the record's transaction.

        Raises:
            ConfigurationError: It would not see what the transaction wrote.
        """
        raise ConfigurationError(
            f"the command {command_name} {PAST_METHODS}: beside the record's transaction it would not see what that wrote. "
            f"{REMEDY}"
        )

    def effect(self) -> str:
        """Return why another execution could repeat an effect, or an empty text."""
        if self._effect:
            return self._effect
        for write in self._writes:
            if write.outcome.is_effect and not write.repeatable:
                view = write.view()
                return f"{view.method} on {view.namespace} is {view.outcome.value}"
        return ""

    def unsettled(self) -> tuple[WriteView, ...]:
        """Return the writes that may or may not have been applied."""
        if not (unknown := [write for write in self._writes if write.outcome is Outcome.UNKNOWN]):
            return ()
        return tuple(write.view() for write in unknown if not (write.repeatable or write.is_foreign))

    def enter(self) -> Record:
        """Make this record the current one."""
        if (outer := current_record()) is not None:
            self._outer = outer
            self.transaction = self.transaction or outer.transaction
            self._budget = self._budget.within(outer.budget)
        SCOPE.set(self._anchor)
        OPEN_RECORDS.add(self)
        return self

    def leave(self, exc: BaseException | None) -> None:
        """End the record and restore the one around it.

        Raises:
            ConfigurationError: The record is not the current one, so that some record would be left open.
            PartitionLostError: A write was refused for that, and the handler passed it over in silence.
            UnsettledWriteError: Under strict, a write of unknown outcome was passed over in silence.
        """
        self.ended = True
        self.unknown_call = None
        OPEN_RECORDS.remove(self)
        if self._outer is not None and (effect := self.effect()):
            self._outer.note_effect(f"in an inner record, {effect}")
        current = scope_here()
        if current is self or (isinstance(current, Record) and self in current.lineage()):
            SCOPE.set(self._outer._anchor if self._outer is not None else None)
        self._anchor.scope = Ended(self.name, self.key)
        if current is not self:
            raise ConfigurationError(
                f"record {self.label()} ends where it is not the current one: it was entered in another task, thread or "
                "generator, or a record inside it was not closed; use 'with record(...)' around the work itself"
            ) from exc
        if exc is None and self._was_refused:
            raise self._loss()
        if exc is None and self.transaction is None and (open_writes := self.unsettled()):  # else the transaction decides
            self._report(open_writes)

    def lineage(self) -> Iterator[Record]:
        """Yield this record and those around it."""
        record: Record | None = self
        while record is not None:
            yield record
            record = record._outer

    def _report(self, open_writes: tuple[WriteView, ...]) -> None:
        first = open_writes[0]
        message = (
            f"record {self.label()} ended although {len(open_writes)} of its writes may or may not have been applied "
            f"(first: {first.method} on {first.namespace}); let the error leave the handler instead of catching it"
        )
        if self.settings.strict:
            raise UnsettledWriteError(message, writes=open_writes)
        logger.warning(message)

    def label(self) -> str:
        """Return what names this record in messages."""
        return label_of(self.name, self.key)


def label_of(name: str, key: RecordKey | None) -> str:
    """Return what names a record in messages."""
    name = name or "without a name"
    return f"{name} ({key.stream}/{key.partition}/{key.position})" if key else name


class Ended:
    """Stand for a record that has ended, in contexts that outlive it: of the record itself nothing is kept there."""

    ended = True
    tag: Mapping[str, Any] | None = None
    transaction: Any = None

    def __init__(self, name: str, key: RecordKey | None) -> None:
        self._name = name
        self._key = key

    def label(self) -> str:
        """Return what named the record in messages."""
        return label_of(self._name, self._key)

    def remaining(self) -> float:
        """Return 0: its time is over."""
        return 0.0

    def note_unannounced(self, command_name: str, *, strict: bool) -> None:
        """Take no note: nothing is executed again any more."""

    def refuse_unannounced_read(self, command_name: str) -> NoReturn:
        """Refuse a read that no guarded method announced.

        Raises:
            ConfigurationError: It comes after the record's end.
        """
        raise ConfigurationError(f"the command {command_name} comes after the end of the record {self.label()}")


class OpenRecords:
    """Know the open records of this process by thread, to notice writes made outside them meanwhile.

    A thread started inside a record does not inherit it (a context variable), so that its writes would go unprotected and
    unseen; the only way to notice is to ask, at such a write, whether a record of another thread is open.
    """

    def __init__(self) -> None:
        self._threads: dict[Record, int] = {}  # each use of it is one step, in which no other thread comes between
        if hasattr(os, "register_at_fork"):  # a child has none of the other threads
            os.register_at_fork(after_in_child=self.start_anew)

    def start_anew(self) -> None:
        """Know of no record; those of the process that this one was forked from are not for this one to go on with."""
        for inherited in self._threads:
            inherited.ended = True
        self._threads = {}

    def add(self, record: Record) -> None:
        """Take note of a record that is opened in this thread."""
        self._threads[record] = threading.get_ident()

    def remove(self, record: Record) -> None:
        """Forget a record that ended."""
        self._threads.pop(record, None)

    def of_partition(self, stream: str, partition: int, group: str) -> list[Record]:
        """Return the open records of a partition, and those inside them."""

        def is_of_it(key: RecordKey | None) -> bool:
            return key is not None and (key.stream, key.partition, key.group) == (stream, partition, group)

        return [record for record in self._threads.copy() if any(is_of_it(around.key) for around in record.lineage())]

    def elsewhere(self) -> list[Record]:
        """Return the open records of other threads."""
        if not self._threads:
            return []
        here = threading.get_ident()
        return [record for record, thread in self._threads.copy().items() if thread != here]


OPEN_RECORDS = OpenRecords()  # of the process: threads share nothing else


def current_record() -> Record | None:
    """Return the record that is being worked on here, or None outside any."""
    scope = scope_here()
    return scope if isinstance(scope, Record) and not scope.ended else None


class record:  # noqa: N801 - used as a function
    """Open a record around some work (guarantee "process"): ``with record(key):`` or ``async with record(key):``.

    Args:
        key: A ``RecordKey``, a text, ``(stream, partition, position)``, or None.
        budget: Seconds, or a ``Budget``; else ``SAFERETRY_BUDGET_MS``.
        name: Names the record in messages.

    Example:
        >>> with record(("orders", 0, 17)) as current:
        ...     current.execution
        1

    Raises:
        ConfigurationError: A wrong key or budget.
    """

    def __init__(
        self,
        key: RecordKey | str | tuple[Any, ...] | None = None,
        *,
        budget: float | Budget | None = None,
        name: str = "",
    ) -> None:
        settings = Settings.from_env()
        if not isinstance(budget, Budget):
            budget = Budget(settings.budget_ms / 1000 if budget is None else budget)
        self._is_entered = False
        self._record = Record(None if key is None else RecordKey.of(key), budget=budget, settings=settings, name=name)

    def __enter__(self) -> Record:
        """Make the record the current one."""
        if self._is_entered:
            raise ConfigurationError("a record can be entered once: call record(...) again for another one")
        self._is_entered = True
        return self._record.enter()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        """End the record."""
        self._record.leave(exc)

    async def __aenter__(self) -> Record:
        """Make the record the current one."""
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        """End the record."""
        self.__exit__(kind, exc, trace)


REPEATABLE: ContextVar[bool] = ContextVar("saferetry_repeatable", default=False)


@contextmanager
def repeatable() -> Iterator[None]:
    """Say that the writes made inside may run more than once, as ``$set`` to fixed values may.

    Inside a record they are sent again although their outcome is unknown, and do not stand against another execution.

    Example:
        >>> with repeatable():
        ...     pass
    """
    token = REPEATABLE.set(True)
    try:
        yield
    finally:
        REPEATABLE.reset(token)


def is_repeatable() -> bool:
    """Whether the user said so with ``repeatable()``."""
    return REPEATABLE.get()


def propagate(fn: Callable[P, R]) -> Callable[P, R]:
    """Return ``fn`` bound to the current record, to be called in another thread.

    Args:
        fn: A function or coroutine function.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with ThreadPoolExecutor() as pool, record("job-1"):
        ...     list(pool.map(propagate(abs), [-1, 2]))
        [1, 2]
    """
    scope, is_declared = SCOPE.get(), REPEATABLE.get()

    @contextmanager
    def bound() -> Iterator[None]:
        tokens = SCOPE.set(scope), REPEATABLE.set(is_declared)
        try:
            yield
        finally:
            SCOPE.reset(tokens[0])
            REPEATABLE.reset(tokens[1])

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            with bound():
                return await fn(*args, **kwargs)

        return cast("Callable[P, R]", run_async)

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with bound():
            return fn(*args, **kwargs)

    return run
