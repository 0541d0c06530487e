"""Dead letters: the message as it came, where from, what became of it; not done until the broker or a majority has it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer
from pymongo.errors import AutoReconnect

from saferetry import Failure, Outcome, RecordKey, WriteView, handler, record
from saferetry.errors import ConfigurationError, DeadLetterError, PartitionLostError, RetryRefusedError
from saferetry.kafka import dead_letter, dead_letter_collection, kafka_key, partitions_lost
from saferetry.lab.broker import Broker
from tests.kafka.messages import TIMESTAMP, ConfluentMessage, fetched
from tests.support.driving import done
from tests.transaction.scene import Scene

SECRET = "4111 1111 1111 1111"
MESSAGE = ConfluentMessage()


def failure(exception: Exception | None = None, message: Any = MESSAGE, **facts: Any) -> Failure:
    """Return what a recoverer is given."""
    given: dict[str, Any] = {
        "key": RecordKey("orders", 0, 7, group="orders-consumer"),
        "argument": message,
        "exception": exception or AutoReconnect(SECRET, {"errorLabels": ["RetryableWriteError"]}),
        "reason": "exhausted",
        "execution": 4,
        "writes": (WriteView("insert_one", "shop.orders", Outcome.UNKNOWN, 4, 8, 91),),
        **facts,
    }
    return Failure(**given)


def headers_of(message: Any) -> dict[str, str]:
    return {name: value.decode() for name, value in message.headers()}


class FakeProducer:
    """A confluent-kafka producer whose broker does as the test says."""

    def __init__(self, *, report: Any = None, full: int = 0, is_silent: bool = False) -> None:
        self.report, self.full, self.is_silent = report, full, is_silent
        self.produced: list[dict[str, Any]] = []
        self._waiting: list[Callable[[Any, Any], None]] = []

    def produce(self, topic: str, value: Any, *, key: Any, headers: Any, on_delivery: Callable[[Any, Any], None]) -> None:
        if self.full:
            self.full -= 1
            raise BufferError("Local: Queue full")
        self.produced.append({"topic": topic, "value": value, "key": key, "headers": headers})
        self._waiting.append(on_delivery)

    def poll(self, timeout: float) -> int:
        waiting, self._waiting = ([], self._waiting) if self.is_silent else (self._waiting, [])
        for told in waiting:
            told(self.report, None)
        return len(waiting)


class Refusal:
    def name(self) -> str:
        return "MSG_SIZE_TOO_LARGE"


# what it says


def test_key_value_and_headers_are_the_messages_own_and_more_headers_say_the_rest(broker: Broker, topic: str) -> None:
    dead_letter(Producer({"bootstrap.servers": broker.address}), topic)(failure())
    (letter,) = fetched(broker.address, topic, 1)
    assert (letter.key(), letter.value()) == (b"A-1", b'{"left": 1}')
    headers = headers_of(letter)
    writes = json.loads(headers.pop("saferetry-writes"))
    assert headers == {
        "trace": "1",
        "saferetry-topic": "orders",
        "saferetry-partition": "0",
        "saferetry-offset": "7",
        "saferetry-timestamp": str(TIMESTAMP),
        "saferetry-group": "orders-consumer",
        "saferetry-reason": "exhausted",
        "saferetry-exception": "pymongo.errors.AutoReconnect",
        "saferetry-labels": '["RetryableWriteError"]',
        "saferetry-executions": "4",
    }
    expected = {"method": "insert_one", "namespace": "shop.orders", "outcome": "unknown", "calls": 4, "sends": 8, "code": 91}
    assert writes == [expected]


async def test_aiokafkas_producer_makes_an_async_recoverer(broker: Broker, topic: str) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=broker.address) as producer:
        await dead_letter(producer, topic)(failure())
    (letter,) = fetched(broker.address, topic, 1)
    assert (letter.key(), letter.value()) == (b"A-1", b'{"left": 1}')
    assert headers_of(letter)["saferetry-exception"] == "pymongo.errors.AutoReconnect"


def test_kafka_pythons_producer_delivers_too(broker: Broker, topic: str) -> None:
    kafka = pytest.importorskip("kafka")
    # The version is given, since librdkafka's mock answers a newer question after it in a way that kafka-python 3 cannot read.
    producer = kafka.KafkaProducer(bootstrap_servers=broker.address, api_version=(0, 11))
    try:
        dead_letter(producer, topic)(failure())
    finally:
        producer.close()
    (letter,) = fetched(broker.address, topic, 1)
    assert (letter.key(), letter.value()) == (b"A-1", b'{"left": 1}')
    assert headers_of(letter)["saferetry-offset"] == "7"


def test_no_message_of_an_exception_goes_along(caplog: pytest.LogCaptureFixture) -> None:
    producer = FakeProducer()
    exception = RetryRefusedError(SECRET)
    exception.__cause__ = ValueError(SECRET)
    dead_letter(producer, "dead")(failure(exception, reason="refused"))
    headers = dict(producer.produced[0]["headers"])
    assert headers["saferetry-exception"] == b"saferetry.errors.RetryRefusedError"
    assert headers["saferetry-cause"] == b"builtins.ValueError"
    assert SECRET.encode() not in b"".join(headers.values())
    assert SECRET not in caplog.text


def test_the_log_names_the_message_and_holds_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    dead_letter(FakeProducer(), "dead")(failure(message=ConfluentMessage(value_=SECRET.encode())))
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert told.message == "the message orders/0/7 went to the dead letters dead: exhausted, pymongo.errors.AutoReconnect"
    assert told.__dict__["saferetry"]["event"] == "dead letter"
    assert SECRET not in str(told.__dict__)


def test_the_headers_of_an_earlier_dead_letter_are_replaced() -> None:
    producer = FakeProducer()
    message = ConfluentMessage(headers_=(("saferetry-topic", b"before"), ("trace", b"1")))
    dead_letter(producer, "dead")(failure(message=message))
    assert [value for name, value in producer.produced[0]["headers"] if name == "saferetry-topic"] == [b"orders"]


def test_the_topic_may_follow_from_the_failure() -> None:
    producer = FakeProducer()
    dead_letter(producer, lambda failure: f"{failure.argument.topic()}.{failure.reason}")(failure())
    assert producer.produced[0]["topic"] == "orders.exhausted"


def test_a_tombstone_and_a_missing_key_stay_what_they_are() -> None:
    producer = FakeProducer()
    dead_letter(producer, "dead")(failure(message=ConfluentMessage(key_=None, value_=None)))
    assert (producer.produced[0]["key"], producer.produced[0]["value"]) == (None, None)


# when it is not delivered


@pytest.mark.parametrize(
    ("producer", "why"),
    [
        (FakeProducer(report=Refusal()), "error MSG_SIZE_TOO_LARGE"),
        (FakeProducer(is_silent=True), "no report in 0.1 s"),
        (FakeProducer(full=10**6), "the producer's queue stayed full"),
    ],
)
def test_without_an_acknowledgement_the_record_is_not_done(producer: FakeProducer, why: str) -> None:
    @handler(key=kafka_key("g"), name="t", recoverer=dead_letter(producer, "dead", timeout=0.1))
    def on_order(message: Any) -> None:
        raise ValueError

    with pytest.raises(DeadLetterError, match=rf"not acknowledged \({why}\): the record is not done") as caught:
        on_order(MESSAGE)
    around = caught.value.__context__
    assert ValueError in (type(around), type(around.__context__ if around else None))


def test_an_unreachable_broker_is_no_acknowledgement() -> None:
    producer = Producer({"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 300, "log_level": 0})
    with pytest.raises(DeadLetterError, match="error _MSG_TIMED_OUT"):
        dead_letter(producer, "dead")(failure())


async def test_aiokafkas_producer_may_fail_too() -> None:
    class Failing:
        async def send_and_wait(self, topic: str, **message: Any) -> None:
            raise OSError(SECRET)

    with pytest.raises(DeadLetterError, match=r"\(OSError\)"):
        await dead_letter(Failing(), "dead")(failure())


def test_a_full_queue_that_empties_is_waited_for() -> None:
    producer = FakeProducer(full=2)
    dead_letter(producer, "dead")(failure())
    assert len(producer.produced) == 1


# when it is asked for


def test_a_fatal_exception_goes_there_at_once() -> None:
    producer, runs = FakeProducer(), []

    @handler(key=kafka_key("g"), name="t", retry_on=Exception, fatal=ValueError, recoverer=dead_letter(producer, "dead"))
    def on_order(message: Any) -> None:
        runs.append(message)
        raise ValueError

    on_order(MESSAGE)
    assert len(runs) == 1
    assert dict(producer.produced[0]["headers"])["saferetry-reason"] == b"fatal"


def test_what_is_excepted_is_raised_again_and_not_put_away() -> None:
    producer = FakeProducer()

    @handler(key=kafka_key("g"), name="t", recoverer=dead_letter(producer, "dead", unless=AutoReconnect))
    def on_order(message: Any) -> None:
        raise AutoReconnect("gone")

    with pytest.raises(AutoReconnect):
        on_order(MESSAGE)
    assert producer.produced == []


def test_a_record_that_another_consumer_will_handle_is_not_put_away() -> None:
    producer = FakeProducer()
    with pytest.raises(PartitionLostError), record(RecordKey("orders", 0, 7, group="g")):
        partitions_lost([("orders", 0)], "g")
        dead_letter(producer, "dead")(failure())
    assert producer.produced == []


@pytest.mark.parametrize("producer", [None, object(), {"send": 1}])
def test_what_is_no_producer_is_refused(producer: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no producer of confluent-kafka, kafka-python or aiokafka"):
        dead_letter(producer, "dead")


@pytest.mark.parametrize("message", [{"order": 1}, ConfluentMessage(value_={"order": 1})])
def test_what_is_no_message_as_it_came_is_refused(message: Any) -> None:
    with pytest.raises(ConfigurationError, match="dead letter: "):
        dead_letter(FakeProducer(), "dead")(failure(message=message))


# in a collection


async def test_a_collection_keeps_it_once_with_what_became_of_it(scene: Scene) -> None:
    recover = dead_letter_collection(scene.client()[scene.name].dead)
    for _ in range(2):
        await done(recover(failure()))
    (document,) = scene.there.dead.find()
    assert document.pop("at") is not None
    assert document == {
        "_id": {"group": "orders-consumer", "topic": "orders", "partition": 0, "offset": 7, "epoch": ""},
        "key": b"A-1",
        "value": b'{"left": 1}',
        "headers": [{"name": "trace", "value": b"1"}],
        "timestamp": TIMESTAMP,
        "reason": "exhausted",
        "exception": "pymongo.errors.AutoReconnect",
        "labels": ["RetryableWriteError"],
        "executions": 4,
        "writes": [
            {"method": "insert_one", "namespace": "shop.orders", "outcome": "unknown", "calls": 4, "sends": 8, "code": 91}
        ],
    }


async def test_a_failed_record_with_guarantee_transaction_is_kept_and_has_no_effect(scene: Scene) -> None:
    client = scene.client()

    async def on_order(message: Any) -> None:
        await done(client[scene.name].c.insert_one({"_id": 1}))
        raise ValueError(SECRET)

    handle = scene.api.handler(
        key=kafka_key("g"),
        guarantee="transaction",
        client=client,
        recoverer=dead_letter_collection(client[scene.name].dead),
    )(on_order)
    await done(handle(MESSAGE))
    assert scene.documents() == scene.markers() == []
    (document,) = scene.there.dead.find()
    assert (document["exception"], document["writes"][0]["outcome"]) == ("builtins.ValueError", "not applied")
    assert SECRET not in str(document)


async def test_a_collections_exceptions_are_raised_again_too(scene: Scene) -> None:
    recover = dead_letter_collection(scene.client()[scene.name].dead, unless=AutoReconnect)
    with pytest.raises(AutoReconnect):
        await done(recover(failure()))
    assert scene.there.dead.count_documents({}) == 0
