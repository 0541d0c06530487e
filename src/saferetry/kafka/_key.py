"""What names a message's record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from saferetry._identity import RecordKey
from saferetry.errors import ConfigurationError
from saferetry.kafka._message import read_message


def kafka_key(group: str, epoch: str = "") -> Callable[[Any], RecordKey]:
    """Return a callable that makes a record's key from a message of confluent-kafka, kafka-python, aiokafka or FastStream.

    Topic, partition and offset name the record; timestamp, key and value make its digest. Headers do not count, since
    brokers and mirrors change them. The key is the same whichever library fetched the message.

    Args:
        group: The consumer group; not empty, so that two services never answer for each other.
        epoch: Generation of the topic; change it when a topic is made anew or offsets are rewound on purpose.

    Example:
        >>> make_key = kafka_key("orders-consumer")

    Raises:
        ConfigurationError: ``group`` is empty; or, at a call, the message is not one (an error, no topic or offset, a batch).
    """
    if not isinstance(group, str) or not group:
        raise ConfigurationError("kafka_key: give the consumer group, a text that is not empty")

    def make_key(message: Any) -> RecordKey:
        found = read_message(message, "kafka_key")
        return RecordKey(
            found.topic,
            found.partition,
            found.offset,
            group=group,
            epoch=epoch,
            timestamp=found.timestamp if found.has_timestamp else None,
            digest=_digest(found.timestamp, found.key, found.value),
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
