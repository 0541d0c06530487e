"""The driver's private names, and whether the installed driver has them as the seam needs them.

Read and run with PyMongo 4.9.2, 4.13.2, 4.15.5, 4.16.0, 4.17.0, 4.18.3, 4.19.0 and 4.20.1. What is not there is None until a
client is made: `import saferetry` itself works with any driver, so that ``SAFERETRY_DISABLED=1`` does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import pymongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.asynchronous.mongo_client import AsyncMongoClient
from pymongo.common import BaseObject
from pymongo.operations import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.synchronous.client_session import ClientSession
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database
from pymongo.synchronous.mongo_client import MongoClient

from saferetry.errors import DriverMismatchError

REQUEST_TYPES = (InsertOne, UpdateOne, UpdateMany, ReplaceOne, DeleteOne, DeleteMany)
_FIRST_DRIVER = (4, 9)
_BINDS_SESSIONS = (4, 17)
_OF_A_SESSION = ("_implicit", "_server_session", "_client", "_transaction")
_OF_A_SERVER_SESSION = frozenset(  # asked of what stands in for one
    {"session_id", "transaction_id", "inc_transaction_id", "mark_dirty", "last_use", "dirty", "generation", "timed_out"}
)
_OF_A_TRANSACTION = frozenset({"active"})
_OF_A_CONNECTION = frozenset({"is_mongos", "is_repl", "supports_sessions", "max_wire_version"})


def _private(module: str, name: str | None = None) -> Any:
    try:
        found = importlib.import_module(f"pymongo.{module}")
    except ImportError:
        return None
    return getattr(found, name, None) if name else found


csot = _private("_csot")
Bulk = _private("synchronous.bulk", "_Bulk")
AsyncBulk = _private("asynchronous.bulk", "_AsyncBulk")


@functools.cache
def check_driver() -> None:
    """Compare the names and signatures that the seam uses with the installed driver.

    Raises:
        DriverMismatchError: Something is missing; nothing was sent.
    """
    missing = list(dict.fromkeys(_missing()))
    if missing:
        raise DriverMismatchError(
            f"PyMongo {pymongo.version} lacks what saferetry builds on: {', '.join(missing)}; nothing was sent. "
            "Install a PyMongo that saferetry's README names as run, or go on without protection: SAFERETRY_DISABLED=1"
        )


def _missing() -> Iterator[str]:
    if pymongo.version_tuple[:2] < _FIRST_DRIVER:
        yield "version 4.9 or newer"
    yield from _missing_of_half("synchronous", (MongoClient, Database, Collection), ClientSession, ("_Bulk", Bulk))
    asynchronous = (AsyncMongoClient, AsyncDatabase, AsyncCollection)
    yield from _missing_of_half("asynchronous", asynchronous, AsyncClientSession, ("_AsyncBulk", AsyncBulk))
    yield from (f"{request.__name__}._add_to_bulk" for request in REQUEST_TYPES if not hasattr(request, "_add_to_bulk"))
    if not hasattr(InsertOne, "_doc"):
        yield "InsertOne._doc"
    yield from (f"_csot.{name}" for name in ("get_timeout", "remaining") if not callable(getattr(csot, name, None)))


def _missing_of_half(
    half: str, makers: tuple[type[Any], type[Any], type[Any]], session: type[Any], named_bulk: tuple[str, Any]
) -> Iterator[str]:
    client, database, collection = makers
    yield from _lacks(client, "_ensure_session", ["self", "session"])
    yield from _lacks(client, "_run_operation", ["self", "operation"])
    if pymongo.version_tuple[:2] >= _BINDS_SESSIONS:
        yield from _lacks(client, "_get_bound_session", ["self"])
    if "_encrypter" not in _names_in([client]):
        yield f"{client.__name__}._encrypter"
    yield from _lacks(session, "_apply_to", ["self", "command", "is_retryable", "read_preference", "conn"])
    yield from _lacks(session, "end_session", ["self"])
    named = (session, _OF_A_SESSION), (database, ("_client",)), (collection, ("_database",)), (BaseObject, ("_write_concern",))
    for owner, names in named:
        stored = owner.__init__.__code__.co_names
        yield from (f"{owner.__name__}.{name}" for name in names if name not in stored)
    if not _can_change_class(session):
        yield f"a {session.__name__} that takes another class"
    # The server's session and their pool: from 4.18 on in a module that both halves share.
    beside = [owner for module in (f"{half}.client_session", "client_session_shared") for owner in _classes_of(module)]
    yield from (f"ServerSession.{name}" for name in sorted(_OF_A_SERVER_SESSION - _names_in([client, *beside])))
    yield from (f"Transaction.{name}" for name in sorted(_OF_A_TRANSACTION - _names_in([session, *beside])))
    yield from (f"Connection.{name}" for name in sorted(_OF_A_CONNECTION - _names_in(_classes_of(f"{half}.pool"))))
    name, bulk = named_bulk
    if bulk is None:
        yield name
        return
    yield from _lacks(bulk, "__init__", ["self", "collection", "ordered", "bypass_document_validation"])
    if "ops" not in bulk.__init__.__code__.co_names:
        yield f"{name}.ops"


def _lacks(owner: type[Any], name: str, parameters: list[str]) -> list[str]:
    function = inspect.getattr_static(owner, name, None)
    if inspect.isfunction(function) and list(inspect.signature(function).parameters)[: len(parameters)] == parameters:
        return []
    return [f"{owner.__name__}.{name}({', '.join(parameters)})"]


def _can_change_class(session: type[Any]) -> bool:
    try:
        object.__new__(session).__class__ = type("Probe", (session,), {})
    except TypeError:  # "object layout differs"
        return False
    return True


def _classes_of(module: str) -> list[type[Any]]:
    found = _private(module)
    return [value for value in vars(found).values() if inspect.isclass(value)] if found else []


def _names_in(owners: Iterable[type[Any]]) -> set[str]:
    """Return the names that the methods of some classes ask for or set."""
    found: set[str] = set()
    for owner in owners:
        for value in vars(owner).values():
            function = inspect.unwrap(value.fget) if isinstance(value, property) and value.fget else inspect.unwrap(value)
            code = getattr(function, "__code__", None)
            codes = [code] if code else []
            while codes:
                code = codes.pop()
                found.update(code.co_names)
                codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found
