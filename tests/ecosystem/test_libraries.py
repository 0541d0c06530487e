"""Libraries over PyMongo do in saferetry what they do in plain PyMongo, and go on doing it when replies are lost."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import bson
import pytest
from pymongo.errors import AutoReconnect

from saferetry import RecordKey, Settings, record, repeatable
from saferetry.errors import RetryRefusedError, UnprotectedWriteError
from tests.ecosystem.libraries import LIBRARIES, Connection, Library
from tests.support import Mongod, random_name
from tests.support.driving import QUICK, Api, ProxyFactory, RawClient, done, quick

KEY = RecordKey("orders", 0, 7, group="g", digest=b"content")
MARKERS = "saferetry_records"
every_library = pytest.mark.parametrize("library", LIBRARIES, ids=str)
every_loss = pytest.mark.parametrize(
    ("library", "command"), [pytest.param(row, command, id=f"{row}-{command}") for row in LIBRARIES for command in row.commands]
)


def alike(value: Any) -> Any:
    """Return what two runs have in common: no made ids, no moments of today."""
    if isinstance(value, Mapping):
        return {name: alike(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [alike(inner) for inner in value]
    if isinstance(value, (bson.ObjectId, dt.datetime)):
        return type(value).__name__
    return value


def stored(admin: RawClient, name: str) -> dict[str, list[Any]]:
    """Return all documents of a database, without markers."""
    database = admin[name]
    collections = [collection for collection in database.list_collection_names() if collection != MARKERS]
    return {collection: sorted(map(alike, database[collection].find()), key=repr) for collection in sorted(collections)}


@pytest.fixture(scope="session")
def known() -> dict[str, tuple[Any, dict[str, list[Any]]]]:
    """What was seen of each library with plain PyMongo."""
    return {}


@pytest.fixture
async def plain(library: Library, admin: RawClient, mongod: Mongod, known: dict[str, Any]) -> Any:
    """The result of a library's work with plain PyMongo and no faults, and what it stored."""
    if str(library) not in known:
        name = random_name("test_plain")
        async with library.open(Connection(mongod.uri, name, is_guarded=False)) as opened:
            result = await done(opened.work())
        known[str(library)] = result, stored(admin, name)
        admin.drop_database(name)
    return known[str(library)]


def with_markers(name: str, settings: Settings = QUICK) -> Settings:
    return replace(settings, marker_database=name)


@pytest.mark.parametrize("inside", [True, False], ids=["in_a_record", "without_a_record"])
@every_library
async def test_undisturbed_it_is_as_with_plain_pymongo(
    library: Library, inside: bool, admin: RawClient, mongod: Mongod, name: str, plain: Any
) -> None:
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(library.open(Connection(mongod.uri, name)))
        if inside:
            stack.enter_context(record(KEY))
        result = await done(opened.work())
    assert (result, stored(admin, name)) == plain


@pytest.mark.parametrize("times", [1, 2])
@every_loss
async def test_a_lost_reply_changes_nothing_or_is_told(
    library: Library, command: str, times: int, admin: RawClient, mongod: Mongod, name: str, proxy: ProxyFactory, plain: Any
) -> None:
    lossy = proxy()
    async with library.open(Connection(lossy.uri(), name)) as opened:
        with record(KEY):
            lossy.arm(name.encode(), "close", times, command=command)
            if command in library.many:
                with pytest.raises(AutoReconnect) as caught:
                    await done(opened.work())
                assert "could take effect twice" in caught.value.__notes__[0]
                assert lossy.hits == 1
                return
            result = await done(opened.work())
            assert lossy.hits == times
    assert (result, stored(admin, name)) == plain


@every_loss
async def test_a_record_that_lost_replies_and_is_delivered_again_to_another_client_is_done_once(
    library: Library, command: str, admin: RawClient, mongod: Mongod, name: str, proxy: ProxyFactory, plain: Any
) -> None:
    lossy = proxy()
    results = []
    for uri in (lossy.uri(), mongod.uri):
        async with library.open(Connection(uri, name, settings=with_markers(name))) as opened:

            async def on_order(order: int, opened: Any = opened) -> Any:
                return await done(opened.work())

            handler = Api("async" if library.is_async else "sync").handler(
                key=KEY, guarantee="transaction", client=opened.client, store_result=True
            )(on_order)
            lossy.arm(name.encode(), "close", 2, command=command)
            results.append(await done(handler(7)))
            assert uri == mongod.uri or lossy.hits == 2
    assert [alike_in_bson(found) for found in results] == [alike_in_bson(plain[0])] * 2
    assert stored(admin, name) == plain[1]


def alike_in_bson(value: Any) -> Any:
    """Return a result as a marker gives it back."""
    return bson.decode(bson.encode({"result": value}))["result"]


@every_library
async def test_what_a_handler_did_that_failed_is_undone_and_done_by_the_redelivery(
    library: Library, admin: RawClient, mongod: Mongod, name: str, plain: Any
) -> None:
    deliveries: list[int] = []
    for _ in range(3):
        async with library.open(Connection(mongod.uri, name, settings=with_markers(name))) as opened:

            async def on_order(order: int, opened: Any = opened) -> None:
                await done(opened.work())
                deliveries.append(order)
                if len(deliveries) == 1:
                    raise LookupError

            handler = Api("async" if library.is_async else "sync").handler(
                key=KEY, guarantee="transaction", client=opened.client
            )(on_order)
            if deliveries:
                await done(handler(7))
            else:
                with pytest.raises(LookupError):
                    await done(handler(7))
                assert not any(stored(admin, name).values())
    assert deliveries == [7, 7]
    assert stored(admin, name) == plain[1]


@every_library
async def test_a_handler_that_has_written_is_not_executed_again_by_guarantee_process(
    library: Library, admin: RawClient, mongod: Mongod, name: str, plain: Any
) -> None:
    executions: list[int] = []
    async with library.open(Connection(mongod.uri, name)) as opened:

        async def on_order(order: int) -> None:
            executions.append(order)
            await done(opened.work())
            raise LookupError

        handler = Api("async" if library.is_async else "sync").handler(key=KEY, retry_on=LookupError)(on_order)
        with pytest.raises(RetryRefusedError):
            await done(handler(7))
    assert executions == [7]
    assert stored(admin, name) == plain[1]


WITH_DELETE_MANY = ("mongoengine", "GridFS", "GridFSBucket", "AsyncGridFS", "AsyncGridFSBucket")


@every_library
async def test_under_strict_it_makes_its_indexes_as_repeatable_writes_and_works_if_no_write_of_it_is_unprotected(
    library: Library, admin: RawClient, mongod: Mongod, name: str, plain: Any
) -> None:
    async with AsyncExitStack() as stack:
        with record("start"), repeatable():
            connection = Connection(mongod.uri, name, settings=quick(strict=True))
            opened = await stack.enter_async_context(library.open(connection))
        with record(KEY):
            if str(library) in WITH_DELETE_MANY:
                with pytest.raises(UnprotectedWriteError, match="delete_many on .* cannot be protected"):
                    await done(opened.work())
                return
            result = await done(opened.work())
    assert (result, stored(admin, name)) == plain
