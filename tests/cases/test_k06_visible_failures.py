"""K6: a write that failed, or that nobody answered for, never passes for a done one."""

from __future__ import annotations

import logging

import pytest
from pymongo import WriteConcern
from pymongo.errors import NotPrimaryError

from saferetry import Outcome, record
from saferetry.errors import RetryRefusedError
from tests.support import CommandLog, Mongod, app_name, fail_command
from tests.support.driving import Api, RawClient, done


async def test_r21_a_handler_whose_insert_fails_does_not_return_and_is_not_committed(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod
) -> None:
    name = app_name()
    collection = api.client(mongod.uri, appName=name)[database_name].c
    committed = []

    @api.handler(key=("t", 0, 21))
    async def on_item(item: int) -> None:
        await done(collection.insert_one({"item": item}))

    async def consume() -> None:
        await done(on_item(1))
        committed.append(1)

    with (
        fail_command(
            admin,
            app_name=name,
            commands=["insert"],
            times=50,
            errorCode=10107,
            errorLabels=["RetryableWriteError"],
        ),
        pytest.raises(NotPrimaryError),
    ):
        await consume()
    assert committed == []
    assert admin[database_name].c.count_documents({}) == 0


async def test_r23_an_unacknowledged_insert_is_sent_once_with_a_warning_and_counts_as_unverifiable(
    api: Api,
    admin: RawClient,
    database_name: str,
    mongod: Mongod,
    log: CommandLog,
    caplog: pytest.LogCaptureFixture,
) -> None:
    admin[database_name].c.insert_one({"_id": 1})
    database = api.client(mongod.uri, log=log)[database_name]
    collection = database.get_collection("c", write_concern=WriteConcern(w=0))
    with caplog.at_level(logging.WARNING, "saferetry"), record(("t", 0, 23)) as current:
        await done(collection.insert_one({"_id": 1}))
    assert [view.outcome for view in current.writes] == [Outcome.UNVERIFIABLE]
    assert log.sends("insert") == 1
    assert ["sent once and never again" in message for message in caplog.messages] == [True]


async def test_r23_a_handler_with_an_unacknowledged_write_is_not_executed_again(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    database = api.client(mongod.uri, log=log)[database_name]
    collection = database.get_collection("c", write_concern=WriteConcern(w=0))

    @api.handler(retry_on=ConnectionError)
    async def on_item(item: int) -> None:
        await done(collection.insert_one({"_id": item}))
        raise ConnectionError

    with pytest.raises(RetryRefusedError):
        await done(on_item(1))
    assert log.sends("insert") == 1
