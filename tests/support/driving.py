"""One test for both halves of PyMongo: `async def` tests that drive sync and async clients alike.

A test says `await done(collection.insert_one({}))`. A sync client has done its work by then and `done` hands the result on;
an async client returns something to await. Handlers of sync clients become plain functions, so that each half of the
product is the one that runs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pymongo
import pytest
from pymongo import common
from pymongo.errors import PyMongoError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

import saferetry
from saferetry import Settings
from saferetry.lab.commands import CommandLog
from saferetry.lab.proxy import Proxy

QUICK = Settings(backoff_base_ms=1, backoff_cap_ms=5)
OPTIONS: dict[str, Any] = {
    "heartbeatFrequencyMS": 500,  # with polling, a server that said "not primary" is looked at again at once
    "serverMonitoringMode": "poll",
    "serverSelectionTimeoutMS": 2_000,
    "socketTimeoutMS": 5_000,
}
RawClient = pymongo.MongoClient[dict[str, Any]]
ProxyFactory = Callable[..., Proxy]
Work = Callable[..., Coroutine[Any, Any, Any]]


async def done(call: Any) -> Any:
    """Return the result of a call to a sync or an async client."""
    return await call if inspect.isawaitable(call) else call


def quick(**settings: Any) -> Settings:
    """Return settings with short waits."""
    return replace(QUICK, **settings)


def application_retry(attempts: int = 4) -> AsyncRetrying:
    """Return the generic retry that people put around their calls."""
    return AsyncRetrying(retry=retry_if_exception_type(PyMongoError), stop=stop_after_attempt(attempts), reraise=True)


class Api:
    """The sync or the async half; closes the clients it made when the test ends."""

    def __init__(self, name: str) -> None:
        self.is_async = name == "async"
        self._clients: list[Any] = []

    def client(self, uri: str, *, settings: Settings = QUICK, log: CommandLog | None = None, **options: Any) -> Any:
        """Return a saferetry client."""
        make = saferetry.AsyncMongoClient if self.is_async else saferetry.MongoClient
        return self._keep(make(uri, saferetry=settings, **self._options(uri, log, options)))

    def raw_client(self, uri: str, *, log: CommandLog | None = None, **options: Any) -> Any:
        """Return a plain PyMongo client with the same options."""
        make: Callable[..., Any] = pymongo.AsyncMongoClient if self.is_async else pymongo.MongoClient
        return self._keep(make(uri, **self._options(uri, log, options)))

    def handler(self, **options: Any) -> Callable[[Work], Callable[..., Any]]:
        """Decorate a coroutine function with `saferetry.handler`, as a plain function for the sync half."""

        def decorate(work: Work) -> Callable[..., Any]:
            def plain(*args: Any) -> Any:
                return run_without_waiting(work(*args))

            return saferetry.handler(**{"name": work.__name__, **options})(work if self.is_async else plain)

        return decorate

    async def concurrently(self, work: Work, count: int) -> None:
        """Run `work(0)`, `work(1)`, ... at once: in threads for the sync half, in tasks for the async one."""
        if self.is_async:
            # All of them end before one's error is raised: cancelling many of the driver's tasks at once can leave its
            # topology lock taken for ever (4.20.1 on Python 3.11, plain PyMongo too).
            ends = await asyncio.gather(*(work(number) for number in range(count)), return_exceptions=True)
            for error in filter(None, ends):
                raise error
            return
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda number: run_without_waiting(work(number)), range(count)))

    async def close(self) -> None:
        """Close all clients."""
        for client in self._clients:
            await done(client.close())

    def _keep(self, client: Any) -> Any:
        self._clients.append(client)
        return client

    @staticmethod
    def _options(uri: str, log: CommandLog | None, given: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in OPTIONS.items() if name not in uri}
        return {**own, "event_listeners": [log] if log else [], **given}


def run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in which nothing waits, since all its calls are a sync client's."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("work of a sync client must not wait for anything else")


@pytest.fixture(autouse=True)
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver look at a lost server again at once instead of after 0.5 s; its own suite does so (client_knobs)."""
    monkeypatch.setattr(common, "MIN_HEARTBEAT_INTERVAL", 0.02)


@pytest.fixture(params=["sync", "async"])
async def api(request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    """PyMongo's sync half, then its async half."""
    half = Api(request.param)
    yield half
    await half.close()
