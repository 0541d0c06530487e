"""K4: a multi-document write that was interrupted is never sent again on its own, and its error says what is known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pymongo
import pytest
from pymongo import InsertOne, UpdateMany
from pymongo.errors import AutoReconnect, ExecutionTimeout, PyMongoError

from saferetry import Outcome, record, repeatable
from saferetry.errors import RetryRefusedError
from tests.support import CommandLog, Mongod, app_name, fail_command, wait_until_idle
from tests.support.driving import Api, RawClient, done

SLOW = {"$where": "sleep(5) || true"}


async def test_r11_an_update_many_stopped_by_the_limit_is_sent_once_and_stays_as_it_was_at_the_error(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_many([{"n": 0} for _ in range(300)])
    name = app_name()
    collection = api.client(mongod.uri, log=log, appName=name, socketTimeoutMS=300)[database_name].c
    with record(("t", 0, 11)) as current:
        with pytest.raises(ExecutionTimeout) as caught:
            await done(collection.update_many(SLOW, {"$inc": {"n": 1}}))
        at_the_error = admin[database_name].c.count_documents({"n": 1})
        assert [view.outcome for view in current.writes] == [Outcome.UNKNOWN]
    assert log.sends("update") == 1
    assert any("outcome unknown" in note for note in caught.value.__notes__)
    wait_until_idle(admin, name)
    assert admin[database_name].c.count_documents({"n": 1}) == at_the_error < 300
    assert admin[database_name].c.count_documents({"n": {"$gt": 1}}) == 0


async def test_r13_a_bulk_cut_at_its_update_many_tells_what_was_acknowledged_and_what_is_unknown(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    name = app_name()
    collection = api.client(mongod.uri, log=log, appName=name)[database_name].c
    with (
        fail_command(admin, app_name=name, commands=["update"], times=1, closeConnection=True),
        record(("t", 0, 13)),
        pytest.raises(AutoReconnect) as caught,
    ):
        await done(collection.bulk_write([InsertOne({"x": 1}), UpdateMany({}, {"$inc": {"x": 1}})]))
    assert (log.sends("insert"), log.sends("update")) == (1, 1)
    assert [document["x"] for document in admin[database_name].c.find()] == [1]
    report: Any = caught.value
    assert (report.saferetry.decision, report.saferetry.done) == ("refused", 1)
    assert report.saferetry.write.outcome is Outcome.UNKNOWN


async def delete_in_portions(collection: Any, limit: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Run the loop of the report: the same delete again after each time-out."""
    while True:
        try:
            with limit():
                await done(collection.delete_many(SLOW))
        except PyMongoError as exc:
            if not exc.timeout:
                raise
        else:
            return


async def test_r78_a_delete_in_portions_is_refused_its_second_portion_by_default(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_many([{} for _ in range(100)])
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=300)[database_name].c
    with record(("t", 0, 78)), pytest.raises(RetryRefusedError) as caught:
        await delete_in_portions(collection)
    assert isinstance(caught.value.__cause__, ExecutionTimeout)
    assert log.sends("delete") == 1


async def test_r78_a_delete_in_portions_that_is_declared_repeatable_ends_with_nothing_left(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_many([{} for _ in range(100)])
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=300)[database_name].c
    with record(("t", 0, 78)), repeatable():
        await delete_in_portions(collection)
    assert log.sends("delete") > 1
    assert admin[database_name].c.count_documents({}) == 0


async def test_r78_a_delete_in_portions_outside_a_record_is_the_users_business(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_many([{} for _ in range(100)])
    collection = api.client(mongod.uri, log=log)[database_name].c
    # There it gets no limit of ours: the user sets his own.
    await delete_in_portions(collection, lambda: pymongo.timeout(0.2))
    assert log.sends("delete") > 1
    assert admin[database_name].c.count_documents({}) == 0
