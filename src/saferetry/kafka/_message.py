"""A message, whichever library it came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from saferetry.errors import ConfigurationError


@dataclass(frozen=True)
class Message:
    """Be what a message of any library says.

    Attributes:
        topic: Its topic.
        partition: Its partition.
        offset: Its offset.
        timestamp: Milliseconds since 1970 as the library gives them, whether the broker knew them or not.
        has_timestamp: Whether the broker knew them.
        key: Its key as it came.
        value: Its value as it came.
        headers: Its headers.
        raw: The library's own message.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    has_timestamp: bool
    key: Any
    value: Any
    headers: tuple[tuple[str, Any], ...]
    raw: Any

    @property
    def place(self) -> tuple[str, int]:
        """Topic and partition."""
        return self.topic, self.partition


def read_message(message: Any, who: str) -> Message:
    """Read a message of confluent-kafka, kafka-python, aiokafka or FastStream.

    Args:
        message: The message.
        who: Asks, for error messages.

    Raises:
        ConfigurationError: It is none, or an error in the place of one, or a whole batch.
    """
    raw = getattr(message, "raw_message", message)  # FastStream's carries the library's
    if isinstance(raw, list) or type(raw) is tuple:  # kafka-python's message is a named tuple
        raise ConfigurationError(f"{who}: this is a batch of messages: give them one by one, each is a record of its own")
    try:
        found = _of_confluent(raw) if callable(getattr(raw, "topic", None)) else _of_record(raw)
    except (AttributeError, TypeError) as exc:
        raise ConfigurationError(
            f"{who}: {type(message).__name__} is not a message of confluent-kafka, kafka-python or aiokafka; "
            "give key= your own callable"
        ) from exc
    if found is None:
        raise ConfigurationError(f"{who}: this message is an error or has no topic and offset: it is no record")
    return found


def _of_confluent(raw: Any) -> Message | None:
    error, topic, partition, offset = raw.error(), raw.topic(), raw.partition(), raw.offset()
    kind, timestamp = raw.timestamp()
    key, value, headers = raw.key(), raw.value(), raw.headers() if hasattr(raw, "headers") else None
    if error is not None or topic is None or offset is None or offset < 0:
        return None
    return Message(topic, partition, offset, timestamp, bool(kind), key, value, _pairs(headers), raw)


def _of_record(raw: Any) -> Message | None:
    topic, partition, offset, timestamp = raw.topic, raw.partition, raw.offset, raw.timestamp
    if topic is None or offset is None or offset < 0:
        return None
    has_timestamp = timestamp is not None and timestamp >= 0
    kept = -1 if timestamp is None else timestamp
    return Message(topic, partition, offset, kept, has_timestamp, raw.key, raw.value, _pairs(raw.headers), raw)


def _pairs(headers: Any) -> tuple[tuple[str, Any], ...]:
    pairs: Iterable[tuple[str, Any]] = headers.items() if isinstance(headers, dict) else headers or ()
    return tuple((name, value) for name, value in pairs)
