"""Messages as the libraries give them, made by hand, and those of a topic fetched from the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, TopicPartition

TIMESTAMP = 1_700_000_000_000


@dataclass(frozen=True)
class ConfluentMessage:
    """A message of confluent-kafka."""

    topic_: str = "orders"
    partition_: int = 0
    offset_: int = 7
    key_: Any = b"A-1"
    value_: Any = b'{"left": 1}'
    headers_: Any = field(default=(("trace", b"1"),))
    error_: Any = None

    def topic(self) -> str:
        return self.topic_

    def partition(self) -> int:
        return self.partition_

    def offset(self) -> int:
        return self.offset_

    def key(self) -> Any:
        return self.key_

    def value(self) -> Any:
        return self.value_

    def headers(self) -> Any:
        return list(self.headers_)

    def timestamp(self) -> tuple[int, int]:
        return 1, TIMESTAMP

    def error(self) -> Any:
        return self.error_


def fetched(bootstrap: str, topic: str, count: int, partitions: int = 4) -> list[Any]:
    """Return the first messages of a topic, as many as are wanted or as there are in ten seconds."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "looking", "auto.offset.reset": "earliest"})
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        return [message for message in consumer.consume(count, timeout=10) if message.error() is None]
    finally:
        consumer.close()
