"""The consumers of the three libraries, brought to one shape. Each library is imported here when its consumer is at hand."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from saferetry.errors import ConfigurationError
from saferetry.kafka._ledger import Place
from saferetry.kafka._message import Message, read_message

logger = logging.getLogger("saferetry")

_NO_GENERATION = -1  # of a consumer that the group has dismissed

Told = Callable[[list[Place]], None]
ToldAsync = Callable[[list[Place]], Awaitable[None]]


class Client(Protocol):
    """Say what the loop needs of a consumer; used by one thread."""

    def subscribe(self, topics: Sequence[str], assigned: Told, revoked: Told, lost: Told) -> None:
        """Join the group; the callbacks are called inside ``poll`` and ``close``."""

    def poll(self, most: int, seconds: float) -> list[Message]:
        """Return messages, once there is one or the time is up."""

    def pause(self, places: Iterable[Place]) -> None:
        """Let polls return nothing of partitions."""

    def resume(self, places: Iterable[Place]) -> None:
        """Let polls return messages of partitions again."""

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit, and wait for the answer."""

    def highwater(self, place: Place) -> int | None:
        """Return the offset after a partition's last message, as far as is known."""

    def close(self) -> None:
        """Leave the group."""


def client_of(consumer: Any) -> Client:
    """Return a consumer in our shape.

    Raises:
        ConfigurationError: It is no consumer that is known, or commits by itself.
    """
    libraries = _libraries_of(consumer)
    if libraries & {"confluent_kafka", "cimpl"}:
        return ConfluentClient(consumer)
    if "kafka" in libraries:
        return KafkaPythonClient(consumer)
    if "aiokafka" in libraries:
        raise ConfigurationError("run: this is aiokafka's consumer: await arun(...)")
    raise ConfigurationError(f"run: {type(consumer).__name__} is no consumer of confluent-kafka or kafka-python")


def async_client_of(consumer: Any) -> AioKafkaClient:
    """Return aiokafka's consumer in our shape.

    Raises:
        ConfigurationError: It is another, or commits by itself.
    """
    if "aiokafka" not in _libraries_of(consumer):
        raise ConfigurationError(f"arun: {type(consumer).__name__} is not aiokafka's consumer: use run(...)")
    return AioKafkaClient(consumer)


def _libraries_of(consumer: Any) -> set[str]:
    return {kind.__module__.partition(".")[0] for kind in type(consumer).__mro__}


def _places(partitions: Iterable[Any]) -> list[Place]:
    return [(partition.topic, partition.partition) for partition in partitions]


def _refuse_own_commits(commits: object) -> None:
    if commits:
        raise ConfigurationError(
            "run: this consumer commits by itself what it has polled, done or not: set enable_auto_commit=False"
        )


class ConfluentClient:
    """confluent-kafka's consumer."""

    def __init__(self, consumer: Any) -> None:
        from confluent_kafka import KafkaError, KafkaException, TopicPartition  # noqa: PLC0415 - whose consumer this is

        self._consumer = consumer
        self._partition = TopicPartition
        self._error = KafkaException
        self._end = KafkaError._PARTITION_EOF

    def subscribe(self, topics: Sequence[str], assigned: Told, revoked: Told, lost: Told) -> None:
        """Join the group."""
        self._consumer.subscribe(
            list(topics),
            on_assign=lambda _, partitions: assigned(_places(partitions)),
            on_revoke=lambda _, partitions: revoked(_places(partitions)),
            on_lost=lambda _, partitions: lost(_places(partitions)),
        )

    def poll(self, most: int, seconds: float) -> list[Message]:
        """Return messages; ``consume`` alone would wait until there are as many as may come."""
        first = self._consumer.poll(seconds)
        if first is None:
            return []
        more = self._consumer.consume(most - 1, 0) if most > 1 else []
        return [read_message(raw, "run") for raw in (first, *more) if not self._is_error(raw.error())]

    def _is_error(self, error: Any) -> bool:
        if error is None:
            return False
        if error.fatal():
            raise self._error(error)
        if error.code() != self._end:
            logger.warning("the consumer reports %s", error.name())
        return True

    def pause(self, places: Iterable[Place]) -> None:
        """Let polls return nothing of partitions."""
        self._consumer.pause([self._partition(*place) for place in places])

    def resume(self, places: Iterable[Place]) -> None:
        """Let polls return messages of partitions again."""
        self._consumer.resume([self._partition(*place) for place in places])

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit, and wait for the answer."""
        partitions = [self._partition(*place, offset) for place, offset in offsets.items()]
        for answer in self._consumer.commit(offsets=partitions, asynchronous=False) or ():
            if answer.error is not None:
                raise self._error(answer.error)

    def highwater(self, place: Place) -> int | None:
        """Return the offset after a partition's last message, as the last fetch said."""
        _, high = self._consumer.get_watermark_offsets(self._partition(*place), cached=True)
        return high if high >= 0 else None

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()


class KafkaPythonClient:
    """kafka-python's consumer."""

    def __init__(self, consumer: Any) -> None:
        from kafka import ConsumerRebalanceListener  # noqa: PLC0415 - whose consumer this is
        from kafka.structs import OffsetAndMetadata, TopicPartition  # noqa: PLC0415

        _refuse_own_commits(consumer.config["enable_auto_commit"])
        self._consumer = consumer
        self._listener: Any = ConsumerRebalanceListener
        self._partition: Any = TopicPartition
        self._offset: Any = OffsetAndMetadata

    def subscribe(self, topics: Sequence[str], assigned: Told, revoked: Told, lost: Told) -> None:
        """Join the group."""

        class Listener(self._listener):  # type: ignore[misc,name-defined]  # a class of a library that may be missing
            def on_partitions_assigned(self, partitions: Any) -> None:
                assigned(_places(partitions))

            def on_partitions_revoked(self, partitions: Any) -> None:
                revoked(_places(partitions))

            def on_partitions_lost(self, partitions: Any) -> None:
                lost(_places(partitions))

        self._consumer.subscribe(list(topics), listener=Listener())

    def poll(self, most: int, seconds: float) -> list[Message]:
        """Return messages."""
        found = self._consumer.poll(timeout_ms=round(seconds * 1000), max_records=most)
        return [read_message(raw, "run") for records in found.values() for raw in records]

    def pause(self, places: Iterable[Place]) -> None:
        """Let polls return nothing of partitions."""
        self._consumer.pause(*(self._partition(*place) for place in places))

    def resume(self, places: Iterable[Place]) -> None:
        """Let polls return messages of partitions again."""
        self._consumer.resume(*(self._partition(*place) for place in places))

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit, and wait for the answer."""
        filling = ("", -1)[: len(self._offset._fields) - 1]  # metadata, and in newer releases the leader's epoch
        self._consumer.commit({self._partition(*place): self._offset(offset, *filling) for place, offset in offsets.items()})

    def highwater(self, place: Place) -> int | None:
        """Return the offset after a partition's last message, as the last fetch said."""
        high: int | None = self._consumer.highwater(self._partition(*place))
        return high

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close(autocommit=False)


class AioKafkaClient:
    """aiokafka's consumer."""

    def __init__(self, consumer: Any) -> None:
        from aiokafka import ConsumerRebalanceListener, TopicPartition  # noqa: PLC0415 - whose consumer this is

        _refuse_own_commits(getattr(consumer, "_enable_auto_commit", False))
        self._consumer = consumer
        self._listener: Any = ConsumerRebalanceListener
        self._partition: Any = TopicPartition

    async def subscribe(self, topics: Sequence[str], assigned: Told, revoked: ToldAsync, lost: ToldAsync) -> None:
        """Join the group. aiokafka tells a loss as a revocation, but has forgotten its generation by then."""

        class Listener(self._listener):  # type: ignore[misc,name-defined]  # a class of a library that may be missing
            async def on_partitions_assigned(self, partitions: Any) -> None:
                assigned(_places(partitions))

            async def on_partitions_revoked(self, partitions: Any) -> None:
                await (lost if was_dismissed() else revoked)(_places(partitions))

        def was_dismissed() -> bool:
            coordinator = getattr(self._consumer, "_coordinator", None)
            return bool(getattr(coordinator, "generation", 0) == _NO_GENERATION)

        self._consumer.subscribe(list(topics), listener=Listener())
        await self._consumer.start()

    async def poll(self, most: int, seconds: float) -> list[Message]:
        """Return messages."""
        found = await self._consumer.getmany(timeout_ms=round(seconds * 1000), max_records=most)
        return [read_message(raw, "arun") for records in found.values() for raw in records]

    def pause(self, places: Iterable[Place]) -> None:
        """Let polls return nothing of partitions."""
        self._consumer.pause(*(self._partition(*place) for place in places))

    def resume(self, places: Iterable[Place]) -> None:
        """Let polls return messages of partitions again."""
        self._consumer.resume(*(self._partition(*place) for place in places))

    async def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit, and wait for the answer."""
        await self._consumer.commit({self._partition(*place): offset for place, offset in offsets.items()})

    def highwater(self, place: Place) -> int | None:
        """Return the offset after a partition's last message, as the last fetch said."""
        high: int | None = self._consumer.highwater(self._partition(*place))
        return high

    async def close(self) -> None:
        """Leave the group."""
        await self._consumer.stop()
