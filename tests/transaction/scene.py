"""What a test of guarantee "transaction" stands on: a database of its own, clients of one half of PyMongo, deliveries."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from pymongo.database import Database

from saferetry import RecordKey, Settings, propagate
from tests.support import CommandLog, Mongod, eventually, fail_command, running
from tests.support.driving import QUICK, Api, RawClient, done
from tests.support.older import HELD_SECONDS

KEY = RecordKey("orders", 0, 7, group="g", digest=b"content")
MARKERS = "saferetry_records"
only_async = pytest.mark.parametrize("api", ["async"], indirect=True)  # cancelling: threads know no such thing
only_sync = pytest.mark.parametrize("api", ["sync"], indirect=True)
Work = Callable[[Any], Coroutine[Any, Any, Any]]
HOUSEKEEPING = frozenset({"listIndexes", "createIndexes", "endSessions", "hello", "ping", "buildInfo"})


class Scene:
    """Be the ground of one test.

    Attributes:
        api: The sync or the async half.
        mongod: The server.
        admin: A plain client of it.
        name: The database's name: effects are in its collection `c`, markers are there as well.
        runs: How often handlers of deliveries ran.
    """

    def __init__(self, api: Api, mongod: Mongod, admin: RawClient, name: str) -> None:
        self.api = api
        self.mongod = mongod
        self.admin = admin
        self.name = name
        self.runs = 0

    @property
    def there(self) -> Database[dict[str, Any]]:
        """The database, looked at past the product."""
        return self.admin[self.name]

    def documents(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return what the collection of effects holds, sorted by `_id`."""
        return list(self.there.c.find(wanted, sort=[("_id", 1)]))

    def markers(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return the markers."""
        return list(self.there[MARKERS].find(wanted))

    @property
    def server(self) -> tuple[int, int]:
        """The server's major and minor version."""
        major, minor = self.mongod.version.split(".")[:2]
        return int(major), int(minor)

    def client(
        self, uri: str | None = None, *, log: CommandLog | None = None, settings: Settings = QUICK, **options: Any
    ) -> Any:
        """Return a saferetry client, of the server itself unless a URI is given; its markers are in the test's database."""
        if settings.marker_database is None:
            settings = replace(settings, marker_database=self.name)
        return self.api.client(uri or self.mongod.uri, log=log, settings=settings, **options)

    def handler(self, work: Work, client: Any = None, **options: Any) -> Callable[..., Any]:
        """Return work as a handler; without a client its transaction begins with the first operation."""

        async def counted(database: Any) -> Any:
            self.runs += 1
            return await work(database)

        counted.__name__ = work.__name__
        return self.api.handler(**{"key": KEY, "guarantee": "transaction", "client": client, **options})(counted)

    async def deliver(self, work: Work, client: Any = None, *, lazily: bool = False, **options: Any) -> Any:
        """Let a handler work on the test's database through a client, a new one unless it is given."""
        client = client or self.client()
        return await done(self.handler(work, None if lazily else client, **options)(client[self.name]))

    async def at_once(self, work: Callable[[int], Coroutine[Any, Any, Any]], count: int) -> None:
        """Run `work(0)`, `work(1)`, ... at once, in the record: in threads bound to it, or in tasks."""
        if self.api.is_async:
            await asyncio.gather(*(work(number) for number in range(count)))
            return

        def run(number: int) -> None:
            plainly(work(number))

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(propagate(run), range(count)))

    async def together(self, *works: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run several deliveries at once, in threads or tasks; return what they return or raise."""
        if self.api.is_async:
            return await asyncio.gather(*(work() for work in works), return_exceptions=True)
        with ThreadPoolExecutor(len(works)) as pool:
            futures = [pool.submit(plainly, work()) for work in works]
            return [future.exception() or future.result() for future in futures]

    async def sleep(self, seconds: float) -> None:
        """Let time pass for the other deliveries."""
        if self.api.is_async:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    async def until(self, predicate: Callable[[], object]) -> None:
        """Wait until something is true, and let the other deliveries go on meanwhile."""
        if not self.api.is_async:
            eventually(predicate)
            return
        async with asyncio.timeout(10):
            while not predicate():
                await asyncio.sleep(0.005)

    async def cancel_held(self, name: str, command: str, work: Coroutine[Any, Any, Any]) -> None:
        """Cancel some work while the server holds a command of its client's, whose appName this is.

        Cancelled by a timer it may be sending, where Python 3.11's wait_for, in the driver, forgets a cancellation.
        """
        seen: list[set[int]] = []

        def is_held() -> bool:
            seen.append({operation.opid for operation in running(self.admin, name)})
            return bool(set.intersection(*seen[-5:])) and len(seen) >= 5

        with held(self.admin, name, command):
            task = asyncio.ensure_future(work)
            await asyncio.to_thread(eventually, is_held)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


def held(admin: RawClient, name: str, command: str) -> AbstractContextManager[Callable[[], None]]:
    """Let the server hold one command of the client with this appName, for HELD_SECONDS."""
    return fail_command(
        admin, app_name=name, commands=[command], times=1, blockConnection=True, blockTimeMS=round(HELD_SECONDS * 1000)
    )


def plainly(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in which nothing waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("nothing may wait here")


def names(log: CommandLog) -> list[str]:
    """Return the names of the commands that a record is made of, in order."""
    return [name for name in log.names() if name not in HOUSEKEEPING]


def in_transaction(log: CommandLog) -> set[tuple[bytes, int]]:
    """Return the (lsid, txnNumber) under which transactions ran."""
    commands = [command for command in log.commands() if command.get("autocommit") is False]
    return {(bytes(command["lsid"]["id"]), command["txnNumber"]) for command in commands}


def without_ids(documents: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Return documents without their `_id`."""
    return [{name: value for name, value in document.items() if name != "_id"} for document in documents]


async def listed(cursor: Any) -> list[Any]:
    """Return what a cursor yields, one document after another, so that every batch is fetched when it is needed."""
    cursor = await done(cursor)
    if inspect.isasyncgen(cursor) or hasattr(type(cursor), "__aiter__"):
        return [document async for document in cursor]
    return list(cursor)
