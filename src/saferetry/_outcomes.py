"""What became of a write: facts in, an outcome out.

Sources: the retryable-writes specification (drivers must not resend what they did not number), MongoDB's error codes, and
measurements on 4.4, 5.0 and 6.0 (docs/limits.md). What is not listed is UNKNOWN: unknown means unsafe.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from bson.errors import InvalidDocument
from pymongo.errors import (
    BulkWriteError,
    ConnectionFailure,
    DocumentTooLarge,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WriteConcernError,
    WriteError,
)


class Outcome(enum.Enum):
    """Say what became of a write.

    NOT_SENT: it never left. NOT_APPLIED: the server refused it whole. APPLIED: the server acknowledged it (its durability
    may still be open after a write concern error). UNKNOWN: it may or may not have been applied, wholly or partly.
    UNVERIFIABLE: nobody was asked (write concern 0).
    """

    NOT_SENT = "not sent"
    NOT_APPLIED = "not applied"
    APPLIED = "applied"
    UNKNOWN = "unknown"
    UNVERIFIABLE = "unverifiable"

    @property
    def is_effect(self) -> bool:
        """Whether something may have changed on the server."""
        return self in (Outcome.APPLIED, Outcome.UNKNOWN, Outcome.UNVERIFIABLE)


@dataclass(frozen=True)
class WriteView:
    """Show one write call of a record.

    Attributes:
        method: The PyMongo method, as ``insert_one``.
        namespace: ``database.collection``, or the database's name.
        outcome: What became of it.
        calls: Driver calls made for it.
        sends: Commands sent for it.
        error_code: The server's code of the last error, if there was one.
    """

    method: str
    namespace: str
    outcome: Outcome
    calls: int
    sends: int
    error_code: int | None = None


class Signal(enum.Enum):
    """Say how a driver call ended."""

    SUCCESS = enum.auto()
    SELECTION = enum.auto()  # no server could be had
    ENCODING = enum.auto()  # the command could not be put into BSON
    NETWORK = enum.auto()
    COMMAND_ERROR = enum.auto()  # a reply with ok: 0
    WRITE_ERROR = enum.auto()  # a reply with ok: 1 and writeErrors
    WRITE_CONCERN = enum.auto()  # a reply with ok: 1 and a writeConcernError
    OTHER = enum.auto()  # cancelled, interrupted, or not an error of the driver's


@dataclass(frozen=True)
class Reading:
    """Hold what an exception says: signal, server code, labels, and documents changed by a bulk that failed."""

    signal: Signal
    code: int | None = None
    labels: frozenset[str] = frozenset()
    changed: int = 0


SUCCESS = Reading(Signal.SUCCESS)
_LABELS = ("RetryableWriteError", "RetryableError", "SystemOverloadedError", "NoWritesPerformed")


def read(exc: BaseException) -> Reading:
    """Return what a driver's exception says."""
    labels = frozenset(label for label in _LABELS if isinstance(exc, PyMongoError) and exc.has_error_label(label))
    code = getattr(exc, "code", None)
    match exc:
        case ServerSelectionTimeoutError():
            return Reading(Signal.SELECTION, labels=labels)
        case InvalidDocument() | DocumentTooLarge() | OverflowError():
            return Reading(Signal.ENCODING)
        case NotPrimaryError():
            details = exc.details if isinstance(exc.details, dict) else {}
            return Reading(Signal.COMMAND_ERROR, details.get("code"), labels)
        case ConnectionFailure():
            return Reading(Signal.NETWORK, labels=labels)
        case BulkWriteError():
            return _read_bulk(exc, labels)
        case WriteConcernError():
            return Reading(Signal.WRITE_CONCERN, code, labels)
        case WriteError() if (exc.details or {}).get("ok") != 0:
            return Reading(Signal.WRITE_ERROR, code, labels)
        case OperationFailure():
            return Reading(Signal.COMMAND_ERROR, code, labels)
    return Reading(Signal.OTHER)


def _read_bulk(exc: BulkWriteError, labels: frozenset[str]) -> Reading:
    counts = ("nInserted", "nUpserted", "nModified", "nMatched", "nRemoved")
    changed = sum(exc.details.get(name, 0) for name in counts)
    errors = exc.details.get("writeErrors") or exc.details.get("writeConcernErrors") or [{}]
    signal = Signal.WRITE_ERROR if exc.details.get("writeErrors") else Signal.WRITE_CONCERN
    codes = [error.get("code") for error in errors]
    stopped = (code for code in codes if code in STOPPED_CODES)
    return Reading(signal, next(stopped, codes[-1]), labels, changed)


@dataclass(frozen=True)
class Facts:
    """Hold what is known of one command after a driver call for it.

    Attributes:
        reading: How the driver call ended.
        sent: Sends of this driver call.
        unsettled: Sends of earlier driver calls whose fate is open.
        known: The outcome before this driver call.
        statements: Number of statements in the command.
        multi: It may change many documents by one statement, or is no statement at all (DDL, unannounced commands).
        numbered: Every send carried our transaction number.
        acknowledged: Write concern above 0.
        foreign: It ran on a session of the user's.
        mongos: The server was a mongos.
        own_duplicate: The error is a duplicate of the very ``_id`` that was made for this call, and that an earlier send, or an
            earlier delivery of the record, can have put there.
    """

    reading: Reading
    sent: int = 1
    unsettled: int = 0
    known: Outcome = Outcome.NOT_SENT
    statements: int = 1
    multi: bool = False
    numbered: bool = True
    acknowledged: bool = True
    foreign: bool = False
    mongos: bool = False
    own_duplicate: bool = False

    @property
    def only_send(self) -> bool:
        """Whether no other send of this command could still be at work."""
        return self.sent + self.unsettled == 1


# The document or the request is at fault: the server looked at it and changed nothing by that statement.
DATA_CODES = frozenset(
    {2, 9, 14, 16, 26, 27, 28, 40, 48, 52, 54, 56, 57, 66, 67, 68, 72, 85, 86, 96, 121, 197, 241, 291}
    | {10003, 10334, 11000, 11001, 12582, 16755, 16837, 17280, 17287, 17419}
)
# The command is refused before any of it runs, a multi-document one too.
REJECTED_CODES = frozenset({13, 20, 59, 73, 115, 40414, 40415})
SHUTDOWN_CODES = frozenset({91, 11600})
STOPPED_CODES = frozenset({50, 112, 11601, 11602}) | SHUTDOWN_CODES
HISTORY_LOST = 217  # IncompleteTransactionHistory: it ran, the result is no longer known
NEWER_NUMBER = 225  # TransactionTooOld: a newer number was started on this session
_OVERLOADED = frozenset({"RetryableError", "SystemOverloadedError"})


def is_overload(reading: Reading) -> bool:
    """Whether the server rejected the command before it ran, because of overload (driver 4.17 and newer).

    A connection that could not be opened bears the same labels, and says nothing of what was sent before.
    """
    return reading.signal is Signal.COMMAND_ERROR and reading.labels >= _OVERLOADED


def _is(*signals: Signal) -> Callable[[Facts], bool]:
    return lambda facts: facts.reading.signal in signals


def _code_in(codes: frozenset[int], *signals: Signal) -> Callable[[Facts], bool]:
    return lambda facts: facts.reading.signal in signals and facts.reading.code in codes


_REPLY_ERRORS = (Signal.COMMAND_ERROR, Signal.WRITE_ERROR)
_is_data_error = _code_in(DATA_CODES, *_REPLY_ERRORS)

# The first rule that holds decides; tests/unit/test_outcomes.py goes through them row by row.
RULES: tuple[tuple[str, Callable[[Facts], bool], Outcome], ...] = (
    ("acknowledged", lambda f: f.reading.signal is Signal.SUCCESS and f.acknowledged, Outcome.APPLIED),
    ("applied stays applied", lambda f: f.known is Outcome.APPLIED, Outcome.APPLIED),
    (
        "no server was selected",
        lambda f: _is(Signal.SELECTION)(f) and not f.sent and not f.unsettled,
        Outcome.NOT_SENT,
    ),
    (
        "could not be encoded",
        lambda f: _is(Signal.ENCODING)(f) and f.sent <= 1 and not f.unsettled,
        Outcome.NOT_APPLIED,
    ),
    ("nobody was asked", lambda f: not f.acknowledged, Outcome.UNVERIFIABLE),
    ("the duplicate is our own first copy", lambda f: f.own_duplicate, Outcome.APPLIED),
    ("applied, durability unknown", lambda f: _is(Signal.WRITE_CONCERN)(f) and not f.multi, Outcome.APPLIED),
    ("applied, durability unknown (multi)", lambda f: _is(Signal.WRITE_CONCERN)(f) and f.only_send, Outcome.APPLIED),
    ("a session of the user's", lambda f: f.foreign, Outcome.UNKNOWN),
    ("never left", lambda f: not f.sent and not f.unsettled, Outcome.NOT_SENT),
    ("an earlier send is open", lambda f: not f.sent, Outcome.UNKNOWN),
    (
        # Without a number the driver resends only what was rejected so, hence all sends of the driver call were.
        "rejected by overload",
        lambda f: is_overload(f.reading) and not f.unsettled and (f.sent == 1 or not f.numbered),
        Outcome.NOT_APPLIED,
    ),
    (
        "rejected before it ran",
        lambda f: _code_in(REJECTED_CODES, *_REPLY_ERRORS)(f) and f.only_send,
        Outcome.NOT_APPLIED,
    ),
    (
        "ran, result lost",
        lambda f: f.reading.code == HISTORY_LOST and f.statements == 1 and not f.multi,
        Outcome.APPLIED,
    ),
    ("a newer number started", lambda f: f.reading.code in (HISTORY_LOST, NEWER_NUMBER), Outcome.UNKNOWN),
    ("multi, stopped somewhere", lambda f: f.multi, Outcome.UNKNOWN),
    (
        "several statements, stopped by the server",
        lambda f: f.statements > 1 and _code_in(STOPPED_CODES, *_REPLY_ERRORS)(f),
        Outcome.UNKNOWN,
    ),
    (
        "several statements, some refused, some applied",
        lambda f: _is(Signal.WRITE_ERROR)(f) and f.statements > 1 and f.reading.changed > 0,
        Outcome.APPLIED,
    ),
    (
        "several statements, all refused",
        lambda f: (
            _is(Signal.WRITE_ERROR)(f)
            and f.statements > 1
            and (f.numbered or f.only_send)
            and (_is_data_error(f) or not f.mongos)
        ),
        Outcome.NOT_APPLIED,
    ),
    ("the data is at fault", lambda f: _is_data_error(f) and (f.numbered or f.only_send), Outcome.NOT_APPLIED),
    ("shutdown", _code_in(SHUTDOWN_CODES, *_REPLY_ERRORS), Outcome.UNKNOWN),
    (
        "one statement, one send, one mongod",
        lambda f: _is(*_REPLY_ERRORS)(f) and f.only_send and f.statements == 1 and not f.mongos,
        Outcome.NOT_APPLIED,
    ),
    ("not listed", lambda _: True, Outcome.UNKNOWN),
)


def settle(facts: Facts) -> Outcome:
    """Return the outcome of a command after a driver call for it."""
    return next(outcome for _, holds, outcome in RULES if holds(facts))
