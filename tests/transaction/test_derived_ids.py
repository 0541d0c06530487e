"""Ids that follow from record and content, so that a redelivered "process" record finds its own documents."""

from __future__ import annotations

import datetime as dt
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import bson
import pytest
from bson.codec_options import DEFAULT_CODEC_OPTIONS
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from bson.son import SON
from pymongo import DeleteOne, InsertOne, UpdateOne
from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError

from saferetry import RecordKey
from saferetry._identity import DerivedIds
from tests.support import CommandLog
from tests.support.driving import ProxyFactory, done, quick
from tests.transaction.scene import KEY, Scene, Work, names, without_ids

NOON = dt.datetime(2026, 3, 4, 12, 0, 0, tzinfo=dt.UTC)
DOCUMENT = {"order": 7, "lines": [{"sku": "a", "n": 1.5}], "at": NOON - dt.timedelta(days=1)}


async def deliver(scene: Scene, work: Work, client: Any = None, **options: Any) -> Any:
    """Deliver a "process" record with derived ids."""
    options = {"guarantee": "process", "derive_ids": True, **options}
    return await scene.deliver(work, client, lazily=True, **options)


def ids_at_noon(key: RecordKey = KEY, name: str = "on_order") -> DerivedIds:
    return DerivedIds(key, name, lambda: NOON)


# the scheme


VECTORS: Mapping[str, tuple[RecordKey, str, str, Mapping[str, Any], int, str]] = {
    "plain": (KEY, "on_order", "shop.orders", {"order": 7}, 1, "508f8390d19c376a7aec008c"),
    "second time": (KEY, "on_order", "shop.orders", {"order": 7}, 2, "d19507ba032342c78f790356"),
    "empty": (KEY, "on_order", "shop.orders", {}, 1, "3c391613ed34b696124bb09f"),
    "nested": (KEY, "on_order", "shop.orders", DOCUMENT, 1, "3d19bc9597ed82719eed123c"),
    "now": (KEY, "on_order", "shop.orders", {"order": 7, "at": NOON}, 1, "279c71b48bb5eac87ea10c4c"),
    "all parts": (
        RecordKey("t", 3, 9, group="g", epoch="2", timestamp=17, digest=b"\0\xff"),
        "module.name",
        "d.c",
        {"a": None, "b": True, "c": "ü"},
        1,
        "cd087cdd9f818770aae95645",
    ),
    "no position": (RecordKey("job"), "n", "d.c", {"a": 1}, 1, "c76eaacd2a5d48d2b5c3cbe6"),
}


@pytest.mark.parametrize("name", VECTORS)
def test_the_ids_are_the_same_in_every_process_and_release(name: str) -> None:
    key, handler_name, namespace, document, times, expected = VECTORS[name]
    ids = ids_at_noon(key, handler_name)
    made = [ids.make(namespace, document, DEFAULT_CODEC_OPTIONS) for _ in range(times)]
    assert str(made[-1]) == expected


OTHERS: Mapping[str, tuple[RecordKey, str, str, Mapping[str, Any]]] = {
    "stream": (replace(KEY, stream="other"), "n", "d.c", DOCUMENT),
    "partition": (replace(KEY, partition=1), "n", "d.c", DOCUMENT),
    "position": (replace(KEY, position=8), "n", "d.c", DOCUMENT),
    "no position": (replace(KEY, position=None), "n", "d.c", DOCUMENT),
    "group": (replace(KEY, group="h"), "n", "d.c", DOCUMENT),
    "epoch": (replace(KEY, epoch="2"), "n", "d.c", DOCUMENT),
    "timestamp": (replace(KEY, timestamp=1), "n", "d.c", DOCUMENT),
    "digest": (replace(KEY, digest=b"other"), "n", "d.c", DOCUMENT),
    "name": (KEY, "m", "d.c", DOCUMENT),
    "database": (KEY, "n", "e.c", DOCUMENT),
    "collection": (KEY, "n", "d.d", DOCUMENT),
    "value": (KEY, "n", "d.c", {**DOCUMENT, "order": 8}),
    "type": (KEY, "n", "d.c", {**DOCUMENT, "order": 7.0}),
    "field": (KEY, "n", "d.c", {**DOCUMENT, "more": 1}),
    "order of fields": (KEY, "n", "d.c", dict(reversed(DOCUMENT.items()))),
    "an earlier time": (KEY, "n", "d.c", {**DOCUMENT, "at": NOON - dt.timedelta(days=2)}),
    "a later time": (KEY, "n", "d.c", {**DOCUMENT, "at": NOON + dt.timedelta(days=2)}),
    "a time of now": (KEY, "n", "d.c", {**DOCUMENT, "at": NOON}),
}


@pytest.mark.parametrize("part", OTHERS)
def test_every_part_counts(part: str) -> None:
    key, name, namespace, document = OTHERS[part]
    other = ids_at_noon(key, name).make(namespace, document, DEFAULT_CODEC_OPTIONS)
    assert other != ids_at_noon(KEY, "n").make("d.c", DOCUMENT, DEFAULT_CODEC_OPTIONS)


EQUALS: Mapping[str, Any] = {
    "SON": SON(DOCUMENT),
    "a tuple": {**DOCUMENT, "lines": tuple(DOCUMENT["lines"])},  # type: ignore[arg-type]  # a list
    "a naive time": {**DOCUMENT, "at": (NOON - dt.timedelta(days=1)).replace(tzinfo=None)},
}


@pytest.mark.parametrize("kind", EQUALS)
def test_what_is_stored_as_the_same_document_has_the_same_id(kind: str) -> None:
    made = ids_at_noon().make("d.c", EQUALS[kind], DEFAULT_CODEC_OPTIONS)
    assert made == ids_at_noon().make("d.c", DOCUMENT, DEFAULT_CODEC_OPTIONS)


@pytest.mark.parametrize("place", [lambda at: {"at": at}, lambda at: {"a": {"at": at}}, lambda at: {"a": [1, (at,)]}])
def test_moments_since_the_execution_began_do_not_count(place: Callable[[dt.datetime], Mapping[str, Any]]) -> None:
    made = []
    for start in (NOON, NOON + dt.timedelta(hours=1)):
        clock = iter([start, start + dt.timedelta(seconds=2)])
        ids = DerivedIds(KEY, "n", lambda: next(clock))  # noqa: B023 - used in this round only
        made.append(ids.make("d.c", place(start + dt.timedelta(seconds=1)), DEFAULT_CODEC_OPTIONS))
    assert made[0] == made[1]


def test_a_document_without_bson_form_has_a_random_id() -> None:
    ids = ids_at_noon()
    assert ids.make("d.c", {"a": object()}, DEFAULT_CODEC_OPTIONS) != ids.make("d.c", {"a": object()}, DEFAULT_CODEC_OPTIONS)


def test_threads_never_get_one_id_for_two_documents() -> None:
    ids = ids_at_noon()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda _: ids.make("d.c", {"a": 1}, DEFAULT_CODEC_OPTIONS), range(4_000)))
    finally:
        sys.setswitchinterval(before)
    assert len(set(made)) == 4_000


# single inserts


async def test_an_insert_one_is_found_again_by_a_redelivery(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> Any:
        result = await done(database.c.insert_one({"order": 7}))
        return result.inserted_id, result.acknowledged

    first = await deliver(scene, on_order)
    assert await deliver(scene, on_order, scene.client(log=log)) == first
    assert scene.documents() == [{"_id": first[0], "order": 7}]
    assert scene.runs == 2
    assert names(log) == ["insert"]


async def test_without_the_option_a_redelivery_inserts_again_as_plain_pymongo(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"order": 7}))

    for _ in range(2):
        await deliver(scene, on_order, derive_ids=False)
    assert len(scene.documents()) == 2


async def test_the_id_is_put_into_the_users_document_as_by_the_driver(scene: Scene) -> None:
    documents: list[dict[str, Any]] = []

    async def on_order(database: Any) -> None:
        documents.append({"order": 7})
        await done(database.c.insert_one(documents[-1]))

    for _ in range(2):
        await deliver(scene, on_order)
    assert documents[0] == documents[1] == scene.documents()[0]


async def test_two_equal_inserts_are_two_and_stay_two(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        for _ in range(2):
            await done(database.c.insert_one({"order": 7}))

    for _ in range(3):
        await deliver(scene, on_order)
    assert without_ids(scene.documents()) == [{"order": 7}] * 2


async def test_equal_inserts_by_different_methods_stay_apart(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"order": 7}))
        await done(database.c.insert_many([{"order": 7}, {"order": 7}]))
        await done(database.c.bulk_write([InsertOne({"order": 7})]))

    for _ in range(3):
        await deliver(scene, on_order)
    assert len(scene.documents()) == 4


async def test_equal_inserts_at_once_are_as_many_as_intended(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        async def insert(number: int) -> None:
            await done(database.c.insert_one({"order": 7}))

        await scene.at_once(insert, 6)

    for _ in range(2):
        await deliver(scene, on_order)
    assert len(scene.documents()) == 6


async def test_a_document_with_the_time_is_that_of_the_first_delivery(scene: Scene) -> None:
    made = []

    async def on_order(database: Any) -> None:
        at = dt.datetime.now(dt.UTC)
        made.append(at.replace(microsecond=at.microsecond // 1000 * 1000, tzinfo=None))
        await done(database.c.insert_one({"order": 7, "at": at, "history": [{"at": at}]}))

    for _ in range(2):
        await deliver(scene, on_order)
        time.sleep(0.003)
    assert without_ids(scene.documents()) == [{"order": 7, "at": made[0], "history": [{"at": made[0]}]}]


@pytest.mark.parametrize("other", [{"key": replace(KEY, position=8)}, {"name": "audit"}, {"key": replace(KEY, digest=b"x")}])
async def test_the_same_content_in_another_record_or_handler_is_another_document(scene: Scene, other: dict[str, Any]) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"order": 7}))

    for options in ({}, other, {}, other):
        await deliver(scene, on_order, **options)
    assert len(scene.documents()) == 2


async def test_a_document_changed_since_stays_as_it_is(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"order": 7}))

    await deliver(scene, on_order)
    scene.there.c.update_one({}, {"$set": {"order": 8}})
    await deliver(scene, on_order)
    assert without_ids(scene.documents()) == [{"order": 8}]


async def test_a_record_that_failed_after_its_insert_goes_on_when_it_is_redelivered(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"order": 7}))
        if scene.runs == 1:
            raise LookupError
        await done(database.c.insert_one({"order": 8}))

    with pytest.raises(LookupError):
        await deliver(scene, on_order)
    await deliver(scene, on_order)
    assert without_ids(scene.documents(order=7)) == [{"order": 7}]
    assert len(scene.documents()) == 2


async def test_an_insert_of_unknown_outcome_is_found_by_the_redelivery(scene: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="insert", times=2)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"order": 7}))

    with pytest.raises(AutoReconnect):
        await deliver(scene, on_order, scene.client(lossy.uri(), settings=quick(max_attempts=1)))
    await deliver(scene, on_order)
    assert without_ids(scene.documents()) == [{"order": 7}]


async def test_lost_replies_in_a_redelivery_change_nothing(scene: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="insert", times=5)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"order": 7}))

    await deliver(scene, on_order)
    await deliver(scene, on_order, scene.client(lossy.uri()))
    assert without_ids(scene.documents()) == [{"order": 7}]


# what is not ours


async def test_a_foreign_duplicate_of_an_insert_one_is_raised(scene: Scene) -> None:
    scene.there.c.create_index("u", unique=True)
    scene.there.c.insert_one({"u": 1})

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"u": 1}))

    for _ in range(2):
        with pytest.raises(DuplicateKeyError):
            await deliver(scene, on_order)
    assert len(scene.documents()) == 1


async def test_a_duplicate_id_of_the_users_is_raised(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 1}))

    await deliver(scene, on_order)
    with pytest.raises(DuplicateKeyError):
        await deliver(scene, on_order)


async def test_a_derived_id_that_the_user_inserts_himself_is_a_duplicate(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        document: dict[str, Any] = {"order": 7}
        await done(database.c.insert_one(document))
        with pytest.raises(DuplicateKeyError):
            await done(database.c.insert_one(document))

    await deliver(scene, on_order)
    assert len(scene.documents()) == 1


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_foreign_duplicate_of_an_insert_many_is_raised_with_its_place(scene: Scene, ordered: bool) -> None:
    scene.there.c.create_index("u", unique=True)
    scene.there.c.insert_one({"_id": "foreign", "u": 5})

    async def on_order(database: Any) -> None:
        await done(database.c.insert_many([{"u": number} for number in range(10)], ordered=ordered))

    for _ in range(2):
        with pytest.raises(BulkWriteError) as caught:
            await deliver(scene, on_order)
        details = caught.value.details
        assert [(error["index"], error["keyValue"]) for error in details["writeErrors"]] == [(5, {"u": 5})]
        assert details["nInserted"] == (5 if ordered else 9)
    assert scene.there.c.count_documents({}) == (6 if ordered else 10)


async def test_raw_documents_get_their_id_from_the_server_as_with_the_driver(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one(RawBSONDocument(bson.encode({"order": 7}))))

    for _ in range(2):
        await deliver(scene, on_order)
    assert len(scene.documents()) == 2


# many


STORED: Mapping[str, Callable[[int], bool]] = {
    "all": lambda _: True,
    "none": lambda _: False,
    "a prefix": lambda i: i < 1_300,
    "a prefix of whole commands": lambda i: i < 1_000,
    "all but the first": lambda i: i > 0,
    "all but the last": lambda i: i < 2_499,
    "some in the middle": lambda i: 100 <= i < 200 or i in (1_000, 1_999, 2_200),
    "each second": lambda i: i % 2 == 0,
    "the last only": lambda i: i == 2_499,
}


@pytest.mark.parametrize(
    ("stored", "ordered"),
    [*((stored, True) for stored in STORED), ("all", False), ("a prefix", False), ("some in the middle", False)],
)
async def test_an_insert_many_of_2500_finds_its_documents_and_inserts_the_missing_ones(
    scene: Scene, log: CommandLog, stored: str, ordered: bool
) -> None:
    async def on_order(database: Any) -> Any:
        result = await done(database.c.insert_many([{"i": number} for number in range(2_500)], ordered=ordered))
        return result.inserted_ids

    first = await deliver(scene, on_order)
    lost = [number for number in range(2_500) if not STORED[stored](number)]
    scene.there.c.delete_many({"i": {"$in": lost}})
    assert await deliver(scene, on_order, scene.client(log=log)) == first
    assert [document["_id"] for document in scene.there.c.find(sort=[("i", 1)])] == first
    assert len(names(log)) <= 3 * 4


async def test_an_insert_many_with_equal_documents_keeps_their_number(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_many([{"i": number % 3} for number in range(30)]))

    for _ in range(2):
        await deliver(scene, on_order)
    assert [scene.there.c.count_documents({"i": number}) for number in range(3)] == [10, 10, 10]


async def test_an_insert_many_with_some_ids_of_the_users_raises_their_duplicates_alone(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        documents: list[dict[str, Any]] = [{"i": 0}, {"_id": 1, "i": 1}, {"i": 2}]
        await done(database.c.insert_many(documents, ordered=False))

    await deliver(scene, on_order)
    with pytest.raises(BulkWriteError) as caught:
        await deliver(scene, on_order)
    assert [error["index"] for error in caught.value.details["writeErrors"]] == [1]
    assert caught.value.details["nInserted"] == 2
    assert len(scene.documents()) == 3


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@pytest.mark.parametrize("stored", ["all", "none", "the first", "the last"])
async def test_a_bulk_finds_its_documents_and_does_the_rest(scene: Scene, stored: str, ordered: bool) -> None:
    def requests() -> list[Any]:
        return [
            InsertOne({"i": 0}),
            InsertOne({"i": 1}),
            UpdateOne({"i": 0}, {"$set": {"seen": True}}),
            InsertOne({"i": 2}),
            DeleteOne({"i": 99}),
            InsertOne({"_id": "mine", "i": 3}) if scene.runs == 1 else UpdateOne({"_id": "mine"}, {"$set": {"i": 3}}),
        ]

    async def on_order(database: Any) -> Any:
        return await done(database.c.bulk_write(requests(), ordered=ordered))

    first = await deliver(scene, on_order)
    assert first.inserted_count == 4
    lost = {"all": [], "none": [0, 1, 2], "the first": [1, 2], "the last": [0, 1]}[stored]
    scene.there.c.delete_many({"i": {"$in": lost}})
    second = await deliver(scene, on_order)
    assert (second.inserted_count, second.matched_count, second.deleted_count) == (3, 2, 0)
    assert sorted(document["i"] for document in scene.documents()) == [0, 1, 2, 3]
    assert [document["i"] for document in scene.documents(seen=True)] == [0]


async def test_lost_replies_in_the_redelivery_of_many_change_nothing(scene: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="insert", times=6, every=2)

    async def on_order(database: Any) -> int:
        return len((await done(database.c.insert_many([{"i": number} for number in range(2_500)]))).inserted_ids)

    await deliver(scene, on_order)
    scene.there.c.delete_many({"i": {"$mod": [7, 3]}})
    assert await deliver(scene, on_order, scene.client(lossy.uri())) == 2_500
    assert lossy.hits > 0
    assert scene.there.c.count_documents({}) == len(scene.there.c.distinct("i")) == 2_500


async def test_a_look_up_that_loses_its_reply_is_repeated(scene: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="find", times=1)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_many([{"i": number} for number in range(10)]))

    await deliver(scene, on_order)
    scene.there.c.delete_one({"i": 5})
    await deliver(scene, on_order, scene.client(lossy.uri()))
    assert lossy.hits == 1
    assert scene.there.c.count_documents({}) == 10


async def test_a_record_done_in_part_by_an_insert_many_that_was_cut_goes_on(scene: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="insert", times=9, skip=1)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_many([{"i": number} for number in range(2_500)]))

    with pytest.raises(AutoReconnect):
        await deliver(scene, on_order, scene.client(lossy.uri(), settings=quick(max_attempts=1)))
    await deliver(scene, on_order)
    assert scene.there.c.count_documents({}) == len(scene.there.c.distinct("i")) == 2_500


def test_an_id_is_an_object_id() -> None:
    assert isinstance(ids_at_noon().make("d.c", {}, DEFAULT_CODEC_OPTIONS), ObjectId)
