"""What the ending of a record means for its partition: facts in, a verdict out."""

from __future__ import annotations

import enum

from pymongo.errors import PyMongoError

from saferetry._handling import Exceptions
from saferetry._outcomes import read
from saferetry._policy import is_passing
from saferetry.errors import DeadLetterError, PartitionLostError, TakenOverError

_PASSING_LABELS = ("TransientTransactionError", "UnknownTransactionCommitResult")


class RecordVerdict(enum.Enum):
    """Say what follows the ending of a record."""

    DONE = enum.auto()
    PUT_OFF = enum.auto()  # it is handled again later, and its partition waits
    STOP = enum.auto()  # the consumer stops: whoever runs it has to look


def verdict_on(exc: BaseException | None, *, put_off_on: Exceptions, effect: str) -> RecordVerdict:
    """Return what follows.

    Args:
        exc: What left the handler; None: it returned.
        put_off_on: Exceptions that the user expects to pass.
        effect: Why handling the record again could repeat an effect; empty: it could not.
    """
    if exc is None:
        return RecordVerdict.DONE
    if passes(exc, put_off_on) and not effect:
        return RecordVerdict.PUT_OFF
    return RecordVerdict.STOP


def passes(exc: BaseException, put_off_on: Exceptions) -> bool:
    """Whether an error may go away by itself, so that the record may be done later."""
    if isinstance(exc, (TakenOverError, PartitionLostError, DeadLetterError)):
        return True
    if isinstance(exc, PyMongoError):
        return is_passing(read(exc)) or any(exc.has_error_label(label) for label in _PASSING_LABELS)
    return isinstance(exc, Exception) and isinstance(exc, put_off_on)
