"""What a dead letter says: the message as it came, where from, and what its handler could not do. No I/O here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pymongo.errors import PyMongoError

from saferetry._handling import Failure
from saferetry._outcomes import read
from saferetry.errors import ConfigurationError
from saferetry.kafka._message import Message, read_message

PREFIX = "saferetry-"
_LABELS = (
    "RetryableWriteError",
    "TransientTransactionError",
    "UnknownTransactionCommitResult",
    "NoWritesPerformed",
    "RetryableError",
    "SystemOverloadedError",
)


@dataclass(frozen=True)
class Letter:
    """Be a dead letter.

    Attributes:
        message: What the handler was called with.
        facts: Where it came from and what became of it; no message of an exception, since the driver's hold values.
    """

    message: Message
    facts: dict[str, Any]

    def headers(self) -> list[tuple[str, bytes]]:
        """Return the message's own headers, and the facts as headers with our prefix."""
        own = [(name, value) for name, value in self.message.headers if not name.startswith(PREFIX)]
        return own + [(PREFIX + name, _as_text(value).encode()) for name, value in self.facts.items() if value is not None]


def letter_of(failure: Failure) -> Letter:
    """Return the dead letter of a failed record.

    Raises:
        ConfigurationError: The handler's argument is no message as it came.
    """
    message = read_message(failure.argument, "dead letter")
    for part in (message.key, message.value):
        if not (part is None or isinstance(part, (bytes, bytearray, memoryview, str))):
            raise ConfigurationError(
                f"dead letter: the message's key or value is a {type(part).__name__}, changed by a deserializer: give the "
                "handler the message as it came"
            )
    exc = failure.exception
    code = read(exc).code if isinstance(exc, PyMongoError) else None
    facts = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": message.timestamp if message.has_timestamp else None,
        "group": failure.key.group if failure.key is not None else None,
        "reason": failure.reason,
        "exception": _name_of(exc),
        "cause": _name_of(exc.__cause__) if exc.__cause__ is not None else None,
        "code": code if isinstance(code, int) else None,
        "labels": [label for label in _LABELS if isinstance(exc, PyMongoError) and exc.has_error_label(label)],
        "executions": failure.execution,
        "writes": [
            {
                "method": write.method,
                "namespace": write.namespace,
                "outcome": write.outcome.value,
                "calls": write.calls,
                "sends": write.sends,
                "code": write.error_code,
            }
            for write in failure.writes
        ],
    }
    return Letter(message, facts)


def _name_of(exc: BaseException) -> str:
    return f"{type(exc).__module__}.{type(exc).__qualname__}"


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) else str(value)
