"""What the soak stands on: sizes, counted objects, counted sessions."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from tests.conftest import FIGURE
from tests.support import Mongod
from tests.support.driving import RawClient, api, short_heartbeats

__all__ = ["api", "short_heartbeats"]

IS_LONG = bool(os.environ.get("SOAK_LONG"))  # make soak


def size(long: int, small: int) -> int:
    """Return how much of something there is."""
    return long if IS_LONG else small


def objects() -> int:
    """Count all objects that the garbage collector knows, once what nobody needs is gone."""
    gc.collect()
    return len(gc.get_objects())


def own_objects() -> Counter[str]:
    """Count the objects of saferetry's own classes."""
    gc.collect()
    kinds = (type(found) for found in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("saferetry."))


def blocks() -> int:
    """Count the allocated blocks of memory, objects that the garbage collector does not know included."""
    gc.collect()
    return sys.getallocatedblocks()


def sessions(admin: RawClient) -> int:
    """Count the sessions that the server knows."""
    status: dict[str, Any] = admin.admin.command("serverStatus")
    return int(status["logicalSessionRecordCache"]["activeSessionsCount"])


@pytest.fixture(scope="session")
def roomy() -> Iterator[Mongod]:
    """A server whose cache holds documents of 15 MB, several in a transaction."""
    with Mongod() as server:
        with MongoClient[dict[str, Any]](server.uri) as client:
            client.admin.command("setParameter", 1, wiredTigerEngineRuntimeConfig="cache_size=4096M")
        yield server


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Keep a measured figure for the end of the run."""

    def keep(text: str) -> None:
        record_property(FIGURE, text)

    return keep
