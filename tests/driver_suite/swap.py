"""A pytest plugin for the driver's own tests: saferetry's clients in its clients' place, and each test in a record if asked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pymongo
import pytest

import saferetry

CLIENTS: Mapping[type[Any], type[Any]] = {
    pymongo.MongoClient: saferetry.MongoClient,
    pymongo.AsyncMongoClient: saferetry.AsyncMongoClient,
}
DRIVER_PACKAGES = ("pymongo", "gridfs", "bson")
PUBLIC = ("pymongo", "pymongo.mongo_client")  # where users import a client from, at any time
SUITE = "test"
RECORD_BUDGET = 600.0  # seconds; the suite's tests are not to end for want of time


class Swap:
    """Hold what was put in place of the driver's names, and put it back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, Any]] = []

    def install(self) -> None:
        """Put our clients wherever a module of the driver has its own."""
        for module in _modules(DRIVER_PACKAGES):
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value in CLIENTS:
                    self._replaced.append((module, name, value))
                    setattr(module, name, CLIENTS[value])

    def restore(self, *, public: bool) -> None:
        """Give the driver's modules their own clients back, those that users import from only if `public`.

        The driver asks ``isinstance(client, MongoClient)`` of its own globals, and ours is only one kind of client.
        """
        kept = []
        for module, name, value in self._replaced:
            if module.__name__ in PUBLIC and not public:
                kept.append((module, name, value))
            else:
                setattr(module, name, value)
        self._replaced = kept

    @staticmethod
    def unreached() -> list[str]:
        """Return the names in the suite's modules that still are a client of the driver's."""
        return [
            f"{module.__name__}.{name}"
            for module in _modules([SUITE])
            for name, value in vars(module).items()
            if isinstance(value, type) and value in CLIENTS
        ]


def _modules(packages: Iterable[str]) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and any(name == package or name.startswith(package + ".") for package in packages)
    ]


_SWAP = pytest.StashKey[Swap]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say whose clients the tests use."""
    parser.addoption("--swap", action="store_true", help="saferetry's clients in place of the driver's")
    parser.addoption("--in-record", action="store_true", help="each test inside a saferetry.record")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Swap before the suite's conftest imports the driver's names."""
    if early_config.known_args_namespace.swap:
        early_config.stash[_SWAP] = swap = Swap()
        swap.install()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Restore what the driver itself uses, now that all tests have imported their names.

    Raises:
        pytest.UsageError: A module of the suite got hold of the driver's client.
    """
    swap = session.config.stash.get(_SWAP, None)
    if swap is None:
        return
    swap.restore(public=False)
    if unreached := swap.unreached():
        raise pytest.UsageError(f"not swapped: {', '.join(unreached)}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the rest."""
    if swap := config.stash.get(_SWAP, None):
        swap.restore(public=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run the test inside a record: its coroutines are run in this context too."""
    scope: Any = contextlib.nullcontext()
    if item.config.option.in_record:
        scope = saferetry.record(item.nodeid, budget=RECORD_BUDGET, name="driver-suite")
    with scope:
        return (yield)
