"""The names that the suite's tests import are swapped, and given back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pymongo
import pymongo.mongo_client
import pymongo.synchronous.encryption
import pytest
from pymongo.asynchronous import mongo_client as async_mongo_client
from pymongo.synchronous import mongo_client

import saferetry
from tests.driver_suite.swap import CLIENTS, Swap

PUBLIC = [(pymongo, "MongoClient"), (pymongo, "AsyncMongoClient"), (pymongo.mongo_client, "MongoClient")]
PRIVATE = [
    (mongo_client, "MongoClient"),
    (async_mongo_client, "AsyncMongoClient"),
    (pymongo.synchronous.encryption, "MongoClient"),
]


@pytest.fixture
def swap() -> Iterator[Swap]:
    installed = Swap()
    installed.install()
    yield installed
    installed.restore(public=True)


def are_swapped(names: list[tuple[ModuleType, str]]) -> set[bool]:
    return {getattr(module, name) in CLIENTS.values() for module, name in names}


def test_before_collection_every_name_of_a_client_is_ours(swap: Swap) -> None:
    assert are_swapped(PUBLIC + PRIVATE) == {True}


def test_after_collection_the_driver_has_its_own_back(swap: Swap) -> None:
    swap.restore(public=False)
    assert are_swapped(PUBLIC) == {True}
    assert are_swapped(PRIVATE) == {False}


def test_in_the_end_all_is_as_it_was(swap: Swap) -> None:
    swap.restore(public=True)
    assert are_swapped(PUBLIC + PRIVATE) == {False}


@pytest.mark.parametrize(("client", "unreached"), [(saferetry.MongoClient, []), (next(iter(CLIENTS)), ["test.late.Client"])])
def test_a_test_module_with_a_client_of_the_drivers_is_found(
    client: type, unreached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("test.late")
    monkeypatch.setattr(module, "Client", client, raising=False)
    monkeypatch.setitem(sys.modules, "test.late", module)
    assert Swap.unreached() == unreached
