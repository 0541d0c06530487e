"""What a record and a call are known by."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Sequence
from typing import Any

import bson
import pytest
from bson.codec_options import DEFAULT_CODEC_OPTIONS
from bson.errors import InvalidDocument
from bson.raw_bson import RawBSONDocument
from bson.son import SON
from hypothesis import given
from hypothesis import strategies as st
from pymongo import IndexModel, MongoClient
from pymongo.collation import Collation
from pymongo.write_concern import WriteConcern

from saferetry import RecordKey
from saferetry._identity import canonical, encoded_size
from saferetry.errors import ConfigurationError

CLIENT: MongoClient[dict[str, Any]] = MongoClient(connect=False)
COUNTS = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=8)

# --- keys ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_key", "key"),
    [
        ("orders", RecordKey("orders")),
        (("orders",), RecordKey("orders")),
        (("orders", 3), RecordKey("orders", 3)),
        (("orders", 3, 17), RecordKey("orders", 3, 17)),
        (RecordKey("orders", group="g"), RecordKey("orders", group="g")),
    ],
)
def test_a_key_is_made_from_a_text_a_tuple_or_a_key(given_key: Any, key: RecordKey) -> None:
    assert RecordKey.of(given_key) == key


@pytest.mark.parametrize("given_key", [None, 7, b"orders", ["orders"], {"stream": "orders"}, (), ("a", 0, 1, 2), object()])
def test_anything_else_is_no_key(given_key: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"record key: got \w+; give a RecordKey, a text, or \(stream, partition"):
        RecordKey.of(given_key)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"stream": ""}, "stream must be text that is not empty"),
        ({"stream": 7}, "stream must be text that is not empty, not int"),
        ({"stream": None}, "stream must be text that is not empty, not NoneType"),
        ({"partition": -1}, "partition must be a whole number, 0 or more"),
        ({"partition": 1.0}, "partition must be"),
        ({"partition": True}, "partition must be"),
        ({"partition": None}, "partition must be"),
        ({"position": -1}, "position must be a whole number, 0 or more, or None"),
        ({"position": "17"}, "position must be"),
        ({"position": False}, "position must be"),
        ({"group": None}, "group must be text"),
        ({"epoch": 2}, "epoch must be text"),
        ({"timestamp": 1.5}, "timestamp must be a whole number of milliseconds, or None"),
        ({"timestamp": True}, "timestamp must be"),
        ({"digest": "abc"}, "digest must be bytes"),
        ({"digest": None}, "digest must be bytes"),
    ],
)
def test_a_wrong_part_is_named(parts: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^record key: ") as caught:
        RecordKey(**{"stream": "orders", **parts})
    assert fault in str(caught.value)


def test_all_wrong_parts_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RecordKey("", -1, -1, group=1, digest="x")  # type: ignore[arg-type]  # that is the test
    assert all(part in str(caught.value) for part in ("stream", "partition", "position", "group", "digest"))


def test_a_negative_timestamp_is_a_time_before_1970() -> None:
    assert RecordKey("orders", timestamp=-1).timestamp == -1


def test_a_key_is_frozen_equal_by_value_and_hashable() -> None:
    key = RecordKey("orders", 0, 17)
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.position = 18  # type: ignore[misc]  # that is the test
    assert {key: 1}[RecordKey("orders", 0, 17)] == 1


@pytest.mark.parametrize(
    "other",
    [
        RecordKey("order", 0, 17, group="g", epoch="1"),
        RecordKey("orders", 1, 17, group="g", epoch="1"),
        RecordKey("orders", 0, 18, group="g", epoch="1"),
        RecordKey("orders", 0, None, group="g", epoch="1"),
        RecordKey("orders", 0, 17, group="h", epoch="1"),
        RecordKey("orders", 0, 17, group="g", epoch="2"),
        RecordKey("g", 0, 17, group="orders", epoch="1"),
    ],
)
def test_every_part_of_the_identity_counts_for_the_hash(other: RecordKey) -> None:
    assert other.hashed() != RecordKey("orders", 0, 17, group="g", epoch="1").hashed()


def test_time_and_digest_do_not_count_for_the_hash() -> None:
    assert RecordKey("orders", timestamp=5, digest=b"x").hashed() == RecordKey("orders").hashed()


@given(stream=st.text(min_size=1, max_size=8), partition=COUNTS, position=st.none() | COUNTS, group=TEXT, epoch=TEXT)
def test_the_hash_is_32_hexadecimal_digits_the_same_each_time(
    stream: str, partition: int, position: int | None, group: str, epoch: str
) -> None:
    key = RecordKey(stream, partition, position, group=group, epoch=epoch)
    assert key.hashed() == RecordKey(stream, partition, position, group=group, epoch=epoch).hashed()
    assert len(key.hashed()) == 32
    assert set(key.hashed()) <= set("0123456789abcdef")


def test_the_hash_is_the_same_in_every_process_and_release() -> None:
    # Whoever changes this makes tags of two releases incomparable.
    assert RecordKey("orders", 0, 17, group="g").hashed() == "59657e2eca5ddf3922fe6a227f8fc8bc"


# --- equal calls -----------------------------------------------------------------------------------------------------------


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = (canonical(arguments, DEFAULT_CODEC_OPTIONS) for arguments in (one, other))
    return first is not None and first == second


EQUAL: Sequence[tuple[dict[str, Any], dict[str, Any]]] = (
    ({"filter": {"a": 1}}, {"filter": {"a": 1}}),
    ({"filter": {"a": [1, 2]}}, {"filter": {"a": (1, 2)}}),
    ({"filter": SON([("a", 1)])}, {"filter": {"a": 1}}),
    ({"collation": Collation("de")}, {"collation": Collation("de")}),
    ({"document": RawBSONDocument(bson.encode({"a": 1}))}, {"document": RawBSONDocument(bson.encode({"a": 1}))}),
    ({"requests": [["UpdateOne", {"_filter": {}}]]}, {"requests": [["UpdateOne", {"_filter": {}}]]}),
    ({"indexes": [IndexModel("a", unique=True)]}, {"indexes": [IndexModel("a", unique=True)]}),
    ({"write_concern": WriteConcern("majority", wtimeout=5)}, {"write_concern": WriteConcern("majority", wtimeout=5)}),
    ({"name_or_collection": CLIENT["d"]["c"]}, {"name_or_collection": CLIENT["d"]["c"]}),
    ({"name_or_database": CLIENT["d"]}, {"name_or_database": CLIENT["d"]}),
)
DIFFERENT: Sequence[tuple[dict[str, Any], dict[str, Any]]] = (
    ({"filter": {"a": 1}}, {"filter": {"a": 2}}),
    ({"filter": {"a": 1}}, {"filter": {"a": 1.0}}),
    ({"filter": {"a": 1}}, {"filter": {"a": True}}),
    ({"filter": {"a": "1"}}, {"filter": {"a": b"1"}}),
    ({"filter": {"a": 1, "b": 2}}, {"filter": {"b": 2, "a": 1}}),  # the order is part of a document
    ({"filter": {"a": 1}}, {"filter": {"a": 1}, "upsert": True}),
    ({"filter": {"a": None}}, {"filter": {}}),
    ({"collation": Collation("de")}, {"collation": Collation("fr")}),
    ({"indexes": [IndexModel("a")]}, {"indexes": [IndexModel("a", unique=True)]}),
    ({"write_concern": WriteConcern(1)}, {"write_concern": WriteConcern("majority")}),
    ({"name_or_collection": CLIENT["d"]["c"]}, {"name_or_collection": CLIENT["e"]["c"]}),
    ({"name_or_database": CLIENT["d"]}, {"name_or_database": CLIENT["e"]}),
    ({"filter": {"a": object()}}, {"filter": {"a": 1}}),
)


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_these_arguments_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert same(one, other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_these_arguments_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert not same(one, other)


class Unspeakable:
    """A value without a text."""

    def __repr__(self) -> str:
        raise ValueError("no")


def test_what_has_neither_a_bson_form_nor_a_text_has_no_equal() -> None:
    assert canonical({"document": {"a": Unspeakable()}}, DEFAULT_CODEC_OPTIONS) is None


def test_values_of_two_types_are_not_equal_because_their_texts_are() -> None:
    class One:
        def __repr__(self) -> str:
            return "same"

    class Other(One):
        pass

    assert same({"value": One()}, {"value": One()})
    assert not same({"value": One()}, {"value": Other()})
    assert not same({"value": One()}, {"value": "same"})


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(DOCUMENTS, DOCUMENTS)
def test_calls_are_equal_exactly_if_their_bson_is(one: Any, other: Any) -> None:
    assert same({"v": one}, {"v": other}) == (bson.encode({"v": one}) == bson.encode({"v": other}))


# --- sizes -----------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), DOCUMENTS, max_size=4))
def test_the_size_is_that_of_the_bson(document: dict[str, Any]) -> None:
    assert encoded_size(document, DEFAULT_CODEC_OPTIONS) == len(bson.encode(document))
    raw = RawBSONDocument(bson.encode(document))
    assert encoded_size(raw, DEFAULT_CODEC_OPTIONS) == len(raw.raw)


def test_what_cannot_be_encoded_has_no_size() -> None:
    with pytest.raises(InvalidDocument):
        encoded_size({"a": dt.timedelta(1)}, DEFAULT_CODEC_OPTIONS)
    with pytest.raises(OverflowError):
        encoded_size({"a": 2**70}, DEFAULT_CODEC_OPTIONS)


def test_a_key_shows_its_digest_to_nobody() -> None:
    """It may be the content itself."""
    assert "secret" not in repr(RecordKey("orders", digest=b"secret"))
