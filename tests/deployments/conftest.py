"""Deployments that lack something, each a server and the options of a client; on both halves of PyMongo."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.write_concern import WriteConcern

from saferetry import Settings
from tests.support import CommandLog, Mongod, Proxy, random_name
from tests.support.driving import QUICK, Api, ProxyFactory, RawClient, api, quick, short_heartbeats

__all__ = ["api", "short_heartbeats"]


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    """A replica set that asks for a password; its root is root:root."""
    key_file = tmp_path_factory.mktemp("auth") / "key"
    key_file.write_text(secrets.token_hex(32))
    key_file.chmod(0o600)
    with Mongod(extra_args=["--auth", "--keyFile", str(key_file)]) as server:
        with MongoClient[dict[str, Any]](server.uri) as client:
            client.admin.command("createUser", "root", pwd="root", roles=["root"])
        yield server


@dataclass
class Deployment:
    """Be one deployment, with a database of the test's own.

    Attributes:
        name: Its name in docs/deployments.md.
        server: The server.
        there: A plain client that may see everything.
        proxy: What the clients go through.
        log: What they send.
        database: The database's name.
        options: The clients' options.
    """

    name: str
    api: Api
    server: Mongod
    there: RawClient
    proxy: Proxy
    log: CommandLog
    database: str
    options: dict[str, Any] = field(default_factory=dict)
    unacknowledged: bool = False

    def client(self, settings: Settings = QUICK, **options: Any) -> Any:
        """Return a saferetry client through the proxy."""
        return self.api.client(self.proxy.uri(), settings=settings, log=self.log, **self.options, **options)

    def collection(self, settings: Settings = QUICK, **options: Any) -> Any:
        """Return a collection of a new client."""
        return self.of(self.client(settings, **options))

    def of(self, client: Any) -> Any:
        """Return the collection, through a client."""
        concern = {"write_concern": WriteConcern(w=0)} if self.unacknowledged else {}
        return client[self.database].get_collection("c", **concern)

    def documents(self) -> list[dict[str, Any]]:
        """Return what is stored."""
        return list(self.there[self.database].c.find({}, {"_id": 0}, sort=[("n", 1)]))

    def with_markers(self, **settings: Any) -> Settings:
        """Return settings with the markers in the test's database."""
        return quick(marker_database=self.database, **settings)


NAMES = (
    "replica set",
    "standalone",
    "retryWrites=false",
    "w=0 in the URI",
    "w:0 on the collection",
    "user with readWrite",
)
NUMBERED = ("replica set", "user with readWrite")
UNNUMBERED = ("standalone", "retryWrites=false")
UNACKNOWLEDGED = ("w=0 in the URI", "w:0 on the collection")


@pytest.fixture
async def deployment(
    request: pytest.FixtureRequest, api: Api, log: CommandLog, proxy: ProxyFactory
) -> AsyncIterator[Deployment]:
    """The deployment that the test's parameter names."""
    name: str = request.param
    fixture = {"standalone": "standalone", "user with readWrite": "locked"}.get(name, "mongod")
    server: Mongod = request.getfixturevalue(fixture)
    root: dict[str, Any] = {"username": "root", "password": "root"} if fixture == "locked" else {}
    database = random_name("test")
    with MongoClient[dict[str, Any]](server.uri, **root) as there:
        options: dict[str, Any] = {}
        if name == "retryWrites=false":
            options["retryWrites"] = False
        if name == "w=0 in the URI":
            options["w"] = 0
        if root:
            there[database].command("createUser", "app", pwd="pwd", roles=["readWrite"])
            options = {"username": "app", "password": "pwd", "authSource": database}
        front = proxy(target_port=server.port)
        there[database].c.insert_many([{"n": 1}, {"n": 2}])
        yield Deployment(
            name, api, server, there, front, log, database, options, unacknowledged=name == "w:0 on the collection"
        )
        await api.close()
        for collection in there[database].list_collection_names():
            there[database].drop_collection(collection)


def on(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by deployments."""
    return pytest.mark.parametrize("deployment", names, indirect=True)
