"""Guarantee "transaction" on both halves of PyMongo."""

from __future__ import annotations

import asyncio
import socket
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from saferetry import _transaction_handling
from tests.support import Mongod, random_name
from tests.support.driving import Api, ProxyFactory, RawClient, api, short_heartbeats
from tests.transaction.scene import Scene

__all__ = ["api", "short_heartbeats"]


@pytest.fixture(autouse=True, scope="module")
def sockets_closed_on_cancellation() -> Iterator[None]:
    """Close what the driver forgets: the socket of a monitor that is cancelled while it connects, at a client's close.

    pymongo 4.20, ``_async_create_connection``: the garbage collector's warning would fail some later test.
    """
    connect = BaseSelectorEventLoop.sock_connect

    async def connect_or_close(self: BaseSelectorEventLoop, sock: socket.socket, address: Any) -> None:
        try:
            await connect(self, sock, address)
        except asyncio.CancelledError:
            sock.close()
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseSelectorEventLoop, "sock_connect", connect_or_close)
        yield


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine not pass for a statement that still runs in a slot."""
    monkeypatch.setattr(_transaction_handling, "PATIENCE_MS", 1_000)


@pytest.fixture
def hasty(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a statement that still runs in a slot be cancelled as soon as outside of tests."""
    monkeypatch.setattr(_transaction_handling, "PATIENCE_MS", 50)


@pytest.fixture
async def scene(api: Api, mongod: Mongod, admin: RawClient, proxy: ProxyFactory, patient: None) -> AsyncIterator[Scene]:
    """The ground of a test; its clients are closed before the proxies that they need for that."""
    name = random_name("test")
    yield Scene(api, mongod, admin, name)
    await api.close()
    admin.admin.command("killAllSessions", [])  # a transaction left open would hold up what follows for a minute
    for database in [name for name in admin.list_database_names() if name.startswith("test_")]:
        for collection in admin[database].list_collection_names():  # dropDatabase takes 100 ms each time
            admin[database].drop_collection(collection)
