"""The guarded client, database and collection, sync and async: the driver's own classes with guarded methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pymongo.asynchronous.collection import AsyncCollection as DriverAsyncCollection
from pymongo.asynchronous.database import AsyncDatabase as DriverAsyncDatabase
from pymongo.asynchronous.mongo_client import AsyncMongoClient as DriverAsyncMongoClient
from pymongo.synchronous.collection import Collection as DriverCollection
from pymongo.synchronous.database import Database as DriverDatabase
from pymongo.synchronous.mongo_client import MongoClient as DriverMongoClient

from saferetry import _retry
from saferetry._call import WriteCall
from saferetry._driver import check_driver
from saferetry._execution import JoinedCall, State
from saferetry._foreign import is_foreign, patched_client, wrap_foreign
from saferetry._methods import GUARDED, Kind, Method
from saferetry._moulds import NO_MOULDS, Mould
from saferetry._seam import (
    ASYNC_DRIVER_TYPES,
    DRIVER_TYPES,
    execution_of,
    fetch_in,
    guard_of,
    guarded_client,
    install_guard,
    lend_session,
)
from saferetry._settings import Settings
from saferetry.errors import ConfigurationError

if TYPE_CHECKING:
    from bson.codec_options import TypeRegistry

Client = TypeVar("Client")
Document = TypeVar("Document", bound=Mapping[str, Any])
Guarded = TypeVar("Guarded", bound=type[Any])

_NAMING = (*DRIVER_TYPES[:2], *ASYNC_DRIVER_TYPES[:2])  # clients and databases, whose items and attributes are made by name
_MOST_NAMES = 1_000  # that one client or database remembers

# The driver's methods that return a database or a collection; its __getattr__ goes through __getitem__, a user's may not.
_MAKERS = ("__getitem__", "get_database", "get_default_database", "get_collection", "with_options", "create_collection")


def _guarded(cls: Guarded) -> Guarded:
    """Put the guarded methods of the table on a subclass of one of the driver's classes."""
    table = next(
        GUARDED[place] for types in (DRIVER_TYPES, ASYNC_DRIVER_TYPES) for place in range(3) if issubclass(cls, types[place])
    )
    base = cls.__bases__[0]
    for name, kind in table.items():
        if hasattr(base, name):  # an older driver has fewer
            setattr(cls, name, _guarded_method(name, kind, base))
    for name in _MAKERS:
        if hasattr(base, name):
            setattr(cls, name, _adopting(getattr(cls, name)))
    if base in _NAMING:
        cls._saferetry_moulds = NO_MOULDS
        cls.__getitem__, cls.__getattr__ = _by_name(cls.__getitem__), _by_name(cls.__getattr__)

    def init_subclass(subclass: Any, /, **kwargs: Any) -> None:
        _adopt_what_it_makes(cls, subclass, **kwargs)

    cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]  # typeshed: one without arguments
    return cls


def _adopt_what_it_makes(known: Any, subclass: Any, /, **kwargs: Any) -> None:
    """Make guarded what a user's subclass returns where it makes databases and collections in a way of its own."""
    super(known, subclass).__init_subclass__(**kwargs)
    for name in (*_MAKERS, "__getattr__"):
        own = getattr(subclass, name, None)
        if own is not None and own is not getattr(known, name, None):
            setattr(subclass, name, _adopting(own))


def _guarded_method(name: str, kind: Kind, driver_type: type[Any]) -> Callable[..., Any]:
    method = Method(name, kind, driver_type)
    original = method.original
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            call = method.open(self, args, kwargs)
            if call is None:
                return await original(self, *args, **kwargs)
            if isinstance(call, JoinedCall):
                return await _retry.join_async(call)
            return await (_retry.write_async(call) if isinstance(call, WriteCall) else _retry.read_async(call))

        return call_async

    if issubclass(driver_type, ASYNC_DRIVER_TYPES):  # a cursor, whose first command is sent later

        @functools.wraps(original)
        def call_cursor(self: Any, *args: Any, **kwargs: Any) -> Any:
            call = method.open(self, args, kwargs)
            return call.now() if isinstance(call, JoinedCall) else original(self, *args, **kwargs)

        return call_cursor

    @functools.wraps(original)
    def call_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = method.open(self, args, kwargs)
        if call is None:
            return original(self, *args, **kwargs)
        if isinstance(call, JoinedCall):
            return _retry.join(call)
        return _retry.write(call) if isinstance(call, WriteCall) else _retry.read(call)

    return call_sync


def _adopting(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make the databases and collections that a method returns guarded ones."""
    if inspect.iscoroutinefunction(make):

        @functools.wraps(make)
        async def make_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            made = await make(self, *args, **kwargs)
            own_type: Any = type(made)
            if (guarded := _GUARDED_TYPES.get(own_type)) is None:
                return _adopt(made)
            made.__class__ = guarded
            return made

        return make_async

    @functools.wraps(make)
    def make_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(self, *args, **kwargs)
        own_type: Any = type(made)
        if (guarded := _GUARDED_TYPES.get(own_type)) is None:
            return _adopt(made)
        made.__class__ = guarded
        return made

    return make_sync


def _by_name(make: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Let what a name stands for be made as it was made before: a new object each time, as the driver's is."""

    @functools.wraps(make)
    def get(self: Any, name: Any) -> Any:
        mould: Mould | None = self._saferetry_moulds.get(name) if name.__class__ is str else None
        return mould.cast(self) if mould is not None else _remember(self, name, make(self, name))

    return get


def _remember(owner: Any, name: Any, made: Any) -> Any:
    """Remember what a name stands for, unless it is an attribute's for the driver (``_x``) or there are very many."""
    moulds = vars(owner).setdefault("_saferetry_moulds", {})
    if type(made) in _GUARDED_MADE and not name.startswith("_") and len(moulds) < _MOST_NAMES:
        if isinstance(made, (Database, AsyncDatabase)):
            vars(made)["_saferetry_moulds"] = {}  # shared by all that are made of this mould
        moulds[name] = Mould(made, owner)
    return made


def _adopt(made: Any) -> Any:
    """Make an object of a class of a user's own guarded, if it is a database or a collection."""
    own_type: Any = type(made)
    if isinstance(made, _MADE) and not isinstance(made, _GUARDED_MADE):
        made.__class__ = _guarded_maker(own_type)
    return made


@_guarded
class Collection(DriverCollection[Document]):
    """A ``pymongo.collection.Collection`` whose calls inside a record are protected."""


@_guarded
class Database(DriverDatabase[Document]):
    """A ``pymongo.database.Database`` whose calls inside a record are protected."""


@_guarded
class AsyncCollection(DriverAsyncCollection[Document]):
    """A ``pymongo.asynchronous.collection.AsyncCollection`` whose calls inside a record are protected."""


@_guarded
class AsyncDatabase(DriverAsyncDatabase[Document]):
    """A ``pymongo.asynchronous.database.AsyncDatabase`` whose calls inside a record are protected."""


@_guarded
class MongoClient(DriverMongoClient[Document]):
    """Be ``pymongo.MongoClient`` with protected calls: import it instead.

    Args:
        *args: As ``pymongo.MongoClient``.
        saferetry: Settings; else those of the environment (``Settings.from_env()``).
        **kwargs: As ``pymongo.MongoClient``.

    Example:
        >>> client = MongoClient("mongodb://localhost:27017/?replicaSet=rs0&socketTimeoutMS=10000")

    Raises:
        ConfigurationError: Bad settings; under strict a socket timeout below 150 ms.
        DriverMismatchError: The installed PyMongo is not one that saferetry knows; nothing was sent.
    """

    if TYPE_CHECKING:  # the driver's own signature, which says what kind of documents a client has

        def __init__(  # noqa: PLR0917 - the driver's
            self,
            host: str | Sequence[str] | None = None,
            port: int | None = None,
            document_class: type[Document] | None = None,
            tz_aware: bool | None = None,  # noqa: FBT001 - the driver's
            connect: bool | None = None,  # noqa: FBT001 - the driver's
            type_registry: TypeRegistry | None = None,
            *,
            saferetry: Settings | None = None,
            **kwargs: Any,
        ) -> None: ...

        def __enter__(self) -> Self: ...

    else:

        def __new__(cls, *args: Any, saferetry: Settings | None = None, **kwargs: Any) -> Any:
            make = patched_client() if cls is MongoClient else None
            if make is not None:  # inside mongomock.patch()
                client = make(*args, **kwargs)
                if not isinstance(client, DriverMongoClient):
                    return wrap(client, saferetry)
                client.close()  # on_new="pymongo": a real server
            return super().__new__(cls)

        def __init__(self, *args: Any, saferetry: Settings | None = None, **kwargs: Any) -> None:
            settings = _settings_for_new_client(saferetry)
            super().__init__(*args, **_with_socket_timeout(settings, args, kwargs))
            try:
                install_guard(self, settings)
            except ConfigurationError:
                self.close()
                raise

    def _ensure_session(self, session: Any = None) -> Any:
        return lend_session(self, super()._ensure_session) if session is None else session

    def _run_operation(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        return _fetch(self, super()._run_operation, operation, args, kwargs)


@_guarded
class AsyncMongoClient(DriverAsyncMongoClient[Document]):
    """Be ``pymongo.AsyncMongoClient`` with protected calls: import it instead.

    Args:
        *args: As ``pymongo.AsyncMongoClient``.
        saferetry: Settings; else those of the environment (``Settings.from_env()``).
        **kwargs: As ``pymongo.AsyncMongoClient``.

    Example:
        >>> client = AsyncMongoClient("mongodb://localhost:27017/?replicaSet=rs0&socketTimeoutMS=10000")

    Raises:
        ConfigurationError: Bad settings; under strict a socket timeout below 150 ms.
        DriverMismatchError: The installed PyMongo is not one that saferetry knows; nothing was sent.
    """

    if TYPE_CHECKING:  # the driver's own signature, which says what kind of documents a client has

        def __init__(  # noqa: PLR0917 - the driver's
            self,
            host: str | Sequence[str] | None = None,
            port: int | None = None,
            document_class: type[Document] | None = None,
            tz_aware: bool | None = None,  # noqa: FBT001 - the driver's
            connect: bool | None = None,  # noqa: FBT001 - the driver's
            type_registry: TypeRegistry | None = None,
            *,
            saferetry: Settings | None = None,
            **kwargs: Any,
        ) -> None: ...

        async def __aenter__(self) -> Self: ...

    else:

        def __init__(self, *args: Any, saferetry: Settings | None = None, **kwargs: Any) -> None:
            settings = _settings_for_new_client(saferetry)
            super().__init__(*args, **_with_socket_timeout(settings, args, kwargs))
            install_guard(self, settings)

    def _ensure_session(self, session: Any = None) -> Any:
        return lend_session(self, super()._ensure_session) if session is None else session

    async def _run_operation(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        return await _fetch_async(self, super()._run_operation, operation, args, kwargs)


_GUARDED_TYPES: Mapping[type[Any], type[Any]] = {
    DriverMongoClient: MongoClient,
    DriverDatabase: Database,
    DriverCollection: Collection,
    DriverAsyncMongoClient: AsyncMongoClient,
    DriverAsyncDatabase: AsyncDatabase,
    DriverAsyncCollection: AsyncCollection,
}
_MADE = (DriverDatabase, DriverCollection, DriverAsyncDatabase, DriverAsyncCollection)
_GUARDED_MADE = tuple(_GUARDED_TYPES[driver_type] for driver_type in _MADE)


@functools.cache
def _guarded_maker(foreign: type[Any]) -> type[Any]:
    """Return a user's own database or collection class with the guarded methods in place of the driver's, below his own.

    A method of his that makes several calls is not sent again as a whole: each of the calls is guarded.
    """
    guarded = next(_GUARDED_TYPES[driver_type] for driver_type in _MADE if issubclass(foreign, driver_type))
    return type(foreign.__name__, (foreign, guarded), {"__module__": foreign.__module__})


def _settings_for_new_client(given: Settings | None) -> Settings:
    settings = _checked(given) if given is not None else Settings.from_env()
    if not settings.disabled:
        check_driver()
    return settings


def _checked(settings: Any) -> Settings:
    if not isinstance(settings, Settings):
        raise ConfigurationError(f"settings must be a saferetry.Settings, not {type(settings).__name__}")
    return settings


def _with_socket_timeout(settings: Settings, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Add the socket timeout of the settings unless an argument or the URI gives one."""
    option = "socketTimeoutMS"
    hosts = args[0] if args else kwargs.get("host")
    uris = [hosts] if isinstance(hosts, str) else hosts or []
    is_given = any(name.lower() == option.lower() for name in kwargs) or any(
        option.lower() + "=" in str(uri).lower() for uri in uris
    )
    if settings.socket_timeout_ms is None or is_given or settings.disabled:
        return dict(kwargs)
    return {**kwargs, option: settings.socket_timeout_ms}


def _fetch(client: Any, fetch: Callable[..., Any], operation: Any, args: Any, kwargs: Any) -> Any:
    """Let a cursor fetch a batch: in a record's transaction one after another, and with an eye on errors."""
    execution = execution_of(operation)
    if execution is None:
        return fetch(operation, *args, **kwargs)
    with execution.lock:
        execution.check(client)
        if execution.state is State.WAITING:
            execution.begin(execution, client)
        with execution.fetching():
            fetch_in(operation, execution)
            return fetch(operation, *args, **kwargs)


async def _fetch_async(client: Any, fetch: Callable[..., Any], operation: Any, args: Any, kwargs: Any) -> Any:
    """Let a cursor fetch a batch: in a record's transaction one after another, and with an eye on errors."""
    execution = execution_of(operation)
    if execution is None:
        return await fetch(operation, *args, **kwargs)
    async with execution.async_lock:
        execution.check(client)
        if execution.state is State.WAITING:
            await execution.begin(execution, client)
        with execution.fetching():
            fetch_in(operation, execution)
            return await fetch(operation, *args, **kwargs)


def wrap(client: Client, settings: Settings | None = None) -> Client:
    """Guard an existing PyMongo client in place and return it; of a mongomock client return a guarded proxy.

    Args:
        client: A ``pymongo.MongoClient`` or ``pymongo.AsyncMongoClient``, or an instance of a subclass of one; or a
            ``mongomock.MongoClient``, for tests (docs/testing.md).
        settings: Its settings; else those of the environment.

    Example:
        >>> import pymongo
        >>> client = wrap(pymongo.MongoClient())

    Raises:
        ConfigurationError: It is not a PyMongo client, or is guarded already with other settings.
        DriverMismatchError: The installed PyMongo is not one that saferetry knows.
    """
    if not (isinstance(client, (DriverMongoClient, DriverAsyncMongoClient)) or is_foreign(client)):
        raise ConfigurationError(f"wrap: {type(client).__name__} is not a PyMongo client; give a pymongo.MongoClient")
    if guarded_client(client) is not None:
        if settings is not None and settings != guard_of(client).settings:
            raise ConfigurationError("wrap: this client is guarded already; give its settings when it is made")
        return client
    if is_foreign(client):
        return wrap_foreign(client, _settings_for_new_client(settings))  # type: ignore[no-any-return]  # a proxy of the client
    install_guard(client, _settings_for_new_client(settings))
    own_type: Any = type(client)
    client.__class__ = _GUARDED_TYPES.get(own_type) or _guarded_subclass(own_type)
    return client


@functools.cache
def _guarded_subclass(foreign: type[Any]) -> type[Any]:
    """Return a user's own client class with its methods guarded."""

    def lend(self: Any, session: Any = None) -> Any:
        return lend_session(self, functools.partial(foreign._ensure_session, self)) if session is None else session

    def run(self: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        return _fetch(self, functools.partial(foreign._run_operation, self), operation, args, kwargs)

    async def run_async(self: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        return await _fetch_async(self, functools.partial(foreign._run_operation, self), operation, args, kwargs)

    overridden = {"_ensure_session": lend, "_run_operation": run_async if issubclass(foreign, DriverAsyncMongoClient) else run}
    overridden["__getattr__"] = _adopting(foreign.__getattr__)
    return _guarded(type(foreign.__name__, (foreign,), {"__module__": foreign.__module__, **overridden}))
