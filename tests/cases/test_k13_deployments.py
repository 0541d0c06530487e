"""K13: options that the user switched off for his deployment stay off."""

from __future__ import annotations

import pytest
from pymongo.errors import OperationFailure

from saferetry import record
from tests.support import CommandLog, Mongod, app_name, fail_command
from tests.support.driving import Api, ProxyFactory, RawClient, done


async def test_r62_without_retryable_writes_a_permanent_error_is_raised_after_one_send_without_a_number(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    name = app_name()
    client = api.client(mongod.uri + "&retryWrites=false", log=log, appName=name)
    with (
        fail_command(admin, app_name=name, commands=["insert"], times=1, errorCode=301),
        record(("t", 0, 62)),
        pytest.raises(OperationFailure) as caught,
    ):
        await done(client[database_name].c.insert_one({}))
    assert caught.value.code == 301
    assert client.options.retry_writes is False
    assert ["txnNumber" in command for command in log.commands("insert")] == [False]


@pytest.mark.parametrize("times", [1, 2])
async def test_r62_without_retryable_writes_an_insert_whose_reply_is_lost_stores_one_document(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog, times: int
) -> None:
    lossy = proxy(command="insert", times=times)
    client = api.client(lossy.uri(retryWrites=False), log=log)
    with record(("t", 0, 62)):
        result = await done(client[database_name].c.insert_one({"x": 1}))
    assert lossy.hits == times
    assert list(admin[database_name].c.find()) == [{"_id": result.inserted_id, "x": 1}]
    assert ["txnNumber" in command for command in log.commands("insert")] == [False] * (times + 1)
