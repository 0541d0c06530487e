"""K8: a record ends before the broker takes its partition away."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pymongo.errors import NotPrimaryError

from saferetry import RecordKey
from saferetry.kafka import PollBudget
from tests.support import fail_command
from tests.support.driving import Api, RawClient, done, quick
from tests.support.naming import app_name

INTERVAL_MS = 3_000  # R31's 6,000, so that it takes half as long


async def test_r31_waits_end_before_the_next_poll_is_due(api: Api, mongod: Any, admin: RawClient, database_name: str) -> None:
    name = app_name()
    settings = quick(max_attempts=100, backoff_base_ms=100, backoff_cap_ms=10_000, longest_execution_ms=500)
    client = api.client(mongod.uri, settings=settings, appName=name)
    poll = PollBudget(INTERVAL_MS, 1, client=client)

    @api.handler(client=client, budget=poll)
    async def on_order(message: str) -> None:
        await done(client[database_name].c.insert_one({"order": message}))

    failure: dict[str, Any] = {"errorCode": 10107, "errorLabels": ["RetryableWriteError"]}
    with fail_command(admin, app_name=name, commands=["insert"], **failure):
        poll.start()
        started = time.monotonic()
        with pytest.raises(NotPrimaryError):
            await done(on_order("A-1"))
        assert time.monotonic() - started < INTERVAL_MS / 1000
    assert admin[database_name].c.count_documents({}) == 0


async def test_r31_the_last_attempts_limit_on_the_server_is_what_is_left(
    api: Api, mongod: Any, log: Any, database_name: str
) -> None:
    client = api.client(mongod.uri, log=log, settings=quick(longest_execution_ms=100))
    poll = PollBudget(1_000, 1, client=client)

    @api.handler(client=client, budget=poll)
    async def on_order(message: str) -> None:
        await done(client[database_name].c.insert_one({"order": message}))

    poll.start()
    await done(on_order("A-1"))
    (insert,) = [command for command in log.commands() if "insert" in command]
    assert 100 <= insert["maxTimeMS"] <= 900


async def test_r35_five_deliveries_of_a_record_that_was_done_change_nothing(
    api: Api, mongod: Any, admin: RawClient, database_name: str
) -> None:
    client = api.client(mongod.uri, settings=quick(marker_database=database_name))
    key = RecordKey("t", 0, 35, group="g", digest=b"1")
    admin[database_name].lists.insert_one({"_id": 1, "seen": []})

    @api.handler(key=key, guarantee="transaction", client=client)
    async def on_order(message: str) -> None:
        await done(client[database_name].lists.update_one({"_id": 1}, {"$push": {"seen": message}}))
        await done(client[database_name].c.insert_one({"order": message}))

    for _ in range(5):
        await done(on_order("A-1"))
    assert admin[database_name].lists.find_one({"_id": 1}) == {"_id": 1, "seen": ["A-1"]}
    assert admin[database_name].c.count_documents({}) == 1
