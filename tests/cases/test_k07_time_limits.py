"""K7: the server stops before the client gives up, and only what can be stopped without harm is limited."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from pymongo import DeleteOne, InsertOne, UpdateOne
from pymongo.errors import ExecutionTimeout, NetworkTimeout

from saferetry import record
from tests.support import CommandLog, Mongod, app_name, fail_command, wait_until_idle
from tests.support.driving import Api, RawClient, done, quick

Scope = Callable[[], AbstractContextManager[Any]]
inside_and_outside = pytest.mark.parametrize("scope", [lambda: record(("t", 0, 25)), nullcontext], ids=["inside", "outside"])


@inside_and_outside
async def test_r25_three_attempts_of_find_one_are_six_sends_each_with_a_limit_below_the_socket_timeout(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog, scope: Scope
) -> None:
    name = app_name()
    client = api.client(mongod.uri, log=log, settings=quick(max_attempts=1), appName=name, socketTimeoutMS=300)
    with (
        fail_command(admin, app_name=name, commands=["find"], blockConnection=True, blockTimeMS=400),
        scope(),
    ):
        for _ in range(3):
            with pytest.raises(NetworkTimeout):
                await done(client[database_name].c.find_one())
    assert log.sends("find") == 6
    assert all(0 < command["maxTimeMS"] < 300 for command in log.commands("find"))


async def test_r25_a_find_one_in_a_record_is_sent_at_most_twice_for_each_attempt_that_was_configured(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    name = app_name()
    client = api.client(mongod.uri, log=log, settings=quick(max_attempts=2), appName=name, socketTimeoutMS=150)
    with (
        fail_command(admin, app_name=name, commands=["find"], blockConnection=True, blockTimeMS=200),
        record(("t", 0, 25)),
        pytest.raises(NetworkTimeout),
    ):
        await done(client[database_name].c.find_one())
    assert log.sends("find") == 4


@inside_and_outside
async def test_r25_no_find_one_lives_on_in_the_server_after_its_caller_gave_up(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, scope: Scope
) -> None:
    admin[database_name].c.insert_many([{} for _ in range(300)])
    name = app_name()
    client = api.client(mongod.uri, settings=quick(max_attempts=1), appName=name, socketTimeoutMS=300)
    with scope():
        for _ in range(3):
            with pytest.raises(ExecutionTimeout):
                await done(client[database_name].c.find_one({"$where": "sleep(5); return false"}))
    wait_until_idle(admin, name, timeout=1.0)


@inside_and_outside
async def test_r27_an_iteration_longer_than_the_limit_completes(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog, scope: Scope
) -> None:
    admin[database_name].c.insert_many([{"_id": number} for number in range(400)])
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=350)[database_name].c
    with scope():
        found = await done(collection.find({"$where": "sleep(2) || true"}, batch_size=50).to_list())
    assert [document["_id"] for document in found] == list(range(400))
    assert not any("maxTimeMS" in command for command in log.commands("find", "getMore"))


ONE_DOCUMENT: dict[str, Callable[[Any], Any]] = {
    "insert_one": lambda c: c.insert_one({}),
    "update_one": lambda c: c.update_one({"_id": 0}, {"$inc": {"n": 1}}),
    "replace_one": lambda c: c.replace_one({"_id": 0}, {"n": 1}),
    "delete_one": lambda c: c.delete_one({"_id": 0}),
    "find_one_and_update": lambda c: c.find_one_and_update({"_id": 0}, {"$inc": {"n": 1}}),
    "find_one_and_replace": lambda c: c.find_one_and_replace({"_id": 0}, {"n": 1}),
    "find_one_and_delete": lambda c: c.find_one_and_delete({"_id": 0}),
}
SEVERAL_DOCUMENTS: dict[str, Callable[[Any], Any]] = {
    "insert_many": lambda c: c.insert_many([{}, {}]),
    "update_many": lambda c: c.update_many({}, {"$inc": {"n": 1}}),
    "delete_many": lambda c: c.delete_many({}),
    "bulk_write": lambda c: c.bulk_write([InsertOne({}), UpdateOne({}, {"$inc": {"n": 1}}), DeleteOne({})]),
}
WRITES = ("insert", "update", "delete", "findAndModify")


@pytest.mark.parametrize("method", ONE_DOCUMENT | SEVERAL_DOCUMENTS)
async def test_r29_every_write_in_a_record_carries_a_limit_below_the_socket_timeout(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog, method: str
) -> None:
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=5_000)[database_name].c
    with record(("t", 0, 29)):
        await done((ONE_DOCUMENT | SEVERAL_DOCUMENTS)[method](collection))
    assert log.commands(*WRITES)
    assert all(0 < command["maxTimeMS"] < 5_000 for command in log.commands(*WRITES))


@pytest.mark.parametrize("method", ONE_DOCUMENT)
async def test_r29_every_write_to_one_document_outside_a_record_carries_a_limit_below_the_socket_timeout(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog, method: str
) -> None:
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=5_000)[database_name].c
    await done(ONE_DOCUMENT[method](collection))
    assert [0 < command["maxTimeMS"] < 5_000 for command in log.commands(*WRITES)] == [True]


@pytest.mark.parametrize("method", SEVERAL_DOCUMENTS)
async def test_r29_a_write_to_many_documents_outside_a_record_is_not_limited(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog, method: str
) -> None:
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=5_000)[database_name].c
    await done(SEVERAL_DOCUMENTS[method](collection))
    assert log.commands(*WRITES)
    assert not any("maxTimeMS" in command for command in log.commands(*WRITES))
