"""Guarded clients that are not PyMongo's: wrapt proxies of mongomock's client, databases and collections.

Methods of the table go through the same rules as PyMongo's, with a stand-in and its server in memory as the driver; everything
else is mongomock's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pymongo
import wrapt
from pymongo.synchronous.mongo_client import MongoClient

from saferetry import _retry
from saferetry._call import WriteCall
from saferetry._command import Target, Terms
from saferetry._execution import Execution, JoinedCall
from saferetry._methods import GUARDED, Kind, Method
from saferetry._parts import has_multi
from saferetry._plans import Plan
from saferetry._record import current_record
from saferetry._seam import Guard, guard_of
from saferetry._settings import Settings
from saferetry._stand_ins import stand_in_of, stand_in_type

_MAKERS = ("get_database", "get_default_database", "get_collection", "with_options")
_CUT = (Kind.BULK, Kind.INSERT_MANY)


class ForeignMethod(Method):
    """Be one guarded method of a class of mongomock's: as PyMongo's, but a bulk is one command, whose result is mongomock's."""

    def _plan(self, target: Target, arguments: dict[str, Any], terms: Terms) -> Plan:
        record = current_record()
        if record is not None and record.derived_ids is not None:
            return super()._plan(target, arguments, terms)
        plan = super()._plan(target, arguments, replace(terms, foreign=True))
        statements = arguments.get("requests", arguments.get("documents"))
        if self.kind in _CUT and isinstance(statements, list):
            plan.positions, plan.multi = range(len(statements)), plan.multi or has_multi(statements)
        return plan


class Foreign(wrapt.ObjectProxy):  # type: ignore[type-arg]  # generic to type checkers alone
    """Be a guarded mongomock client, database or collection."""

    def __init__(self, mock: Any, client: Foreign | None, stand_in: Any) -> None:
        super().__init__(mock)
        self._self_client = self if client is None else client
        self._self_stand_in = stand_in

    def __getattr__(self, name: str) -> Any:
        return _adopt(self, getattr(self.__wrapped__, name))

    def __getitem__(self, name: Any) -> Any:
        return _adopt(self, self.__wrapped__[name])

    def __enter__(self) -> Foreign:
        self.__wrapped__.__enter__()
        return self

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    @property
    def _saferetry_guard(self) -> Guard:
        return guard_of(self._self_client._self_stand_in)

    def _saferetry_stand_in(self) -> Any:
        return self._self_stand_in


class _Database(Foreign):
    @property
    def client(self) -> Foreign:
        return self._self_client


class _Collection(Foreign):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # says that there is no such method

    @property
    def database(self) -> Any:
        return _adopt(self._self_client, self.__wrapped__.database)


class ForeignCursor(wrapt.ObjectProxy):  # type: ignore[type-arg]  # generic to type checkers alone
    """Be a cursor of a guarded mongomock collection; in a record's transaction its first document is asked for in there."""

    def __init__(self, cursor: Any, collection: Foreign, execution: Execution | None) -> None:
        super().__init__(cursor)
        self._self_collection = collection
        self._self_execution = execution

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__wrapped__, name)
        return self._saferetry_itself(value) if inspect.ismethod(value) else value

    def __getitem__(self, index: Any) -> Any:
        return self._saferetry_itself(self.__wrapped__.__getitem__)(index)

    def __iter__(self) -> ForeignCursor:
        return self

    def __next__(self) -> Any:
        return self._saferetry_itself(self.__wrapped__.__next__)()

    def __enter__(self) -> ForeignCursor:
        return self

    @property
    def collection(self) -> Foreign:
        return self._self_collection

    def clone(self) -> ForeignCursor:
        return ForeignCursor(self.__wrapped__.clone(), self._self_collection, self._self_execution)

    def _saferetry_itself(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that runs in the record's transaction, if there is one, and returns this cursor for mongomock's."""
        execution: Execution | None = self._self_execution

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if execution is None:
                made = method(*args, **kwargs)
            else:
                with execution.lock, execution.fetching():
                    made = method(*args, **kwargs)
            return self if made is self.__wrapped__ else made

        return call


PROXIES: tuple[type[Foreign], ...] = (Foreign, _Database, _Collection)  # as the table of guarded methods


def is_foreign(client: Any) -> bool:
    """Whether it is a mongomock client, wrapped or not; mongomock is not imported for that."""
    mongomock = sys.modules.get("mongomock")
    return mongomock is not None and isinstance(client, mongomock.MongoClient)


def patched_client() -> Any:
    """Return what stands for ``pymongo.MongoClient`` inside ``mongomock.patch()``, or None outside."""
    current: Any = pymongo.MongoClient
    is_patched = current is not MongoClient and str(getattr(current, "__module__", "")).startswith("mongomock.")
    return current if is_patched else None


def wrap_foreign(mock: Any, settings: Settings) -> Any:
    """Return a guarded mongomock client."""
    return _proxy(mock, 0, None, stand_in_of(mock, 0, settings))


def _adopt(owner: Foreign, made: Any) -> Any:
    """Make the databases and collections that something returned guarded ones."""
    client = owner._self_client
    if made is owner.__wrapped__:
        return owner
    if made is client.__wrapped__:
        return client
    mongomock = sys.modules["mongomock"]
    if type(made) is mongomock.Database:
        return _proxy(made, 1, client, stand_in_of(made, 1, client._self_stand_in))
    if type(made) is mongomock.Collection:
        database = stand_in_of(made.database, 1, client._self_stand_in)
        return _proxy(made, 2, client, stand_in_of(made, 2, database))
    if type(made) is mongomock.collection.Cursor:
        record = current_record()
        return ForeignCursor(made, owner, None if record is None else record.transaction)
    return made


def _proxy(mock: Any, place: int, client: Foreign | None, stand_in: Any) -> Any:
    mock_type: Any = type(mock)
    return _proxy_type(mock_type, place)(mock, client, stand_in)


@functools.cache
def _proxy_type(mock_type: Any, place: int) -> Any:
    """Return the class of guarded ones for a class of mongomock's."""
    stand_in = stand_in_type(mock_type, place)
    base = PROXIES[place]
    methods: dict[str, Any] = {
        name: _making(getattr(mock_type, name)) for name in _MAKERS if inspect.getattr_static(mock_type, name, None) is not None
    }
    for name, kind in GUARDED[place].items():
        if name in vars(stand_in):
            methods[name] = _guarded(ForeignMethod(name, kind, stand_in))
    return type(mock_type.__name__, (base,), methods)


def _making(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _adopt(self, function(self.__wrapped__, *args, **kwargs))

    return make


def _guarded(method: ForeignMethod) -> Callable[..., Any]:
    @functools.wraps(method.original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        owner = self._self_stand_in
        args = tuple(map(_unwrapped, args))
        kwargs = {name: _unwrapped(value) for name, value in kwargs.items()}
        opened = method.open(owner, args, kwargs)
        if opened is None:
            made = method.original(owner, *args, **kwargs)
        elif isinstance(opened, JoinedCall):
            made = _retry.join(opened)
        else:
            made = _retry.write(opened) if isinstance(opened, WriteCall) else _retry.read(opened)
        return _adopt(self, made)

    return call


def _unwrapped(value: Any) -> Any:
    return value.__wrapped__ if isinstance(value, Foreign) else value
