"""K12: cursors and change streams stay the driver's: never a silent short read, never a second resume."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo.errors import CursorNotFound

from saferetry import record
from tests.support import CommandLog, Mongod, app_name, fail_command
from tests.support.driving import Api, ProxyFactory, RawClient, done


async def test_r58_a_cursor_that_the_server_dropped_is_an_error_after_what_was_read(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod
) -> None:
    admin[database_name].c.insert_many([{"_id": number} for number in range(300)])
    name = app_name()
    collection = api.client(mongod.uri, appName=name)[database_name].c
    seen = []

    async def read(cursor: Any) -> None:
        while True:
            seen.append(await done(cursor.next()))

    with (
        record(("t", 0, 58)),
        fail_command(admin, app_name=name, commands=["getMore"], times=1, errorCode=43),
        pytest.raises(CursorNotFound),
    ):
        await read(collection.find({}, batch_size=100))
    assert [document["_id"] for document in seen] == list(range(100))


async def test_r60_a_change_stream_whose_reply_is_lost_resumes_once_and_shows_each_event_once(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    lossy = proxy(command="getMore", times=1)
    collection = api.client(lossy.uri(), log=log)[database_name].c
    with record(("t", 0, 60)):
        stream = await done(collection.watch(max_await_time_ms=300))
        admin[database_name].c.insert_many([{"_id": number} for number in range(3)])
        seen = [(await done(stream.next()))["documentKey"]["_id"] for _ in range(3)]
        await done(stream.close())
    assert lossy.hits == 1
    assert seen == [0, 1, 2]
    assert log.sends("aggregate") == 2
