"""K9: work that a record hands to other threads or tasks is the record's, or the product says so."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any

import pytest

from saferetry import AsyncMongoClient, MongoClient, propagate, record
from saferetry.errors import UnprotectedWriteError
from tests.support import CommandLog, Mongod
from tests.support.driving import OPTIONS, ProxyFactory, RawClient, quick


def test_r43_writes_of_propagated_threads_belong_to_the_record_and_take_effect_once(
    admin: RawClient, database_name: str, proxy: ProxyFactory
) -> None:
    lossy = proxy(command="insert", times=2)
    with (
        MongoClient[dict[str, Any]](lossy.uri(), saferetry=quick(), **OPTIONS) as client,
        record(("t", 0, 43)) as current,
        ThreadPoolExecutor(2) as pool,
    ):
        insert = propagate(lambda number: client[database_name].c.insert_one({"i": number}))
        list(pool.map(insert, range(2)))
        assert [view.method for view in current.writes] == ["insert_one", "insert_one"]
    assert lossy.hits == 2
    assert sorted(document["i"] for document in admin[database_name].c.find()) == [0, 1]


async def test_r43_writes_of_tasks_belong_to_the_record_and_take_effect_once(
    admin: RawClient, database_name: str, proxy: ProxyFactory
) -> None:
    lossy = proxy(command="insert", times=2)
    async with (
        AsyncMongoClient[dict[str, Any]](lossy.uri(), saferetry=quick(), **OPTIONS) as client,
        record(("t", 0, 43)) as current,
    ):
        await asyncio.gather(*(client[database_name].c.insert_one({"i": number}) for number in range(2)))
        assert [view.method for view in current.writes] == ["insert_one", "insert_one"]
    assert lossy.hits == 2
    assert sorted(document["i"] for document in admin[database_name].c.find()) == [0, 1]


def test_r43_a_thread_that_the_record_does_not_reach_is_refused_under_strict(
    database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    with (
        MongoClient[dict[str, Any]](mongod.uri, saferetry=quick(strict=True), event_listeners=[log], **OPTIONS) as client,
        record(("t", 0, 43)),
        ThreadPoolExecutor(2) as pool,
        pytest.raises(UnprotectedWriteError, match="propagate"),
    ):
        pool.submit(client[database_name].c.insert_one, {"i": 0}).result()
    assert log.sends("insert") == 0


async def test_r43_a_task_that_the_record_does_not_reach_is_refused_under_strict(
    database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    async with (
        AsyncMongoClient[dict[str, Any]](mongod.uri, saferetry=quick(strict=True), event_listeners=[log], **OPTIONS) as client,
        record(("t", 0, 43)),
    ):
        with pytest.raises(UnprotectedWriteError):
            await asyncio.create_task(client[database_name].c.insert_one({"i": 0}), context=Context())
    assert log.sends("insert") == 0
