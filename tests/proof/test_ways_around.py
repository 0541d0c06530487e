"""Ways in which a write could leave the record's transaction, or an execution go on that was told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pymongo
import pytest
from pymongo.collection import Collection
from pymongo.database import Database as DriverDatabase

import saferetry
from saferetry import RecordKey, Settings
from saferetry.errors import ConfigurationError
from tests.proof import work
from tests.proof.conftest import Ground
from tests.proof.work import Database

Write = Callable[[Any], object]

WRITES: dict[str, Write] = {
    "insert": lambda stock: stock.insert_one({}),
    "update": lambda stock: stock.update_one({}, {"$inc": {"taken": 1}}),
    "update_many": lambda stock: stock.update_many({}, {"$inc": {"taken": 1}}),
    "find_one_and_update": lambda stock: stock.find_one_and_update({}, {"$inc": {"taken": 1}}),
    "delete": lambda stock: stock.delete_one({}),
    "command": lambda stock: DriverDatabase(stock.database.client, stock.database.name).command(
        "update", stock.name, updates=[{"q": {}, "u": {"$inc": {"taken": 1}}}]
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_collection_made_before_its_client_was_wrapped_is_refused(name: str, ground: Ground) -> None:
    """The driver would send its writes beside the transaction: they would stay when that is undone, and be there twice."""
    client = pymongo.MongoClient[dict[str, Any]](ground.uri)
    early: Collection[dict[str, Any]] = client[ground.name].stock
    guarded = saferetry.wrap(client, Settings(marker_database=ground.name))

    @saferetry.handler(key=RecordKey("orders", 0, 1, digest=b"1"), guarantee="transaction", client=guarded, name="early")
    def handle(_: object) -> None:
        WRITES[name](early)

    with guarded, pytest.raises(ConfigurationError, match="past the guarded methods"):
        handle(1)
    assert ground.effects() == work.once() | {"changes": {0}}
    assert ground.database.stock.count_documents({}) == 1


def test_a_cancelled_commit_ends_the_record_although_it_was_executed_again_before(ground: Ground) -> None:
    """A CancelledError is never taken for the transient error of the execution before it."""
    lost = ground.proxy(command="update", mode="close")
    at_commit = asyncio.Event()

    async def handle_and_cancel() -> None:
        loop = asyncio.get_running_loop()
        held = ground.proxy(
            port=lost.port,
            command="commitTransaction",
            mode="drop_reply",
            on_hit=lambda: loop.call_soon_threadsafe(at_commit.set),
        )
        consumer = ground.consumer(work.order_async, uri=held.uri(), is_async=True)

        async def handle() -> None:
            await consumer.handle(1)

        handling = asyncio.create_task(handle())
        await asyncio.wait_for(at_commit.wait(), 20)
        handling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handling
        assert consumer.executions == [1, 1]
        assert not consumer.failures
        await consumer.client.close()

    asyncio.run(handle_and_cancel())
    assert ground.consumer().handle(1) is None
    assert ground.effects() == work.once(1)


def test_a_record_that_a_rival_has_done_meanwhile_is_no_dead_letter(ground: Ground) -> None:
    """The handler fails for good, but the marker is there by then."""
    rival = ground.consumer()

    def failing(database: Database, position: int) -> None:
        work.order(database, position)
        with ThreadPoolExecutor(1) as pool:  # a thread of its own is outside the record
            pool.submit(rival.handle, position).result()
        raise RuntimeError("for good")

    consumer = ground.consumer(failing)
    assert consumer.handle(1) is None
    assert not consumer.failures
    assert ground.effects() == work.once(1)
