"""One execution of a record as a transaction: how it stands, what it learned, and the calls that join it."""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pymongo.errors import DuplicateKeyError, PyMongoError

from saferetry._identity import without_moments
from saferetry._losses import LOSSES
from saferetry._outcomes import Outcome, Signal, WriteView, read
from saferetry._plans import Plan
from saferetry._record import Record
from saferetry._seam import OVER, DriverCall, address_of, let_join, namespace_of
from saferetry.errors import ConfigurationError, UnsettledWriteError

# The transaction is not (any more) the newest of its session: another execution may have done the record.
# TransactionTooOld, NoSuchTransaction, ConflictingOperationInProgress for a number that was used before, and Interrupted: who
# takes over kills the statement that still runs.
FENCED_CODES = frozenset({225, 251, 117, 11601})
MOST_ALIKE = 3  # duplicates of one value that are learned from statements which differ


class State(enum.Enum):
    """Say how a transaction stands."""

    WAITING = enum.auto()  # not begun: no client is known yet, it begins with the first operation
    OPEN = enum.auto()
    DONE_BEFORE = enum.auto()  # its marker is there: the handler need not run
    COMMITTED = enum.auto()
    ABORTED = enum.auto()


class DoneBefore(BaseException):
    """Leave a handler at its first operation, since its record is done; never seen outside."""


class Verdict(enum.Enum):
    """Say what follows the end of an execution."""

    COMMIT = enum.auto()
    DONE = enum.auto()
    ASK = enum.auto()  # the marker says whether it is done
    AGAIN = enum.auto()
    FINAL = enum.auto()


@dataclass(frozen=True)
class Lesson:
    """Remember a duplicate that a handler caught: raised again without a send, so that the transaction stays whole.

    Attributes:
        method: The method on its namespace.
        fingerprint: The statement, without the moments of its execution.
        key: The values that were there already.
        error: The driver's error.
    """

    method: tuple[str, str]
    fingerprint: bytes
    key: Mapping[str, Any]
    error: DuplicateKeyError

    def is_about_id(self) -> bool:
        """Whether an ``_id`` was there, which no document can have a second time."""
        return dict((self.error.details or {}).get("keyPattern", {})) == {"_id": 1}


class Execution:
    """Be the transaction of one execution.

    Args:
        client: The client whose operations join; None until the first one, where the handler names none.
        begin: Begins the transaction and inserts the marker; awaited for asyncio.
        lessons: What earlier executions of the record learned; grows.
        in_order: Calls, by method and namespace, that stop at their first error although the handler says ``ordered=False``:
            after one the transaction is gone, and the driver's next command of the same call would hide why.

    Attributes:
        session: The driver's session.
    """

    state = State.WAITING
    session: Any = None
    doomed: BaseException | None = None
    went_on = False  # the handler went on after the error that doomed it
    committing = False
    lesson: Lesson | None = None

    def __init__(
        self, client: Any, begin: Callable[[Execution, Any], Any], lessons: list[Lesson], in_order: set[tuple[str, str]]
    ) -> None:
        self.client = client
        self.begin = begin
        self.lessons = lessons
        self.in_order = in_order
        self._started = time.time()
        self.lock = threading.RLock()

    @functools.cached_property
    def async_lock(self) -> asyncio.Lock:
        """The lock of asyncio's operations."""
        return asyncio.Lock()

    def check(self, client: Any) -> None:
        """Refuse an operation that cannot join.

        Raises:
            ConfigurationError: Another client, or a task or thread left over from an execution that is over.
            BaseException: The error that doomed the execution, again.
        """
        if self.client is not None and self.client is not client:
            raise ConfigurationError(
                "an operation on a second client cannot join the record's transaction, and beside it would be repeated with "
                'it: use one client in a handler with guarantee "transaction"'
            )
        if self.state in (State.COMMITTED, State.ABORTED) or self.committing:
            raise ConfigurationError(OVER)
        if self.state is State.DONE_BEFORE:
            raise DoneBefore
        if self.doomed is not None:
            self.went_on = True
            raise self.doomed

    def doom(self, exc: BaseException, lesson: Lesson | None = None) -> None:
        """Let no operation follow an error after which the transaction is not what the handler believes."""
        if self.doomed is not None or not _dooms(exc):
            return
        self.lesson = lesson
        self._end_with(exc)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Let no operation follow a transaction that could not begin, and the record not pass for one without operations."""
        try:
            yield
        except BaseException as exc:
            if self.doomed is None:
                self._end_with(exc)
            raise

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Let an error of what is sent in the transaction doom it."""
        try:
            with DriverCall(self.client, is_write=False):
                yield
        except BaseException as exc:
            self.doom(exc)
            raise

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Let an error of a cursor doom the transaction, as that of any other operation."""
        self.check(self.client)
        try:
            yield
        except BaseException as exc:
            self.doom(exc)
            raise

    def _end_with(self, exc: BaseException) -> None:
        if isinstance(exc, Exception):
            self.doomed = exc
        else:  # cancelled: raising that again later would look like another cancellation
            self.doomed = UnsettledWriteError(
                "a statement of the record's transaction was interrupted: the transaction cannot go on and is executed again"
            )

    def judge(self, exc: BaseException | None) -> Verdict:
        """Return what follows, after the handler returned (None) or raised."""
        if self.state is State.DONE_BEFORE:
            return Verdict.DONE
        if exc is not None and not isinstance(exc, Exception):
            return Verdict.FINAL
        if self.doomed is None:
            return Verdict.FINAL if exc is not None else Verdict.COMMIT
        return self._judge_doomed(self.doomed, exc)

    def _judge_doomed(self, doomed: BaseException, exc: BaseException | None) -> Verdict:
        if isinstance(doomed, UnsettledWriteError):
            return Verdict.AGAIN
        reading = read(doomed)
        if reading.code in FENCED_CODES:
            return Verdict.ASK
        if is_transient(doomed):
            return Verdict.AGAIN
        was_caught = exc is None or self.went_on
        return Verdict.AGAIN if was_caught and self._learns() else Verdict.FINAL

    def _learns(self) -> bool:
        """Remember the duplicate that the handler caught; whether that is new and helps the next execution."""
        lesson = self.lesson
        if lesson is None:
            return False
        alike = [old for old in self.lessons if old.method == lesson.method]
        if any(old.fingerprint == lesson.fingerprint for old in alike):
            return False
        if sum(old.key == lesson.key for old in alike) >= MOST_ALIKE:  # the statement is another one in each execution
            return False
        self.lessons.append(lesson)
        return True

    def moments(self) -> tuple[dt.datetime, dt.datetime]:
        """Return since when times in a statement may be those of this execution, and until when."""
        return dt.datetime.fromtimestamp(self._started, dt.UTC), dt.datetime.now(dt.UTC)

    def open(self, session: Any) -> None:
        """Let operations join: the marker is in."""
        let_join(session, self)
        self.session = session
        self.state = State.OPEN

    def close(self) -> None:
        """Let nothing join any more; what became of a commit without an answer stays open."""
        if self.state is State.WAITING or (self.state is State.OPEN and not self.committing):
            self.state = State.ABORTED

    def doom_for_inner(self, exc: BaseException) -> None:
        """Let nothing be committed after a handler inside the record failed half way."""
        if self.doomed is None and not isinstance(exc, DoneBefore):
            self.doomed = exc


def _dooms(exc: BaseException) -> bool:
    """Whether the server or the network had a part in it; what the driver refused before sending changes nothing."""
    if not isinstance(exc, Exception):
        return not isinstance(exc, (DoneBefore, GeneratorExit))
    return isinstance(exc, PyMongoError) and read(exc).signal not in (Signal.OTHER, Signal.ENCODING)


def is_transient(exc: BaseException) -> bool:
    """Whether a transaction that failed so may be executed again."""
    if not isinstance(exc, PyMongoError):
        return False
    return exc.has_error_label("TransientTransactionError") or read(exc).signal in (Signal.NETWORK, Signal.SELECTION)


class Joining(DriverCall):
    """Be one driver call of a joined call, whose error dooms the transaction."""

    is_write = False

    def __init__(self, joined_call: JoinedCall) -> None:
        self.client = joined_call.client
        self.address = None
        self._joined_call = joined_call
        joined_call.at_work = self

    def __exit__(self, kind: object = None, exc: BaseException | None = None, trace: object = None) -> None:
        """End it."""
        super().__exit__()
        joined_call = self._joined_call
        del self._joined_call  # a connection of asyncio's keeps the context that it was opened in
        joined_call.at_work = None
        if exc is not None:
            joined_call.fail(exc)


class JoinedCall:
    """Be a call that joins the record's transaction.

    Args:
        record: The record.
        client: On which it is made.
        plan: What it does.
        is_write: It writes.
        is_unordered: It goes on after an error.
    """

    repeatable = False
    is_foreign = True  # the transaction decides
    _sends = 0
    _code: int | None = None
    at_work: Joining | None = None  # the driver call that the server may be at work on just now

    def __init__(self, record: Record, client: Any, plan: Plan, *, is_write: bool, is_unordered: bool = False) -> None:
        self.execution: Execution = record.transaction
        self.record = record
        self.client = client
        self.plan = plan
        self._is_write = is_write
        self._is_unordered = is_unordered
        if is_write:
            record.add(self)

    @property
    def method(self) -> str:
        """Its name."""
        return self.plan.method.name

    @property
    def namespace(self) -> str:
        """Database and collection."""
        return namespace_of(self.plan.owner)

    def view(self) -> WriteView:
        """Return what the user may see of it."""
        return WriteView(self.method, self.namespace, self.outcome, self._sends, self._sends, self._code)

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        if not self._sends:
            return Outcome.NOT_SENT
        state = self.execution.state
        if state is State.OPEN:
            return Outcome.UNKNOWN
        return Outcome.APPLIED if state is State.COMMITTED else Outcome.NOT_APPLIED

    def orphan(self) -> tuple[Any, Any] | None:
        """Return client and address of the statement that the server may be at work on just now, or None."""
        return None if self.at_work is None else (self.client, address_of(self.execution.session))

    def check(self) -> None:
        """Refuse a call that cannot join.

        Raises:
            ConfigurationError, BaseException: As ``Execution.check``.
            PartitionLostError: The record's partition was taken away.
        """
        if LOSSES.counts:
            self.record.check_held()
        self.execution.check(self.client)

    def invoke(self) -> Any:
        """Make the driver call."""
        self._sends += 1
        return self.plan.invoke_in(self.execution.session)

    def now(self) -> Any:
        """Make a call that does nothing yet: asyncio's cursors, whose methods are no coroutines.

        Raises:
            ConfigurationError: The transaction has not begun.
        """
        self.check()
        if self.execution.state is State.WAITING:
            raise ConfigurationError(
                f"{self.method} on {self.namespace} cannot begin the record's transaction: give the handler client="
            )
        return self.plan.invoke_in(self.execution.session)

    def lesson(self) -> Lesson | None:
        """Return the duplicate that was caught at an equal statement before."""
        if not self._is_write:
            return None
        method, fingerprint = (self.method, self.namespace), self._fingerprint()
        for lesson in self.execution.lessons:
            is_same_id = lesson.is_about_id() and self.plan.inserts(lesson.key["_id"])
            if lesson.method == method and (lesson.fingerprint == fingerprint or is_same_id):
                return lesson
        return None

    def look_up(self) -> Any:
        """Ask, inside the transaction, whether the values of its lesson are still there."""
        lesson = self.lesson()
        assert lesson is not None  # noqa: S101 - asked only where there is one
        key = {name: {"$eq": value} for name, value in lesson.key.items()}
        return self.plan.method.find_one(self.plan.owner, key, {"_id": 1}, session=self.execution.session)

    def _fingerprint(self) -> bytes | None:
        return self.plan.fingerprint(self.plan.inserted.made_ids, self.execution.moments())

    def fail(self, exc: BaseException) -> None:
        """Let the error of its driver call doom the transaction."""
        self._code = getattr(exc, "code", None)
        if self._is_unordered and self._code in FENCED_CODES:
            self.execution.in_order.add((self.method, self.namespace))
        self.execution.doom(exc, self._learned(exc))

    def _learned(self, exc: BaseException) -> Lesson | None:
        if not isinstance(exc, DuplicateKeyError):
            return None
        key, fingerprint = (exc.details or {}).get("keyValue"), self._fingerprint()
        if not key or fingerprint is None or without_moments(key, *self.execution.moments()) != key:
            return None
        return Lesson((self.method, self.namespace), fingerprint, key, exc)
