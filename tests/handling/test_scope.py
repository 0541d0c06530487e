"""Which writes belong to a record: inner records, threads, tasks, and what outlives a handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from saferetry import AsyncMongoClient, MongoClient, Settings, current_record, propagate, record
from saferetry.errors import ConfigurationError, RetryRefusedError, UnprotectedWriteError
from tests.support import CommandLog, Mongod
from tests.support.driving import OPTIONS, Api, RawClient, done, quick

ClientFactory = Callable[..., MongoClient[dict[str, Any]]]


class UnavailableError(Exception):
    """Something else than MongoDB fails."""


@pytest.fixture
def sync_client(mongod: Mongod, log: CommandLog) -> Iterator[ClientFactory]:
    """A factory of guarded sync clients, for threads."""
    made: list[MongoClient[dict[str, Any]]] = []

    def make(settings: Settings | None = None) -> MongoClient[dict[str, Any]]:
        made.append(MongoClient(mongod.uri, saferetry=settings or quick(), event_listeners=[log], **OPTIONS))
        return made[-1]

    yield make
    for client in made:
        client.close()


# --- inner records


async def test_a_write_in_an_inner_record_stands_against_another_execution_of_the_outer_handler(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    collection = api.client(mongod.uri, log=log)[database_name].c

    @api.handler(retry_on=UnavailableError)
    async def on_message(message: str) -> None:
        with record("inner"):
            await done(collection.insert_one({"_id": message}))
        raise UnavailableError

    with pytest.raises(RetryRefusedError, match="inner record"):
        await done(on_message("m"))
    assert log.sends("insert") == 1


async def test_the_outer_record_is_current_again_after_an_inner_one() -> None:
    with record("outer") as outer:
        with record("inner") as inner:
            assert current_record() is inner
        assert current_record() is outer
    assert current_record() is None


async def test_an_inner_record_cannot_lengthen_the_budget_of_the_outer_one() -> None:
    with record("outer", budget=5), record("inner", budget=50) as inner:
        assert inner.remaining() <= 5


async def test_an_inner_record_can_shorten_the_budget_of_the_outer_one() -> None:
    with record("outer", budget=50) as outer, record("inner", budget=5) as inner:
        assert inner.remaining() <= 5 < outer.remaining()


# --- after the end


def test_a_thread_that_outlives_its_record_is_refused_its_write(
    sync_client: ClientFactory, database_name: str, log: CommandLog
) -> None:
    collection = sync_client()[database_name].c
    has_ended = threading.Event()

    def insert_late() -> None:
        has_ended.wait(10)
        collection.insert_one({})

    with ThreadPoolExecutor(1) as pool:
        with record("outlived"):
            late: Future[None] = pool.submit(propagate(insert_late))
        has_ended.set()
        with pytest.raises(ConfigurationError, match="has ended"):
            late.result()
    assert log.sends("insert") == 0


async def test_a_task_that_outlives_its_handler_is_refused_its_write(
    database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    async with AsyncMongoClient[dict[str, Any]](mongod.uri, saferetry=quick(), event_listeners=[log], **OPTIONS) as client:
        has_ended = asyncio.Event()

        async def insert_late() -> None:
            await has_ended.wait()
            await client[database_name].c.insert_one({})

        async with record("outlived"):
            late = asyncio.create_task(insert_late())
        has_ended.set()
        with pytest.raises(ConfigurationError, match="has ended"):
            await late
    assert log.sends("insert") == 0


async def test_a_read_after_the_record_has_ended_is_plain(
    sync_client: ClientFactory, database_name: str, log: CommandLog
) -> None:
    collection = sync_client()[database_name].c
    with record("outlived"):
        find = propagate(collection.find_one)
    assert find() is None
    assert log.sends("find") == 1


# --- threads


async def test_a_propagated_thread_writes_in_the_record(
    api: Api, sync_client: ClientFactory, database_name: str, log: CommandLog
) -> None:
    collection = sync_client()[database_name].c

    @api.handler(retry_on=UnavailableError)
    async def on_message(message: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(propagate(collection.insert_one), {"_id": message}).result()
        current = current_record()
        assert current is not None
        assert [view.method for view in current.writes] == ["insert_one"]
        raise UnavailableError

    with pytest.raises(RetryRefusedError):
        await done(on_message("m"))
    assert log.sends("insert") == 1


async def test_a_write_in_a_thread_outside_the_record_stands_against_another_execution(
    api: Api, sync_client: ClientFactory, database_name: str, log: CommandLog
) -> None:
    collection = sync_client()[database_name].c

    @api.handler(retry_on=UnavailableError)
    async def on_message(message: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(collection.insert_one, {"_id": message}).result()
        raise UnavailableError

    with pytest.raises(RetryRefusedError, match="outside the record"):
        await done(on_message("m"))
    assert log.sends("insert") == 1


async def test_a_write_in_a_thread_outside_the_record_is_warned_about_once(
    api: Api, sync_client: ClientFactory, database_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    collection = sync_client()[database_name].c

    @api.handler()
    async def on_message(message: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(collection.insert_one, {}).result()
            pool.submit(collection.insert_one, {}).result()

    await done(on_message("m"))
    assert ["propagate" in message for message in caplog.messages] == [True]


async def test_a_write_in_a_thread_outside_the_record_is_an_error_under_strict(
    api: Api, sync_client: ClientFactory, database_name: str, log: CommandLog
) -> None:
    collection = sync_client(quick(strict=True))[database_name].c

    @api.handler()
    async def on_message(message: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(collection.insert_one, {}).result()

    with pytest.raises(UnprotectedWriteError, match="propagate"):
        await done(on_message("m"))
    assert log.sends("insert") == 0


async def test_a_read_in_a_thread_outside_the_record_does_not_stand_against_another_execution(
    api: Api, sync_client: ClientFactory, database_name: str
) -> None:
    client = sync_client()

    @api.handler(retry_on=UnavailableError, client=client)
    async def on_message(message: str) -> int:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(client[database_name].c.find_one).result()
        current = current_record()
        assert current is not None
        if current.execution == 1:
            raise UnavailableError
        return current.execution

    assert await done(on_message("m")) == 2


def test_records_of_two_threads_do_not_stand_against_each_other(sync_client: ClientFactory, database_name: str) -> None:
    collection = sync_client()[database_name].c

    def in_a_record_of_its_own() -> None:
        with record("other"):
            collection.insert_one({})

    with ThreadPoolExecutor(1) as pool, record("one") as current:
        pool.submit(in_a_record_of_its_own).result()
        assert current.effect() == ""


async def test_tasks_of_an_async_handler_write_in_its_record(admin: RawClient, database_name: str, mongod: Mongod) -> None:
    async with (
        AsyncMongoClient[dict[str, Any]](mongod.uri, saferetry=quick(), **OPTIONS) as client,
        record("tasks") as current,
    ):
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(client[database_name].c.insert_one({"_id": number}))
        assert [view.method for view in current.writes] == ["insert_one"] * 3
    assert admin[database_name].c.count_documents({}) == 3
