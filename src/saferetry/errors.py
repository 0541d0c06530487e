"""The errors of saferetry.

::

    SafeRetryError
    ├── ConfigurationError (also ValueError)   a setting, an argument or a use that cannot work
    ├── RetryRefusedError                      trying again could repeat an effect: nothing was sent
    ├── UnsettledWriteError                    strict: a record ended with a write of unknown outcome
    ├── UnprotectedWriteError                  strict: a write that cannot be protected was not sent
    ├── KeyReusedError                         one key, another content
    ├── TakenOverError                         another execution of the record took it over
    ├── PartitionLostError                     the record's partition belongs to another consumer
    ├── DeadLetterError                        a dead letter was not acknowledged: the record is not done
    └── DriverMismatchError                    this PyMongo is not one that saferetry knows

None of them is a ``PyMongoError``, so that a generic retrier around MongoDB calls does not retry them. All can be
pickled. Messages hold names and numbers, never documents, filters or credentials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saferetry._outcomes import WriteView

__all__ = [
    "ConfigurationError",
    "DeadLetterError",
    "DriverMismatchError",
    "KeyReusedError",
    "PartitionLostError",
    "RetryRefusedError",
    "SafeRetryError",
    "TakenOverError",
    "UnprotectedWriteError",
    "UnsettledWriteError",
]


class SafeRetryError(Exception):
    """Be the root of all errors that saferetry raises itself."""


class ConfigurationError(SafeRetryError, ValueError):
    """Say which setting, argument or use cannot work, why, and what to do."""


class RetryRefusedError(SafeRetryError):
    """Refuse to try again, since an effect could be repeated; nothing was sent for it.

    ``__cause__`` is the error that asked for the retry.

    Attributes:
        writes: What the record had written, oldest first.
        reason: Why trying again is not safe.
    """

    def __init__(self, message: str, *, writes: tuple[WriteView, ...] = (), reason: str = "") -> None:
        super().__init__(message)
        self.writes = writes
        self.reason = reason


class UnsettledWriteError(SafeRetryError):
    """Say that a record ended although a write of it may or may not have been applied (strict only).

    Attributes:
        writes: The writes of unknown outcome.
    """

    def __init__(self, message: str, *, writes: tuple[WriteView, ...] = ()) -> None:
        super().__init__(message)
        self.writes = writes


class UnprotectedWriteError(SafeRetryError):
    """Refuse a write that cannot be protected, before it is sent (strict only)."""


class KeyReusedError(SafeRetryError):
    """Say that a record's key is already taken by a record with another content."""


class TakenOverError(SafeRetryError):
    """Say that another execution of the same record took it over."""


class PartitionLostError(SafeRetryError):
    """Say that the record's partition was taken away, so that it must not write any more."""


class DeadLetterError(SafeRetryError):
    """Say that the broker did not acknowledge a dead letter, so that the record is not done; it may be there all the same."""


class DriverMismatchError(SafeRetryError):
    """Say that the installed PyMongo lacks what saferetry builds on; nothing was sent."""
