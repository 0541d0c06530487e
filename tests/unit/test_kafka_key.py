"""What names a Kafka message's record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferetry import RecordKey
from saferetry.errors import ConfigurationError
from saferetry.kafka import kafka_key

CREATED, NOT_AVAILABLE = 1, 0


@dataclass
class FakeMessage:
    """A message as ``confluent_kafka.Message`` shows it: methods, no attributes."""

    topic_: Any = "orders"
    partition_: Any = 3
    offset_: Any = 17
    key_: Any = b"A-1"
    value_: Any = b'{"left": 1}'
    timestamp_: Any = (CREATED, 1_700_000_000_000)
    error_: Any = None

    def topic(self) -> Any:
        return self.topic_

    def partition(self) -> Any:
        return self.partition_

    def offset(self) -> Any:
        return self.offset_

    def key(self) -> Any:
        return self.key_

    def value(self) -> Any:
        return self.value_

    def timestamp(self) -> Any:
        return self.timestamp_

    def error(self) -> Any:
        return self.error_

    def headers(self) -> Any:
        return None


def key_of(**parts: Any) -> RecordKey:
    return kafka_key("g")(FakeMessage(**{f"{name}_": value for name, value in parts.items()}))


def test_topic_partition_and_offset_name_the_record() -> None:
    key = kafka_key("g", epoch="2")(FakeMessage())
    assert (key.stream, key.partition, key.position, key.group, key.epoch) == ("orders", 3, 17, "g", "2")


def test_the_timestamp_is_the_brokers() -> None:
    assert key_of().timestamp == 1_700_000_000_000


def test_without_a_timestamp_there_is_none() -> None:
    assert key_of(timestamp=(NOT_AVAILABLE, -1)).timestamp is None


def test_the_digest_is_the_same_for_the_same_content() -> None:
    assert key_of().digest == key_of().digest
    assert len(key_of().digest) == 32


@pytest.mark.parametrize(
    "parts",
    [
        {"key": b"A-2"},
        {"key": None},
        {"value": b'{"left": 2}'},
        {"value": None},
        {"value": b""},
        {"timestamp": (CREATED, 1_700_000_000_001)},
        {"key": b"A-1{", "value": b'"left": 1}'},
    ],
)
def test_the_digest_tells_another_content(parts: dict[str, Any]) -> None:
    assert key_of(**parts).digest != key_of().digest


@pytest.mark.parametrize("parts", [{"topic": "other"}, {"partition": 0}, {"offset": 0}])
def test_the_place_is_no_part_of_the_digest(parts: dict[str, Any]) -> None:
    assert key_of(**parts).digest == key_of().digest
    assert key_of(**parts) != key_of()


def test_an_empty_key_is_not_a_missing_one() -> None:
    assert key_of(key=b"").digest != key_of(key=None).digest


def test_a_text_counts_as_its_bytes() -> None:
    assert key_of(key="A-1").digest == key_of(key=b"A-1").digest


PARTS = st.none() | st.binary(max_size=6)


@given(one=st.tuples(PARTS, PARTS), other=st.tuples(PARTS, PARTS))
def test_no_two_contents_look_alike(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    digests = [key_of(key=key, value=value).digest for key, value in (one, other)]
    assert (digests[0] == digests[1]) == (one == other)


@pytest.mark.parametrize("group", ["", None, 7])
def test_a_group_is_needed(group: Any) -> None:
    with pytest.raises(ConfigurationError, match="kafka_key: give the consumer group, a text that is not empty"):
        kafka_key(group)


NO_RECORDS: Mapping[str, dict[str, Any]] = {
    "an error": {"error": "_PARTITION_EOF"},
    "no topic": {"topic": None},
    "no offset": {"offset": None},
    "an offset that is none": {"offset": -1001},
}


@pytest.mark.parametrize("parts", NO_RECORDS.values(), ids=NO_RECORDS.keys())
def test_a_message_that_is_no_record_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="this message is an error or has no topic and offset: it is no record"):
        key_of(**parts)


@pytest.mark.parametrize(
    "message",
    [None, 7, {"topic": "orders"}, SimpleNamespace(topic="orders", partition=0)],
    ids=["None", "a number", "a dict", "half a message"],
)
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"kafka_key: \w+ is not a message of confluent-kafka, .*; give key= "):
        kafka_key("g")(message)


@pytest.mark.parametrize("parts", [{"value": {"left": 1}}, {"key": 7}, {"value": object()}, {"value": [1]}])
def test_content_that_a_deserializer_has_changed_is_refused_in_so_many_words(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"kafka_key: .*(key|value)"):
        key_of(**parts)


def test_no_content_is_in_the_message_of_an_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        key_of(error="4111 1111", key=b"4111 1111")
    assert "4111" not in str(caught.value)


def real_message(**parts: Any) -> Any:
    """Return a message of the installed confluent-kafka; its releases before 2.12 make none by hand."""
    confluent_kafka = pytest.importorskip("confluent_kafka")
    try:
        return confluent_kafka.Message(**parts)
    except TypeError:
        return None


def test_the_real_message_class_has_the_methods() -> None:
    message_class = pytest.importorskip("confluent_kafka").Message
    for name in ("topic", "partition", "offset", "key", "value", "timestamp", "error"):
        assert callable(getattr(message_class, name))


def test_a_real_message_gives_the_same_key_as_a_fake_one() -> None:
    fields = {"topic": "orders", "partition": 3, "offset": 17, "key": b"A-1", "value": b'{"left": 1}'}
    message = real_message(**fields, timestamp=(CREATED, 1_700_000_000_000))
    if message is not None:
        assert kafka_key("g")(message) == key_of()


def record_of(library: str, **parts: Any) -> Any:
    """Return the same message as kafka-python, aiokafka or FastStream give it."""
    fields: dict[str, Any] = {
        "topic": "orders",
        "partition": 3,
        "offset": 17,
        "timestamp": 1_700_000_000_000,
        "timestamp_type": 0,
        "key": b"A-1",
        "value": b'{"left": 1}',
        "headers": [("h", b"1")],
        "checksum": None,
        "serialized_key_size": 3,
        "serialized_value_size": 11,
    }
    fields |= parts
    match library:
        case "kafka-python":
            record_type = pytest.importorskip("kafka.consumer.fetcher").ConsumerRecord
            return record_type(**{name: fields.get(name) for name in record_type._fields})
        case "aiokafka":
            return pytest.importorskip("aiokafka").ConsumerRecord(**fields)
        case "faststream":
            return SimpleNamespace(raw_message=pytest.importorskip("aiokafka").ConsumerRecord(**fields), body=b"")
    return SimpleNamespace(raw_message=FakeMessage(), body=b"")  # FastStream over confluent-kafka


LIBRARIES = ["kafka-python", "aiokafka", "faststream", "faststream-confluent"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_key_is_the_same_whichever_library_fetched_the_message(library: str) -> None:
    assert kafka_key("g")(record_of(library)) == key_of()


@pytest.mark.parametrize("library", LIBRARIES[:3])
def test_a_record_without_a_timestamp_has_none(library: str) -> None:
    assert kafka_key("g")(record_of(library, timestamp=-1)).timestamp is None


@pytest.mark.parametrize("batch", [[FakeMessage()], (FakeMessage(),), SimpleNamespace(raw_message=(FakeMessage(),))])
def test_a_batch_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match="this is a batch of messages: give them one by one"):
        kafka_key("g")(batch)
