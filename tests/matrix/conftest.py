"""Fixtures of the matrix: guarded clients whose commands are logged, and the ground that a row runs on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.matrix.runner import Ground
from tests.support import CommandLog, Mongod, Proxy, random_name
from tests.support.driving import Api, api, done, short_heartbeats

__all__ = ["api", "short_heartbeats"]


@pytest.fixture
async def guarded(api: Api, log: CommandLog, proxy: Callable[..., Proxy]) -> AsyncIterator[Callable[..., Any]]:
    """A factory of guarded clients whose commands are in `log`, all closed afterwards.

    Takes a URI, `settings=` and the client's options. It asks for `proxy` so that proxies are closed after the clients,
    whose `close` would wait for a server else.
    """
    clients: list[Any] = []

    def connect(uri: str, **options: Any) -> Any:
        clients.append(api.client(uri, log=log, **options))
        return clients[-1]

    yield connect
    for client in clients:
        await done(client.close())


@pytest.fixture
def ground(mongod: Mongod, admin: Any, log: CommandLog, guarded: Any, proxy: Callable[..., Proxy]) -> Iterator[Ground]:
    """Two databases of this test's own, one for the undisturbed run, and a guarded client behind a proxy."""
    name = random_name("test")
    yield Ground(mongod, admin, log, proxy(), guarded, name)
    for database in (admin[name], admin[name + "_plain"]):
        for collection in database.list_collection_names():  # dropDatabase takes 100 ms each time
            database.drop_collection(collection)
