"""One behaviour with three libraries, on librdkafka's mock cluster: groups, rebalances, offsets."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiokafka
import kafka
import pytest
from confluent_kafka import Consumer, TopicPartition
from pymongo.errors import AutoReconnect

from saferetry.errors import ConfigurationError
from saferetry.kafka import arun, run
from saferetry.kafka._message import Message, read_message
from saferetry.lab.broker import Broker
from tests.support import eventually

LIBRARIES = ["confluent-kafka", "kafka-python", "aiokafka"]
PARTITIONS = 4  # of the mock's topics
SESSION: dict[str, Any] = {"session_timeout_ms": 6_000, "heartbeat_interval_ms": 300}


class Running:
    """A consumer of one of the libraries, in a thread of its own."""

    def __init__(self, library: str, broker: Broker, topic: str, work: Callable[[Message], Any], **terms: Any) -> None:
        self.error: BaseException | None = None
        self.handled: list[tuple[int, int]] = []
        self._stop: Callable[[], object] = lambda: None
        self._started = threading.Event()
        self._work = work
        self._terms: dict[str, Any] = {"topics": topic, "group": topic, "commit_seconds": 0.1, **terms}
        self._broker = broker
        target = {"confluent-kafka": self._confluent, "kafka-python": self._kafka_python, "aiokafka": self._aiokafka}[library]
        self._thread = threading.Thread(target=self._run, args=(target,), daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            self.error = exc
        finally:
            self._started.set()

    def _handle(self, raw: Any) -> None:
        message = read_message(raw, "test")
        self._work(message)
        self.handled.append((message.partition, message.offset))

    def _go(self, consumer: Any) -> None:
        stop = threading.Event()
        self._stop = stop.set
        self._started.set()
        run(consumer, self._handle, stop=stop, **self._terms)

    def _confluent(self) -> None:
        config = {name.replace("_", "."): value for name, value in SESSION.items()}
        config |= {"bootstrap.servers": self._broker.address, "group.id": self._terms["group"]}
        self._go(Consumer({**config, "enable.auto.commit": False, "auto.offset.reset": "earliest", "log_level": 0}))

    def _kafka_python(self) -> None:
        # The version is given: librdkafka's mock answers newer questions for it in a way that kafka-python 3 cannot read.
        options: dict[str, Any] = {"api_version": (0, 11), "bootstrap_servers": self._broker.address, **SESSION}
        options |= {"enable_auto_commit": False, "auto_offset_reset": "earliest", "group_id": self._terms["group"]}
        self._go(kafka.KafkaConsumer(**options))

    def _aiokafka(self) -> None:
        asyncio.run(self._aiokafka_main())

    async def _aiokafka_main(self) -> None:
        async def handle(raw: Any) -> None:
            await asyncio.to_thread(self._handle, raw)

        options: dict[str, Any] = {"bootstrap_servers": self._broker.address, "group_id": self._terms["group"], **SESSION}
        consumer = aiokafka.AIOKafkaConsumer(**options, enable_auto_commit=False, auto_offset_reset="earliest")
        stop, events = asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: events.call_soon_threadsafe(stop.set)
        self._started.set()
        await arun(consumer, handle, stop=stop, **self._terms)

    def stop(self) -> None:
        """Stop it and wait for its end."""
        if self._thread.is_alive():
            self._stop()
        self._thread.join(30)
        assert not self._thread.is_alive()


Start = Callable[..., Running]


@pytest.fixture
def start(broker: Broker, topic: str) -> Iterator[Start]:
    """Start consumers, which are stopped at the end."""
    with ExitStack() as stack:

        def make(library: str, work: Callable[[Message], Any] = lambda message: None, **terms: Any) -> Running:
            running = Running(library, broker, topic, work, **terms)
            stack.callback(running.stop)
            return running

        yield make


def produce(broker: Broker, topic: str, count: int) -> None:
    """Put messages into the topic, so many into each partition."""
    for partition in range(PARTITIONS):
        broker.produce_many(topic, (b"%d" % number for number in range(count)), partition=partition)


def committed(broker: Broker, topic: str) -> list[int]:
    """Return the group's offset of each partition."""
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": topic, "log_level": 0})
    try:
        found = consumer.committed([TopicPartition(topic, number) for number in range(PARTITIONS)], timeout=10)
        return [partition.offset for partition in found]
    finally:
        consumer.close()


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_passes_holds_up_its_partition_alone_and_all_is_committed(
    library: str, broker: Broker, topic: str, start: Start
) -> None:
    produce(broker, topic, 10)
    failures = 4

    def work(message: Message) -> None:
        nonlocal failures
        if (message.partition, message.offset) == (0, 3) and failures:
            failures -= 1
            raise AutoReconnect("gone")

    consumer = start(library, work)
    eventually(lambda: consumer.error or len(consumer.handled) == 40, timeout=30)
    consumer.stop()
    assert consumer.error is None
    by_partition = {number: [offset for place, offset in consumer.handled if place == number] for number in range(PARTITIONS)}
    assert by_partition == {number: list(range(10)) for number in range(PARTITIONS)}
    assert committed(broker, topic) == [10] * PARTITIONS


# With confluent-kafka alone: where two consumers of the others meet, the mock calls a SyncGroup an invalid request.
def test_a_second_consumer_takes_partitions_over_and_nothing_is_lost(broker: Broker, topic: str, start: Start) -> None:
    produce(broker, topic, 100)
    both = threading.Event()

    def work(message: Message) -> None:
        if message.offset >= 60:
            both.wait(30)
        threading.Event().wait(0.005)

    first = start("confluent-kafka", work)
    eventually(lambda: first.error or len(first.handled) > 20, timeout=30)
    second = start("confluent-kafka", work)
    eventually(lambda: first.error or second.error or second.handled, timeout=60)
    both.set()
    eventually(lambda: first.error or second.error or len({*first.handled, *second.handled}) == 400, timeout=60)
    # The mock refuses commits during a rebalance, which brokers accept: what it did not take is handled and committed again.
    eventually(lambda: committed(broker, topic) == [100] * PARTITIONS, timeout=30, interval=0.2)
    for consumer in (first, second):
        consumer.stop()
        assert consumer.error is None
    assert {*first.handled, *second.handled} == {(place, offset) for place in range(PARTITIONS) for offset in range(100)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_error_that_does_not_pass_leaves_the_offset_where_it_was(
    library: str, broker: Broker, topic: str, start: Start
) -> None:
    broker.produce(topic, b"0")
    broker.produce(topic, b"1")

    def work(message: Message) -> None:
        if message.offset == 1:
            raise ValueError("a bug")

    consumer = start(library, work)
    eventually(lambda: consumer.error, timeout=30)
    assert isinstance(consumer.error, ValueError)
    assert committed(broker, topic)[0] == 1


def test_sigterm_finishes_the_record_in_work_and_commits_it(broker: Broker, topic: str) -> None:
    produce(broker, topic, 3)
    handled: list[int] = []

    def work(raw: Any) -> None:
        if not handled:
            os.kill(os.getpid(), signal.SIGTERM)
        handled.append(raw.partition())
        threading.Event().wait(0.5)

    before = signal.getsignal(signal.SIGTERM)
    config = {"bootstrap.servers": broker.address, "group.id": topic, "enable.auto.commit": False, "log_level": 0}
    run(Consumer({**config, "auto.offset.reset": "earliest"}), work, topics=topic, group=topic)
    assert signal.getsignal(signal.SIGTERM) is before
    assert 1 <= len(handled) <= 2  # the signal is heard between two instructions
    assert sum(max(0, offset) for offset in committed(broker, topic)) == len(handled)


async def test_sigterm_ends_the_asyncio_loop_too(broker: Broker, topic: str) -> None:
    produce(broker, topic, 3)
    handled: list[int] = []

    async def work(raw: Any) -> None:
        if not handled:
            os.kill(os.getpid(), signal.SIGTERM)
        handled.append(raw.partition)
        await asyncio.sleep(0.05)

    before = signal.getsignal(signal.SIGTERM)
    consumer = aiokafka.AIOKafkaConsumer(
        bootstrap_servers=broker.address, group_id=topic, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await arun(consumer, work, topics=topic, group=topic)
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(handled) == 1
    assert sum(max(0, offset) for offset in committed(broker, topic)) == 1


@asynccontextmanager
async def closing(consumer: Any) -> AsyncIterator[Any]:
    """Close a consumer that was never started."""
    try:
        yield consumer
    finally:
        await consumer.stop()


@pytest.mark.parametrize("library", ["kafka-python", "aiokafka"])
async def test_a_consumer_that_commits_by_itself_is_refused(library: str, broker: Broker, topic: str) -> None:
    async def handle(raw: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="commits by itself what it has polled"):
        if library == "aiokafka":
            async with closing(aiokafka.AIOKafkaConsumer(bootstrap_servers=broker.address, group_id=topic)) as consumer:
                await arun(consumer, handle, topics=topic)
        else:
            consumer = kafka.KafkaConsumer(bootstrap_servers=broker.address, api_version=(0, 11), group_id=topic)
            with consumer:
                run(consumer, print, topics=topic)


async def test_the_other_loop_is_named(broker: Broker, topic: str) -> None:
    async with closing(aiokafka.AIOKafkaConsumer(bootstrap_servers=broker.address)) as consumer:
        with pytest.raises(ConfigurationError, match=r"await arun\(\.\.\.\)"):
            run(consumer, print, topics=topic)
    confluent = Consumer({"bootstrap.servers": broker.address, "group.id": topic})
    try:
        with pytest.raises(ConfigurationError, match=r"use run\(\.\.\.\)"):
            await arun(confluent, asyncio.sleep, topics=topic)
    finally:
        confluent.close()
