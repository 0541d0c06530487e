"""A database for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import random_name
from tests.support.driving import RawClient, short_heartbeats

__all__ = ["short_heartbeats"]


@pytest.fixture
def name(admin: RawClient) -> Iterator[str]:
    """The name of a database of this test's own, emptied afterwards."""
    name = random_name("test")
    yield name
    admin.admin.command("killAllSessions", [])  # a transaction left open would hold up what follows for a minute
    for collection in admin[name].list_collection_names():  # dropDatabase takes 100 ms each time
        admin[name].drop_collection(collection)
