"""Much and large: nothing is lost, nothing is doubled, nothing of an ended record is kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pymongo import InsertOne, MongoClient, UpdateOne

import saferetry
from saferetry import RecordKey
from tests.soak.conftest import blocks, objects, own_objects, sessions, size
from tests.support import Mongod, Proxy, random_name
from tests.support.driving import Api, ProxyFactory, RawClient, done, quick

MEGABYTE = 1024 * 1024
PATIENT: dict[str, Any] = {"socketTimeoutMS": 120_000, "serverSelectionTimeoutMS": 60_000, "waitQueueTimeoutMS": 120_000}
_NOISE = 1_000  # objects that come and go: asyncio keeps up to a hundred cancelled timers, each with its context
_OF_A_RECORD = frozenset({"WriteCall", "JoinedCall", "Command", "Part", "Plan", "Record", "Execution", "WriteView"})
_KEPT = 20  # objects of a write whose record goes on: what the user may see of it, and where it was made
_SLOTS = 256  # sessions of one stream's transactions
Show = Callable[[str], None]

pytestmark = [pytest.mark.timeout(size(3 * 3600, 300)), pytest.mark.xdist_group("soak")]


def kept_since(before: Counter[str]) -> int:
    """Return how many records are kept, or, where there are none, anything that they are made of."""
    more = own_objects() - before
    return more["Record"] or sum(more[name] for name in _OF_A_RECORD)


def key_of(position: int) -> RecordKey:
    return RecordKey("soak", 0, position, group="soak", digest=b"%d" % position)


async def test_a_handler_with_very_many_writes(
    mongod: Mongod, database_name: str, api: Api, admin: RawClient, show: Show
) -> None:
    count = size(20_000, 1_000)
    admin[database_name].c.insert_one({"_id": 1, "n": 0})
    client = api.client(mongod.uri, **PATIENT)
    kept = []
    own_before = own_objects()

    @api.handler(key=key_of, client=client, name="soak", budget=3_000)
    async def on_record(position: int) -> None:
        for _ in range(count // 10):
            await done(client[database_name].c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        before = objects()
        for _ in range(count - count // 10):
            await done(client[database_name].c.update_one({"_id": 1}, {"$inc": {"n": 1}}))
        current = saferetry.current_record()
        assert current is not None
        kept.append((objects() - before) / (count - count // 10))
        assert len(current.writes) == count

    begin = time.monotonic()
    await done(on_record(1))
    show(f"{count} writes in a record: {time.monotonic() - begin:.0f} s, {kept[0]:.2f} objects kept for each")
    assert admin[database_name].c.find_one() == {"_id": 1, "n": count}
    assert kept[0] < _KEPT
    assert kept_since(own_before) == 0


@pytest.mark.parametrize("guarantee", ["process", "transaction"])
async def test_documents_of_15_megabytes(guarantee: Any, roomy: Mongod, api: Api, proxy: ProxyFactory, show: Show) -> None:
    """Two of them do not fit into one command; every reply of theirs is lost once."""
    content = "x" * (15 * MEGABYTE)
    database_name = random_name("test")
    database = MongoClient[dict[str, Any]](roomy.uri)[database_name]
    database.create_collection("c")
    lossy: Proxy = proxy(target_port=roomy.port)
    client = api.client(lossy.uri(), settings=quick(marker_database=database_name), **PATIENT)

    @api.handler(key=key_of, guarantee=guarantee, client=client, name="soak", budget=55)
    async def on_record(position: int) -> Any:
        c = client[database_name].c
        await done(c.insert_many([{"_id": number, "content": content} for number in range(3)]))
        await done(c.replace_one({"_id": 0}, {"content": content, "n": 1}))
        found = await done(c.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, return_document=True))
        await done(c.bulk_write([InsertOne({"_id": 3, "content": content}), UpdateOne({"_id": 2}, {"$inc": {"n": 1}})]))
        return len(found["content"])

    lossy.arm(command="insert", times=2, every=2)
    begin = time.monotonic()
    assert await done(on_record(1)) == len(content)
    show(f"documents of 15 MB, {guarantee}: {time.monotonic() - begin:.1f} s, {lossy.hits} replies lost")
    assert lossy.hits >= 1
    sizes: list[dict[str, Any]] = [{"$project": {"size": {"$strLenBytes": "$content"}, "n": 1}}, {"$sort": {"_id": 1}}]
    assert list(database.c.aggregate(sizes)) == [
        {"_id": 0, "n": 1, "size": len(content)},
        {"_id": 1, "n": 1, "size": len(content)},
        {"_id": 2, "n": 1, "size": len(content)},
        {"_id": 3, "size": len(content)},
    ]
    database.client.drop_database(database_name)
    database.client.close()


@pytest.mark.parametrize("guarantee", ["process", "transaction"])
async def test_very_many_records_at_once_on_one_client(
    guarantee: Any, mongod: Mongod, database_name: str, api: Api, admin: RawClient, show: Show
) -> None:
    """1,000 tasks with asyncio, 200 threads with the sync client."""
    count = size(1_000, 100) if api.is_async else size(200, 40)
    database = admin[database_name]
    database.c.insert_many([{"_id": number, "n": 0} for number in range(count)])
    database.create_collection("d")
    client = api.client(mongod.uri, settings=quick(marker_database=database_name), **PATIENT)

    @api.handler(key=key_of, guarantee=guarantee, client=client, name="soak", budget=58)
    async def on_record(position: int) -> None:
        c = client[database_name]
        found = await done(c.c.find_one({"_id": position}))
        await done(c.c.update_one({"_id": position}, {"$inc": {"n": 1}}))
        await done(c.d.insert_one({"position": position, "was": found["n"]}))

    await done(client.admin.command("ping"))

    async def one(number: int) -> None:
        await done(on_record(number))

    begin, before, own_before = time.monotonic(), sessions(admin), own_objects()
    await api.concurrently(one, count)
    kind = "tasks" if api.is_async else "threads"
    more = sessions(admin) - before
    show(f"{count} {kind} at once, {guarantee}: {time.monotonic() - begin:.1f} s, {more} more server sessions")
    assert database.c.count_documents({"n": 1}) == count
    assert database.d.count_documents({"was": 0}) == count
    assert kept_since(own_before) == 0
    assert more <= 4 * count + _SLOTS


@pytest.mark.parametrize("guarantee", ["process", "transaction"])
async def test_very_many_records_through_one_client(
    guarantee: Any, mongod: Mongod, database_name: str, api: Api, admin: RawClient, show: Show
) -> None:
    """As many objects after the first of the records as after all; the server's sessions stay few."""
    count, first = size(500_000, 2_400), size(50_000, 300)  # for each half and guarantee: 2,000,000 together
    database = admin[database_name]
    database.c.insert_many([{"_id": number, "n": 0} for number in range(10)])
    client = api.client(mongod.uri, settings=quick(marker_database=database_name), **PATIENT)

    @api.handler(key=key_of, guarantee=guarantee, client=client, name="soak")
    async def on_record(position: int) -> None:
        await done(client[database_name].c.update_one({"_id": position % 10}, {"$inc": {"n": 1}}))

    async def handle(positions: range) -> None:
        for position in positions:
            await done(on_record(position))

    await done(client.admin.command("ping"))
    begin, sessions_before = time.monotonic(), sessions(admin)
    await handle(range(first))
    own, all_objects, memory = own_objects(), objects(), blocks()
    await handle(range(first, count))
    grown, grown_memory = objects() - all_objects, blocks() - memory
    more = sessions(admin) - sessions_before
    half = "async" if api.is_async else "sync"
    show(
        f"{count} records, {half}, {guarantee}: {count / (time.monotonic() - begin):.0f} a second, {grown:+d} objects and "
        f"{grown_memory:+d} blocks of {memory} since the first {first}, {more} more server sessions"
    )
    assert kept_since(own) == 0
    assert grown < _NOISE
    assert more <= _SLOTS + 10
    assert sum(document["n"] for document in database.c.find()) == count
