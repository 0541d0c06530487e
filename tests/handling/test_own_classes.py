"""Databases and collections of a user's own classes are guarded; what is made by hand is not, and he is told."""

from __future__ import annotations

import logging
from typing import Any

import pymongo
import pytest
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.write_concern import WriteConcern

import saferetry
from saferetry import Outcome, record, repeatable, wrap
from saferetry.errors import RetryRefusedError, UnprotectedWriteError
from tests.support import CommandLog, Mongod
from tests.support.driving import OPTIONS, Api, ProxyFactory, RawClient, done, quick


class Counted(Collection[dict[str, Any]]):
    """Counts in another collection what it inserts."""

    def insert_one(self, document: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().insert_one(document, *args, **kwargs)
        self.database.counters.update_one({"_id": self.name}, {"$inc": {"n": 1}}, upsert=True)
        return result


class CountedDatabase(Database[dict[str, Any]]):
    """Makes such collections, each way in a way of its own."""

    def __getitem__(self, name: str) -> Any:
        return Counted(self, name)

    def __getattr__(self, name: str) -> Any:
        super().__getattr__(name)
        return Counted(self, name)

    def get_collection(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return Counted(self, name, write_concern=WriteConcern("majority"))


class AsyncCounted(AsyncCollection[dict[str, Any]]):
    """The same for asyncio."""

    async def insert_one(self, document: Any, *args: Any, **kwargs: Any) -> Any:
        result = await super().insert_one(document, *args, **kwargs)
        await self.database.counters.update_one({"_id": self.name}, {"$inc": {"n": 1}}, upsert=True)
        return result


class AsyncCountedDatabase(AsyncDatabase[dict[str, Any]]):
    """The same for asyncio."""

    def __getitem__(self, name: str) -> Any:
        return AsyncCounted(self, name)

    def __getattr__(self, name: str) -> Any:
        super().__getattr__(name)
        return AsyncCounted(self, name)

    def get_collection(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return AsyncCounted(self, name, write_concern=WriteConcern("majority"))


class Wrapped(pymongo.MongoClient[dict[str, Any]]):
    """A client that was made for PyMongo, to be wrapped."""

    def __getitem__(self, name: str) -> Any:
        return CountedDatabase(self, name)


class AsyncWrapped(pymongo.AsyncMongoClient[dict[str, Any]]):
    """The same for asyncio."""

    def __getitem__(self, name: str) -> Any:
        return AsyncCountedDatabase(self, name)


class Derived(saferetry.MongoClient[dict[str, Any]]):
    """A client whose import was changed."""

    def __getitem__(self, name: str) -> Any:
        return CountedDatabase(self, name)


class AsyncDerived(saferetry.AsyncMongoClient[dict[str, Any]]):
    """The same for asyncio."""

    def __getitem__(self, name: str) -> Any:
        return AsyncCountedDatabase(self, name)


@pytest.mark.parametrize("how", ["item", "attribute", "get_collection"])
@pytest.mark.parametrize("derived", [False, True], ids=["wrapped", "derived"])
async def test_each_call_of_a_method_of_the_users_is_guarded_by_itself(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, derived: bool, how: str
) -> None:
    lossy = proxy(command="update", times=2)
    if derived:
        client: Any = (AsyncDerived if api.is_async else Derived)(lossy.uri(), saferetry=quick(), **OPTIONS)
    else:
        client = wrap((AsyncWrapped if api.is_async else Wrapped)(lossy.uri(), **OPTIONS), quick())
    database = client[database_name]
    collection = {
        "item": lambda: database["c"],
        "attribute": lambda: database.c,
        "get_collection": lambda: database.get_collection("c"),
    }[how]()
    try:
        with record(("t", 0, 1)) as current:
            await done(collection.insert_one({"x": 1}))
    finally:
        await done(client.close())
    assert lossy.hits == 2
    assert [(write.method, write.outcome, write.sends) for write in current.writes] == [
        ("insert_one", Outcome.APPLIED, 1),
        ("update_one", Outcome.APPLIED, 3),
    ]
    assert admin[database_name].c.count_documents({"x": 1}) == 1
    assert list(admin[database_name].counters.find()) == [{"_id": "c", "n": 1}]
    assert isinstance(collection, AsyncCounted if api.is_async else Counted)
    assert type(collection).__name__ in ("Counted", "AsyncCounted")


def by_hand(api: Api, database: Any) -> Any:
    """Return a collection that no guarded method made."""
    return (AsyncCollection if api.is_async else Collection)(database, "c")


async def test_a_write_of_a_collection_made_by_hand_is_warned_about_and_its_handler_is_not_executed_again(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, caplog: pytest.LogCaptureFixture
) -> None:
    database = api.client(mongod.uri)[database_name]

    @api.handler(key=("t", 0, 1), retry_on=LookupError)
    async def on_order(order: int) -> None:
        for _ in range(2):
            await done(by_hand(api, database).insert_one({"order": order}))
        raise LookupError

    with caplog.at_level(logging.WARNING, "saferetry"), pytest.raises(RetryRefusedError, match="past the guarded methods"):
        await done(on_order(7))
    assert [document["order"] for document in admin[database_name].c.find()] == [7, 7]
    assert [message for message in caplog.messages if "guarded methods" in message] == [
        "the command insert comes past the guarded methods: a lost reply leaves it unknown. Get the collection from the "
        "guarded client, after wrap(): client['database']['collection']"
    ]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
async def test_strict_refuses_a_write_of_a_collection_made_by_hand_before_it_is_sent(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog, inside: bool
) -> None:
    database = api.client(mongod.uri, settings=quick(strict=True), log=log)[database_name]
    work = by_hand(api, database)

    async def write() -> None:
        if inside:
            with record(("t", 0, 1)):
                await done(work.insert_one({}))
        await done(work.insert_one({}))

    with pytest.raises(UnprotectedWriteError, match="the command insert comes past the guarded methods"):
        await write()
    assert log.sends("insert") == 0


async def test_strict_lets_it_write_what_is_repeatable_and_read(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod
) -> None:
    work = by_hand(api, api.client(mongod.uri, settings=quick(strict=True))[database_name])
    with record(("t", 0, 1)), repeatable():
        await done(work.update_one({"_id": 1}, {"$set": {"n": 1}}, upsert=True))
        assert await done(work.count_documents({})) == 1
    assert await done(work.find_one()) == {"_id": 1, "n": 1}


@pytest.mark.parametrize("stage", ["$out", "$merge"])
async def test_an_aggregation_that_writes_is_a_write_of_a_collection_made_by_hand_too(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog, stage: str
) -> None:
    work = by_hand(api, api.client(mongod.uri, settings=quick(strict=True), log=log)[database_name])
    with pytest.raises(UnprotectedWriteError, match="the command aggregate comes past"), record(("t", 0, 1)):
        await done(work.aggregate([{stage: "d"}]))
    assert log.sends("aggregate") == 0
