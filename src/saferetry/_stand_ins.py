"""What stands, to the rules, for a mongomock client: classes of the driver's whose methods reach a server in memory.

A stand-in never opens a connection: every method that could is replaced, by the table of guarded methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import wrapt
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database
from pymongo.synchronous.mongo_client import MongoClient
from pymongo.write_concern import WriteConcern

from saferetry._faults import Faults
from saferetry._memory import Memory, MemorySession
from saferetry._methods import GUARDED
from saferetry._seam import install_guard
from saferetry._settings import Settings


class StandInClient(MongoClient[Any]):
    """Stand in for a mongomock client."""

    _saferetry_is_own = False

    def __init__(self, mock: Any, settings: Settings) -> None:
        super().__init__("memory.invalid", connect=False, serverSelectionTimeoutMS=1)
        self._saferetry_mock = mock
        self._saferetry_memory = Memory.of(mock)
        self._saferetry_faults = Faults()
        install_guard(self, settings)

    def get_default_database(self, *args: Any, **kwargs: Any) -> Any:
        """Return the one that the mock's URI names."""
        return self._saferetry_raw_database(self._saferetry_mock.get_default_database(*args, **kwargs).name)

    def start_session(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - the driver's
        """Return a session for a transaction."""
        return MemorySession(self._saferetry_memory, self._saferetry_faults)

    def _saferetry_raw_database(self, name: str) -> Any:
        return stand_in_of(self._saferetry_mock[name], 1, self, is_own=True)


class StandInDatabase(Database[Any]):
    """Stand in for a mongomock database."""

    def __init__(self, client: StandInClient, mock: Any, *, is_own: bool = False) -> None:
        super().__init__(client, mock.name)
        self._saferetry_mock = mock
        self._saferetry_memory = client._saferetry_memory
        self._saferetry_faults = client._saferetry_faults
        self._saferetry_is_own = is_own

    def get_collection(self, name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - the driver's options say nothing here
        """Return a collection."""
        return stand_in_of(self._saferetry_mock[name], 2, self, is_own=self._saferetry_is_own)

    def command(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; nothing is at work that one of saferetry's own could stop."""
        return {"ok": 1.0} if self._saferetry_is_own else _run(self, "command", args, kwargs)


class StandInCollection(Collection[Any]):
    """Stand in for a mongomock collection."""

    def __init__(self, database: StandInDatabase, mock: Any, *, is_own: bool = False) -> None:
        super().__init__(database, mock.name, write_concern=WriteConcern(**mock.write_concern.document))
        self._saferetry_mock = mock
        self._saferetry_memory = database._saferetry_memory
        self._saferetry_faults = database._saferetry_faults
        self._saferetry_is_own = is_own

    def with_options(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - the driver's options say nothing here
        """Return itself."""
        return self

    def create_index(self, *args: Any, **kwargs: Any) -> Any:
        """Make an index; not one that lets markers expire, for which mongomock would look at its clock in every call."""
        return None if self._saferetry_is_own else _run(self, "create_index", args, kwargs)

    def find(self, *args: Any, **kwargs: Any) -> Any:
        """Return a cursor; one of saferetry's own with the driver's ``to_list``."""
        cursor = _run(self, "find", args, kwargs)
        return _OwnCursor(cursor) if self._saferetry_is_own else cursor


class _OwnCursor(wrapt.ObjectProxy):  # type: ignore[type-arg]  # generic to type checkers alone
    def to_list(self) -> list[Any]:
        return list(self.__wrapped__)


STAND_INS: tuple[type[Any], ...] = (StandInClient, StandInDatabase, StandInCollection)  # as the table of guarded methods


def _run(place: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return place._saferetry_memory.run(place, name, args, kwargs)


def stand_in_of(mock: Any, place: int, *args: Any, **kwargs: Any) -> Any:
    """Return the stand-in of a mongomock client (place 0), database (1) or collection (2).

    Args:
        mock: The one of mongomock's.
        place: As in the table of guarded methods.
        *args: What it belongs to.
        **kwargs: Its other arguments.
    """
    mock_type: Any = type(mock)
    make = stand_in_type(mock_type, place)
    return make(*args, mock, **kwargs) if place else make(mock, *args)


@functools.cache
def stand_in_type(mock_type: Any, place: int) -> Any:
    """Return the stand-in whose guarded methods have the signatures of a class of mongomock's.

    Args:
        mock_type: The class.
        place: 0 client, 1 database, 2 collection.
    """
    base = STAND_INS[place]
    methods = {
        name: _reaching(name, function, vars(base).get(name))
        for name in GUARDED[place]
        if inspect.isfunction(function := inspect.getattr_static(mock_type, name, None))
    }
    return type(base.__name__, (base,), methods)


def _reaching(name: str, function: Callable[..., Any], special: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a method with a signature of mongomock's that reaches the server in memory."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return special(self, *args, **kwargs) if special is not None else _run(self, name, args, kwargs)

    return call
