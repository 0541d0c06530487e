"""K5: a bulk that is tried again neither doubles what was written nor stumbles over it."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo import InsertOne
from pymongo.errors import BulkWriteError, PyMongoError

from saferetry import record
from saferetry.errors import RetryRefusedError
from tests.support import CommandLog, Mongod, app_name, fail_command
from tests.support.driving import Api, ProxyFactory, RawClient, application_retry, done, quick


@pytest.mark.parametrize("max_attempts", [4, 1], ids=["ours", "the_applications"])
async def test_r15_an_insert_many_tried_again_with_fresh_documents_stores_each_once(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog, max_attempts: int
) -> None:
    lossy = proxy(command="insert", times=2)
    collection = api.client(lossy.uri(), log=log, settings=quick(max_attempts=max_attempts))[database_name].c
    with record(("t", 0, 15)):

        async def insert() -> Any:
            return await done(collection.insert_many([{"i": number} for number in range(5)]))

        result: Any = await application_retry()(insert)
    assert lossy.hits == 2
    stored = list(admin[database_name].c.find(sort=[("i", 1)]))
    assert stored == [{"_id": result.inserted_ids[number], "i": number} for number in range(5)]
    assert log.sends("insert") == 3


async def test_r15_the_applications_repetition_of_a_long_insert_many_goes_on_at_the_command_whose_reply_was_lost(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    lossy = proxy(command="insert", skip=1, times=2)
    collection = api.client(lossy.uri(), log=log, settings=quick(max_attempts=1))[database_name].c
    with record(("t", 0, 15)):

        async def insert() -> Any:
            return await done(collection.insert_many([{"i": number} for number in range(2_500)]))

        result: Any = await application_retry()(insert)
    assert lossy.hits == 2
    stored = admin[database_name].c.find(sort=[("i", 1)])
    assert [document["_id"] for document in stored] == result.inserted_ids
    # One for the first 1,000, three for the second, whose reply was lost twice, one for the rest.
    assert log.sends("insert") == 5


async def test_r17_a_throttled_insert_many_is_sent_again_and_stores_each_document_once(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    name = app_name()
    collection = api.client(mongod.uri, log=log, appName=name)[database_name].c
    with (
        fail_command(admin, app_name=name, commands=["insert"], times=1, errorCode=16500),
        record(("t", 0, 17)),
    ):
        await done(collection.insert_many([{"i": number} for number in range(3)]))
    assert sorted(document["i"] for document in admin[database_name].c.find()) == [0, 1, 2]
    assert log.sends("insert") == 2


async def test_r18_a_bulk_that_hits_a_foreign_duplicate_reports_that_duplicate_after_one_send(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.create_index("u", unique=True)
    admin[database_name].c.insert_one({"u": 2})
    collection = api.client(mongod.uri, log=log)[database_name].c
    with record(("t", 0, 18)), pytest.raises(BulkWriteError) as caught:
        await done(collection.bulk_write([InsertOne({"u": number}) for number in (1, 2, 3)]))
    assert [(error["index"], error["code"]) for error in caught.value.details["writeErrors"]] == [(1, 11000)]
    assert caught.value.details["nInserted"] == 1
    assert log.sends("insert") == 1
    assert sorted(document["u"] for document in admin[database_name].c.find()) == [1, 2]


async def test_r18_a_handler_asked_to_run_again_after_a_bulk_error_is_refused_with_the_original_error(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.create_index("u", unique=True)
    admin[database_name].c.insert_one({"u": 2})
    collection = api.client(mongod.uri, log=log)[database_name].c

    @api.handler(retry_on=PyMongoError)
    async def on_load(numbers: list[int]) -> None:
        await done(collection.bulk_write([InsertOne({"u": number}) for number in numbers]))

    with pytest.raises(RetryRefusedError) as caught:
        await done(on_load([1, 2, 3]))
    cause = caught.value.__cause__
    assert isinstance(cause, BulkWriteError)
    assert [error["index"] for error in cause.details["writeErrors"]] == [1]
    assert log.sends("insert") == 1
