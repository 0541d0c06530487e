"""A server that asks for a password, and users who may read and write one database and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pymongo import MongoClient

from tests.deployments.conftest import locked
from tests.support import Mongod, random_name
from tests.support.driving import RawClient, api, short_heartbeats

__all__ = ["api", "locked", "short_heartbeats"]


@pytest.fixture(scope="session")
def root(locked: Mongod) -> Iterator[RawClient]:
    """A client that may do everything."""
    with MongoClient[dict[str, Any]](locked.uri, username="root", password="root") as client:
        yield client


@dataclass(frozen=True)
class Place:
    """A database, and how to log in there.

    Attributes:
        name: of the database.
        root: a client that may do everything.
    """

    name: str
    root: RawClient

    def user(self, name: str, password: str) -> dict[str, Any]:
        """Make a user with readWrite on the database; return the client's options."""
        self.root[self.name].command("createUser", name, pwd=password, roles=["readWrite"])
        return {"username": name, "password": password, "authSource": self.name}

    def documents(self, collection: str = "c") -> list[dict[str, Any]]:
        """Return what is there."""
        return list(self.root[self.name][collection].find())


@pytest.fixture
def place(root: RawClient) -> Iterator[Place]:
    """A database of the test's own."""
    name = random_name("test")
    root[name].c.insert_one({"_id": 1, "n": 0})
    yield Place(name, root)
    root.admin.command("killAllSessions", [])
    root[name].command("dropAllUsersFromDatabase")
    root.drop_database(name)
