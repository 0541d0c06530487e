"""K17: a write concern error says that the write is applied, not that it failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pymongo.errors import WTimeoutError

from saferetry import Outcome, record
from saferetry.errors import RetryRefusedError
from tests.support import CommandLog, Mongod, app_name, fail_command
from tests.support.driving import Api, RawClient, done


@contextmanager
def replication_that_times_out(admin: RawClient, name: str) -> Iterator[None]:
    with fail_command(
        admin,
        app_name=name,
        commands=["update"],
        times=1,
        writeConcernError={"code": 64, "errmsg": "waiting for replication timed out", "errInfo": {"wtimeout": True}},
    ):
        yield


async def test_r76_an_update_whose_replication_timed_out_is_applied_and_not_sent_again(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_one({"_id": 1, "n": 0})
    name = app_name()
    collection = api.client(mongod.uri, log=log, appName=name)[database_name].c
    with replication_that_times_out(admin, name), record(("t", 0, 76)) as current, pytest.raises(WTimeoutError):
        await done(collection.update_one({"_id": 1}, {"$inc": {"n": 1}}))
    assert [(view.outcome, view.error_code) for view in current.writes] == [(Outcome.APPLIED, 64)]
    assert log.sends("update") == 1
    assert admin[database_name].c.find_one() == {"_id": 1, "n": 1}


async def test_r76_a_handler_whose_update_timed_out_in_replication_is_not_executed_again(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_one({"_id": 1, "n": 0})
    name = app_name()
    collection = api.client(mongod.uri, log=log, appName=name)[database_name].c

    @api.handler(key=("t", 0, 76), retry_on=WTimeoutError)
    async def on_lock(lock: int) -> None:
        await done(collection.update_one({"_id": lock}, {"$inc": {"n": 1}}))

    with replication_that_times_out(admin, name), pytest.raises(RetryRefusedError) as caught:
        await done(on_lock(1))
    assert isinstance(caught.value.__cause__, WTimeoutError)
    assert log.sends("update") == 1
    assert admin[database_name].c.find_one() == {"_id": 1, "n": 1}
