"""Nothing that was given up applies later, and nobody else's operation is hurt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

import pymongo
import pytest
from pymongo import InsertOne
from pymongo.errors import AutoReconnect, PyMongoError

from saferetry import AsyncMongoClient, Outcome, record
from tests.support import (
    CommandLog,
    Mongod,
    app_name,
    eventually,
    hold_deletes,
    hold_inserts,
    hold_updates,
    running,
    wait_until_idle,
)
from tests.support.driving import OPTIONS, Api, ProxyFactory, RawClient, done, quick
from tests.support.older import PATIENCE

Collection = Any
Hold = Callable[[RawClient, str], AbstractContextManager[Callable[[], None]]]
DOCUMENT = {"_id": 1, "n": 0}


def held_delete(admin: RawClient, namespace: str) -> AbstractContextManager[Callable[[], None]]:
    return hold_deletes(admin)


HELD_WRITES: dict[str, tuple[Hold, Callable[[Collection], Any]]] = {
    "insert_one": (hold_inserts, lambda c: c.insert_one({"_id": 2, "n": 0})),
    "insert_many": (hold_inserts, lambda c: c.insert_many([{"_id": 2, "n": 0}, {"_id": 3, "n": 0}])),
    "bulk_write": (hold_inserts, lambda c: c.bulk_write([InsertOne({"_id": 2, "n": 0})])),
    "update_one": (hold_updates, lambda c: c.update_one({"_id": 1}, {"$inc": {"n": 1}})),
    "update_many": (hold_updates, lambda c: c.update_many({}, {"$inc": {"n": 1}})),
    "delete_one": (held_delete, lambda c: c.delete_one({"_id": 1})),
    "delete_many": (held_delete, lambda c: c.delete_many({})),
}


@pytest.fixture
def name() -> str:
    """The appName of the client under test."""
    return app_name()


@pytest.fixture
async def client(mongod: Mongod, log: CommandLog, name: str) -> AsyncIterator[pymongo.AsyncMongoClient[dict[str, Any]]]:
    """A guarded async client."""
    async with AsyncMongoClient[dict[str, Any]](
        mongod.uri, saferetry=quick(max_time_ms=3_333), event_listeners=[log], appName=name, **{**OPTIONS, **PATIENCE}
    ) as guarded:
        yield guarded


async def until(predicate: Callable[[], Any]) -> None:
    """Wait without blocking the event loop."""
    await asyncio.to_thread(eventually, predicate)


async def cancel_when(predicate: Callable[[], Any], work: Coroutine[Any, Any, Any]) -> None:
    """Run some work and cancel it once the predicate holds."""
    task = asyncio.ensure_future(work)
    await until(predicate)
    now = asyncio.get_running_loop().time
    enough = now() + 0.2  # PyMongo 4.9 blocks the event loop at each turn: see tests.support.older
    for _ in range(10):  # Python 3.11's wait_for, in which the driver sends, forgets a cancellation at its very end
        await asyncio.sleep(0)
        if now() > enough:
            break
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("method", HELD_WRITES)
async def test_a_cancelled_write_that_the_server_still_holds_applies_nothing_later(
    admin: RawClient,
    client: pymongo.AsyncMongoClient[dict[str, Any]],
    database_name: str,
    name: str,
    method: str,
) -> None:
    admin[database_name].c.insert_one(DOCUMENT)
    hold, write = HELD_WRITES[method]
    with hold(admin, f"{database_name}.c"):
        async with record(("t", 0, 1)) as current:
            await cancel_when(
                lambda: any(operation.held_by for operation in running(admin, name)), write(client[database_name].c)
            )
            assert [view.outcome for view in current.writes] == [Outcome.UNKNOWN]
    wait_until_idle(admin, name)
    assert list(admin[database_name].c.find()) == [DOCUMENT]


async def test_wait_for_on_a_held_write_ends_in_time_and_applies_nothing_later(
    admin: RawClient, client: pymongo.AsyncMongoClient[dict[str, Any]], database_name: str, name: str
) -> None:
    with hold_inserts(admin, f"{database_name}.c"):
        async with record(("t", 0, 1)):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    await asyncio.wait_for(client[database_name].c.insert_one({}), 0.2)
    wait_until_idle(admin, name)
    assert admin[database_name].c.count_documents({}) == 0


async def test_cancelling_hurts_no_operation_of_another_client(
    admin: RawClient, client: pymongo.AsyncMongoClient[dict[str, Any]], database_name: str, mongod: Mongod, name: str
) -> None:
    others = app_name()
    async with pymongo.AsyncMongoClient[dict[str, Any]](mongod.uri, appName=others) as other:
        with hold_updates(admin, f"{database_name}.c"):
            admin[database_name].c.insert_one(DOCUMENT)
            bystander = asyncio.create_task(other[database_name].c.update_many({}, {"$inc": {"n": 10}}))
            await until(lambda: any(operation.held_by for operation in running(admin, others)))
            async with record(("t", 0, 1)):
                await cancel_when(
                    lambda: any(operation.held_by for operation in running(admin, name)),
                    client[database_name].c.update_many({}, {"$inc": {"n": 1}}),
                )
        await bystander
    wait_until_idle(admin, name)
    assert admin[database_name].c.find_one() == {"_id": 1, "n": 10}


@pytest.mark.parametrize("is_recorded", [True, False], ids=["in_a_record", "outside"])
async def test_cancelling_hurts_no_other_operation_of_the_same_client(
    admin: RawClient, client: pymongo.AsyncMongoClient[dict[str, Any]], database_name: str, name: str, is_recorded: bool
) -> None:
    async def in_a_record_of_its_own() -> None:
        async with record(("t", 0, 2)):
            await client[database_name].c.insert_one({"_id": "bystander"})

    async def outside() -> None:
        await client[database_name].c.insert_one({"_id": "bystander"})

    with hold_inserts(admin, f"{database_name}.c"):
        bystander = asyncio.create_task(in_a_record_of_its_own() if is_recorded else outside())
        await until(lambda: any(operation.held_by for operation in running(admin, name)))
        async with record(("t", 0, 1)):
            await cancel_when(
                lambda: sum(bool(operation.held_by) for operation in running(admin, name)) == 2,
                client[database_name].c.insert_one({"_id": "cancelled"}),
            )
    await bystander
    wait_until_idle(admin, name)
    assert list(admin[database_name].c.find()) == [{"_id": "bystander"}]


async def test_a_cancelled_write_outside_a_record_sends_no_kill(
    admin: RawClient, client: pymongo.AsyncMongoClient[dict[str, Any]], database_name: str, name: str, log: CommandLog
) -> None:
    with hold_inserts(admin, f"{database_name}.c"):
        await cancel_when(
            lambda: any(operation.held_by for operation in running(admin, name)),
            client[database_name].c.insert_one({"_id": 1}),
        )
    wait_until_idle(admin, name)
    assert log.sends("killSessions") == 0


async def test_a_cancelled_write_kills_its_own_session_only(
    admin: RawClient, client: pymongo.AsyncMongoClient[dict[str, Any]], database_name: str, name: str, log: CommandLog
) -> None:
    with hold_inserts(admin, f"{database_name}.c"):
        async with record(("t", 0, 1)):
            await cancel_when(
                lambda: any(operation.held_by for operation in running(admin, name)),
                client[database_name].c.insert_one({"_id": 1}),
            )
    (kill,) = log.commands("killSessions")
    (insert,) = log.commands("insert")
    assert kill["killSessions"] == [insert["lsid"]]
    assert kill["lsid"] != insert["lsid"]


async def test_a_cancelled_write_is_left_to_the_server_where_cancel_is_off(
    admin: RawClient, database_name: str, mongod: Mongod, name: str, log: CommandLog
) -> None:
    async with AsyncMongoClient[dict[str, Any]](
        mongod.uri, saferetry=quick(cancel=False), event_listeners=[log], appName=name, **OPTIONS
    ) as client:
        with hold_inserts(admin, f"{database_name}.c"):
            async with record(("t", 0, 1)):
                await cancel_when(
                    lambda: any(operation.held_by for operation in running(admin, name)),
                    client[database_name].c.insert_one({"_id": 1}),
                )
        wait_until_idle(admin, name)
    assert log.sends("killSessions") == 0
    assert admin[database_name].c.count_documents({}) == 1


async def test_a_write_after_a_cancelled_one_is_another_write(
    admin: RawClient, client: pymongo.AsyncMongoClient[dict[str, Any]], database_name: str, name: str
) -> None:
    with hold_inserts(admin, f"{database_name}.c"):
        async with record(("t", 0, 1)):
            await cancel_when(
                lambda: any(operation.held_by for operation in running(admin, name)),
                client[database_name].c.insert_one({"x": 1}),
            )
    wait_until_idle(admin, name)
    async with record(("t", 0, 2)):
        await client[database_name].c.insert_one({"x": 2})
    assert [document["x"] for document in admin[database_name].c.find()] == [2]


async def test_a_write_cancelled_in_back_off_counts_as_unknown_and_its_repetition_takes_effect_once(
    admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    admin[database_name].c.insert_one(DOCUMENT)
    lossy = proxy(command="update", times=2)
    settings = quick(backoff_base_ms=60_000, backoff_cap_ms=60_000, seed=1)
    async with AsyncMongoClient[dict[str, Any]](lossy.uri(), saferetry=settings, event_listeners=[log], **OPTIONS) as client:
        collection = client[database_name].c
        async with record(("t", 0, 1)) as current:
            await cancel_when(
                lambda: current.writes and current.writes[0].outcome is Outcome.UNKNOWN,
                collection.update_one({"_id": 1}, {"$inc": {"n": 1}}),
            )
            assert [(view.outcome, view.calls) for view in current.writes] == [(Outcome.UNKNOWN, 1)]
            await collection.update_one({"_id": 1}, {"$inc": {"n": 1}})
    assert lossy.hits == 2
    assert log.sends("update") == 3
    assert admin[database_name].c.find_one() == {"_id": 1, "n": 1}


@pytest.mark.parametrize("retry_on", [Exception, BaseException])
async def test_a_cancelled_handler_is_not_executed_again_and_not_handed_over(
    admin: RawClient,
    client: pymongo.AsyncMongoClient[dict[str, Any]],
    database_name: str,
    name: str,
    log: CommandLog,
    retry_on: type[BaseException],
) -> None:
    failures: list[object] = []
    api = Api("async")

    @api.handler(retry_on=retry_on, recoverer=failures.append)
    async def on_message(message: str) -> None:
        await client[database_name].c.insert_one({"_id": message})

    with hold_inserts(admin, f"{database_name}.c"):
        await cancel_when(lambda: any(operation.held_by for operation in running(admin, name)), on_message("m"))
    wait_until_idle(admin, name)
    assert log.sends("insert") == 1
    assert failures == []


async def test_a_held_write_that_was_given_up_after_its_attempts_applies_nothing_later(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, name: str, log: CommandLog
) -> None:
    collection = api.client(mongod.uri, log=log, settings=quick(max_attempts=1), appName=name, socketTimeoutMS=200)[
        database_name
    ].c
    with hold_inserts(admin, f"{database_name}.c"), record(("t", 0, 1)), pytest.raises(PyMongoError) as caught:
        await done(collection.insert_one({"_id": 1}))
    wait_until_idle(admin, name)
    assert caught.value.timeout  # of the socket, or on 4.4 of the server, where the limit ends the hold
    assert admin[database_name].c.count_documents({}) == 0


async def test_an_update_many_whose_connection_broke_while_it_was_held_applies_nothing_later(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, name: str
) -> None:
    admin[database_name].c.insert_one(DOCUMENT)
    wire = proxy()
    collection = api.client(wire.uri(appName=name))[database_name].c
    with hold_updates(admin, f"{database_name}.c"):

        def break_when_held() -> None:
            eventually(lambda: any(operation.held_by for operation in running(admin, name)))
            wire.disconnect()

        breaking = asyncio.get_running_loop().run_in_executor(None, break_when_held)
        with record(("t", 0, 1)), pytest.raises(AutoReconnect):
            await done(collection.update_many({}, {"$inc": {"n": 1}}))
        await breaking
    wait_until_idle(admin, name)
    assert admin[database_name].c.find_one() == DOCUMENT
