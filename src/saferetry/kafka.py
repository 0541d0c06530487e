"""For Kafka consumers: what names a message's record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from saferetry._identity import RecordKey
from saferetry.errors import ConfigurationError

__all__ = ["kafka_key"]


def kafka_key(group: str, epoch: str = "") -> Callable[[Any], RecordKey]:
    """Return a callable that makes a record's key from a ``confluent_kafka.Message``.

    Topic, partition and offset name the record; timestamp, key and value make its digest. Headers do not count, since
    brokers and mirrors change them.

    Args:
        group: The consumer group; not empty, so that two services never answer for each other.
        epoch: Generation of the topic; change it when a topic is made anew or offsets are rewound on purpose.

    Example:
        >>> make_key = kafka_key("orders-consumer")

    Raises:
        ConfigurationError: ``group`` is empty; or, at a call, the message is not one (an error, no topic or offset).
    """
    if not isinstance(group, str) or not group:
        raise ConfigurationError("kafka_key: give the consumer group, a text that is not empty")

    def make_key(message: Any) -> RecordKey:
        try:
            error, topic, partition, offset = message.error(), message.topic(), message.partition(), message.offset()
            kind, timestamp = message.timestamp()
            key, value = message.key(), message.value()
        except (AttributeError, TypeError) as exc:
            raise ConfigurationError(
                f"kafka_key: {type(message).__name__} is not a confluent_kafka.Message; give key= your own callable"
            ) from exc
        if error is not None or topic is None or offset is None or offset < 0:
            raise ConfigurationError("kafka_key: this message is an error or has no topic and offset: it is no record")
        return RecordKey(
            topic,
            partition,
            offset,
            group=group,
            epoch=epoch,
            timestamp=timestamp if kind else None,
            digest=_digest(timestamp, key, value),
        )

    return make_key


def _digest(timestamp: int, key: Any, value: Any) -> bytes:
    """Return a hash of a message's content; each part with its length, so that no two messages look alike."""
    digest = hashlib.sha256(str(timestamp).encode())
    for part in (key, value):
        raw = part.encode() if isinstance(part, str) else part
        if not (raw is None or isinstance(raw, (bytes, bytearray, memoryview))):
            raise ConfigurationError(
                f"kafka_key: the message's key or value is a {type(part).__name__}, changed by a deserializer: give the "
                "handler the message as it came, or key= your own callable"
            )
        digest.update(b"-" if raw is None else b"%d:" % len(raw))
        digest.update(raw or b"")
    return digest.digest()
