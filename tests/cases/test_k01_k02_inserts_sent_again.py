"""K1, K2: an insert that is tried again must not meet, or double, its own first copy."""

from __future__ import annotations

from typing import Any

import pytest

from saferetry import record
from tests.support import CommandLog
from tests.support.driving import Api, ProxyFactory, RawClient, application_retry, done, quick


@pytest.mark.parametrize("max_attempts", [4, 1], ids=["ours", "the_applications"])
async def test_r01_an_insert_tried_again_with_the_same_document_succeeds_with_one_document(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog, max_attempts: int
) -> None:
    lossy = proxy(command="insert", times=2)
    collection = api.client(lossy.uri(), log=log, settings=quick(max_attempts=max_attempts))[database_name].c
    document = {"x": 1}
    with record(("t", 0, 1)):

        async def insert() -> Any:
            return await done(collection.insert_one(document))

        result: Any = await application_retry()(insert)
    assert lossy.hits == 2
    assert list(admin[database_name].c.find()) == [{"_id": result.inserted_id, "x": 1}]
    assert log.sends("insert") == 3


@pytest.mark.parametrize("max_attempts", [4, 1], ids=["ours", "the_applications"])
async def test_r03_an_insert_tried_again_with_a_fresh_document_stores_one(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog, max_attempts: int
) -> None:
    lossy = proxy(command="insert", times=2)
    collection = api.client(lossy.uri(), log=log, settings=quick(max_attempts=max_attempts))[database_name].c
    with record(("t", 0, 3)):

        async def insert() -> Any:
            return await done(collection.insert_one({"o": 1}))

        result: Any = await application_retry()(insert)
    assert lossy.hits == 2
    assert list(admin[database_name].c.find()) == [{"_id": result.inserted_id, "o": 1}]
    assert log.sends("insert") == 3
