"""A Kafka cluster inside this process, librdkafka's mock, which other processes can join."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from confluent_kafka import Producer

SESSION_TIMEOUT = 5.0  # seconds until a dead consumer's partition goes to another; the cluster's first rebalance takes 3
_PATIENCE = 10.0


class BrokerError(RuntimeError):
    """The cluster could not be started, or took no message."""


class Broker:
    """One mock broker; gone when the context ends.

    Attributes:
        address: "host:port", for other processes too.
    """

    def __init__(self) -> None:
        """Start it.

        Raises:
            BrokerError: confluent-kafka is not installed, or it did not start.
        """
        try:
            from confluent_kafka import KafkaException, Producer  # noqa: PLC0415 - the extra `lab` brings it
        except ImportError as exc:
            raise BrokerError("a Kafka cluster needs confluent-kafka: pip install 'saferetry[lab]'") from exc
        mock = {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 4}
        self._producer: Producer = Producer(mock)
        try:
            brokers = self._producer.list_topics(timeout=_PATIENCE).brokers
        except KafkaException as exc:
            raise BrokerError(f"the mock cluster did not start: {exc}") from exc
        self.address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._producer  # the cluster belongs to it

    def produce(self, topic: str, value: bytes, *, key: bytes | None = None, partition: int = 0) -> None:
        """Put a message into a partition of a topic, which is made, with four of them, if there is none.

        Raises:
            BrokerError: it was not taken.
        """
        self._producer.produce(topic, value, key=key, partition=partition)
        self._flush()

    def produce_many(self, topic: str, values: Iterable[bytes], *, partition: int = 0) -> None:
        """Put messages into a partition of a topic, in this order.

        Raises:
            BrokerError: not all were taken.
        """
        for value in values:
            self._producer.produce(topic, value, partition=partition)
        self._flush()

    def _flush(self) -> None:
        if left := self._producer.flush(_PATIENCE):
            raise BrokerError(f"{left} messages were not taken in {_PATIENCE:g} s")
