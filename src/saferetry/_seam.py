"""The seam to PyMongo: with `_driver` the only place that touches the driver's private names.

But for ``_database``, ``_client`` and ``_write_concern``, which `_methods` reads at every call. `_driver` compares what is used
with the installed driver. That is:

- ``MongoClient._ensure_session``: called when the driver lends a session to an operation; ours then gets our class, and,
  in a driver call of ours, our address in place of a pooled server session. Later ones are made as the first was (``_moulds``).
- ``ClientSession.end_session``: called when it is over; one with our address gives nothing back to the driver's pool.
- ``ClientSession._apply_to``: called for every command sent on a session, the driver's own resends included; the
  command gets its limit, its tag and its statement id there, and the send is counted.
- ``MongoClient._run_operation``: called for every batch that a cursor fetches, to see its errors inside a record's transaction.
- ``_Bulk`` and the requests' ``_add_to_bulk``: the driver's own validation and statements of a bulk, before it is cut.
- ``OperationFailure.__details``: given to errors that a server in memory makes.
- ``_csot.get_timeout`` and ``remaining``: whether ``timeoutMS`` or ``pymongo.timeout`` is in force, and what is left of it.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import Context, ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, Self

import pymongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.asynchronous.mongo_client import AsyncMongoClient
from pymongo.errors import OperationFailure
from pymongo.operations import InsertOne
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.synchronous.client_session import ClientSession
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database
from pymongo.synchronous.mongo_client import MongoClient
from pymongo.write_concern import WriteConcern

from saferetry._addresses import LONGEST_IDLE, Address, AddressPool
from saferetry._driver import AsyncBulk, Bulk, csot
from saferetry._limits import READ_COMMANDS, SHORTEST_SOCKET_TIMEOUT_MS, Limits, is_too_long, limit_of, writes
from saferetry._moulds import Mould
from saferetry._settings import Settings
from saferetry._slots import Slots
from saferetry.errors import ConfigurationError, UnprotectedWriteError

logger = logging.getLogger("saferetry")

_TAGGED = frozenset({"insert", "update", "delete", "findAndModify", "aggregate"})
_UNDRESSED = frozenset({"commitTransaction", "abortTransaction"})
COMMENT_ON_WRITES = 9  # wire version of server 4.4
KEEPS_WRITE_ERRORS = 13  # wire version of server 5.0
DRIVER_TYPES: tuple[type[Any], ...] = (MongoClient, Database, Collection)
ASYNC_DRIVER_TYPES: tuple[type[Any], ...] = (AsyncMongoClient, AsyncDatabase, AsyncCollection)
_READS = frozenset({"find", "aggregate", "count", "distinct"})
PAST_METHODS = "comes past the guarded methods"
REMEDY = "Get the collection from the guarded client, after wrap(): client['database']['collection']"
OVER = "the execution that this task or thread belongs to is over: wait for it in the handler"


# the driver's private parts


def csot_remaining() -> float:
    """Return the seconds left of ``pymongo.timeout``; infinite where none is in force."""
    remaining = csot.remaining()
    return math.inf if remaining is None else remaining


def bound_session(client: Any) -> Any:
    """Return the session that the user bound with ``ClientSession.bind`` (driver 4.17 and newer), or None."""
    return session_of(client, {})


def session_of(client: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the session that the user gave (some methods take it among ``**kwargs``) or bound, or None."""
    given = arguments.get("session")
    if given is None and "kwargs" in arguments:
        given = arguments["kwargs"].get("session")
    if given is not None:
        return given
    find = getattr(type(client), "_get_bound_session", None)
    return find(client) if find else None


def bulk_statements(collection: Any, requests: Sequence[Any], ordered: bool) -> list[tuple[int, Mapping[str, Any]]]:  # noqa: FBT001
    """Return a bulk's statements as (0 insert, 1 update or 2 delete; document), validated by the driver itself.

    Raises:
        TypeError, ValueError: As ``bulk_write`` would.
    """
    bulk: Any = (AsyncBulk if isinstance(collection, AsyncCollection) else Bulk)(collection, ordered, None)
    for request in requests:
        request._add_to_bulk(bulk)
    statements: list[tuple[int, Mapping[str, Any]]] = bulk.ops
    return statements


def inserted_document(request: InsertOne[Any]) -> Any:
    """Return the document of an InsertOne."""
    return request._doc


def request_values(request: Any) -> dict[str, Any]:
    """Return what a bulk's request holds, to tell whether two are equal."""
    slots = (name for owner in type(request).__mro__ for name in getattr(owner, "__slots__", ()))
    return {name: getattr(request, name, None) for name in slots}


def give_details(error: OperationFailure, details: Mapping[str, Any]) -> None:
    """Give an error that was made without details some; its text, which the driver would make of them, stays."""
    error._OperationFailure__details = details  # type: ignore[attr-defined]  # the name of `__details` in there


# a driver call of ours


class Scope(Protocol):
    """Say what the seam needs to know of the current record."""

    ended: bool
    tag: Mapping[str, Any] | None
    transaction: Any

    def label(self) -> str:
        """Return what names it in messages."""

    def remaining(self) -> float:
        """Return the seconds left in its budget."""

    def note_unannounced(self, command_name: str, *, strict: bool) -> None:
        """Take note of a write that no guarded method announced."""

    def refuse_unannounced_read(self, command_name: str) -> NoReturn:
        """Refuse a read that no guarded method announced, beside the record's transaction."""


@dataclass(slots=True)
class Anchor:
    """Hold the current record for all copies of a context: asyncio's connections keep the one in which they were opened."""

    scope: Scope


SCOPE: ContextVar[Anchor | None] = ContextVar("saferetry_scope", default=None)


def scope_here() -> Scope | None:
    """Return the record of this context, which may have ended, or None outside any."""
    anchor = SCOPE.get()
    return None if anchor is None else anchor.scope


class DriverCall:
    """Hold what a guarded method announces of one driver call, and what the session saw of it.

    As a context it announces the call to the sessions that the driver lends meanwhile.
    """

    is_numberable = False  # servers that keep a memory of writes take a transaction number with it
    wants_number = False  # without a transaction number it is not protected
    was_numbered = False  # it was sent with one before, and must not be sent without one
    statement_id = 0
    lent = False
    done = False
    sends = 0
    numbered = True
    mongos = False
    wire_version = 0
    _token: Token[DriverCall | None] | None = None

    def __init__(self, client: Any, *, is_write: bool = True, address: Address | None = None) -> None:
        self.client = client
        self.is_write = is_write
        self.address = address

    def __enter__(self) -> Self:
        """Announce the call."""
        self._token = DRIVER_CALL.set(self)
        return self

    def __exit__(self, kind: object = None, exc: BaseException | None = None, trace: object = None) -> bool | None:
        """End it; background tasks of the driver keep a copy of this context."""
        assert self._token is not None  # noqa: S101 - for the type checker
        self.done = True
        DRIVER_CALL.reset(self._token)
        return None


DRIVER_CALL: ContextVar[DriverCall | None] = ContextVar("saferetry_driver_call", default=None)


def in_driver_call() -> bool:
    """Whether a guarded method is just now calling the driver, so that what it calls in turn is not another call."""
    call = DRIVER_CALL.get()
    return call is not None and not call.done


def announced_call() -> DriverCall | None:
    """Return the driver call that a guarded method is making, or None."""
    return DRIVER_CALL.get() if in_driver_call() else None


# sessions


class PinnedServerSession:
    """Stand in for the driver's server session with a fixed address; never goes into the driver's pool.

    ``dirty`` and ``generation`` keep it out: a pinned session in the pool would swallow somebody else's write.
    """

    dirty = True
    generation = -1

    def __init__(self, address: Address) -> None:
        self.address = address
        self.session_id = address.session_id
        self.transaction_id = address.number
        self.last_use = time.monotonic()

    def inc_transaction_id(self) -> None:
        """Keep the number: one driver call is one command."""

    def mark_dirty(self) -> None:
        """Stay dirty."""

    def timed_out(self, session_timeout_minutes: int | None) -> bool:  # noqa: ARG002 - the driver's signature
        """Never be taken for one that may be used again."""
        return True


class GuardedSession(ClientSession):
    """Dress every command that is sent on a session which the driver lent."""

    _saferetry_call: DriverCall | None = None
    _saferetry_limit: int | None = None
    _saferetry_given: int | None = None
    _saferetry_cap: int | None = None
    _saferetry_execution: Any = None

    def _apply_to(self, command: Any, is_retryable: bool, read_preference: Any, conn: Any) -> None:  # noqa: FBT001
        if self._saferetry_execution is not None and not self._transaction.active():
            _refuse_closed(command)
        super()._apply_to(command, is_retryable, read_preference, conn)
        _dress(self, command, is_retryable, conn)

    def end_session(self) -> None:
        if self._implicit and type(self._server_session) is PinnedServerSession:  # never goes into the driver's pool
            self._server_session = None
        else:
            super().end_session()


class AsyncGuardedSession(AsyncClientSession):
    """Dress every command that is sent on a session which the driver lent."""

    _saferetry_call: DriverCall | None = None
    _saferetry_limit: int | None = None
    _saferetry_given: int | None = None
    _saferetry_cap: int | None = None
    _saferetry_execution: Any = None

    def _apply_to(self, command: Any, is_retryable: bool, read_preference: Any, conn: Any) -> None:  # noqa: FBT001
        if self._saferetry_execution is not None and not self._transaction.active():
            _refuse_closed(command)
        super()._apply_to(command, is_retryable, read_preference, conn)
        _dress(self, command, is_retryable, conn)

    async def end_session(self) -> None:
        if self._implicit and type(self._server_session) is PinnedServerSession:  # never goes into the driver's pool
            self._server_session = None
        else:
            await super().end_session()


_GUARDED_SESSIONS: Mapping[type[Any], type[Any]] = {
    ClientSession: GuardedSession,
    AsyncClientSession: AsyncGuardedSession,
}


class SessionMould(Mould):
    """Make sessions at addresses of ours, each with a transaction of its own."""

    __slots__ = ("_of_transaction",)

    def __init__(self, session: Any, client: Any) -> None:
        super().__init__(session, client, "_server_session", "_transaction")
        self._of_transaction = Mould(session._transaction, client)

    def cast_at(self, address: Address, client: Any, **own: Any) -> Any:
        """Return a new session at an address, with other attributes of its own."""
        transaction = self._of_transaction.cast(client)
        return self.cast(client, _server_session=PinnedServerSession(address), _transaction=transaction, **own)


def lend_session(client: Any, lend: Callable[[], Any]) -> Any:
    """Return a session for what the driver is about to send: one of ours, unless the user gave one (explicit or bound).

    Args:
        client: A guarded client.
        lend: The driver's own way.

    Returns:
        The session; None where the driver lends none.
    """
    call = DRIVER_CALL.get()
    # Only the first session of a driver call is the command's: an event listener may use the client meanwhile.
    if call is not None and (call.done or call.lent or call.client is not client):
        call = None
    guard: Guard = client._saferetry_guard
    address = None if call is None else call.address
    if address is not None and guard.session_mould is not None:
        session = guard.session_mould.cast_at(address, client)
    else:
        session = lend()
        guarded = _GUARDED_SESSIONS.get(type(session))
        if guarded is None or not session._implicit or guard.settings.disabled:
            return session
        session.__class__ = guarded
        if guard.session_mould is None:
            guard.session_mould = SessionMould(session, client)
        if address is not None:
            session._server_session = PinnedServerSession(address)
    if call is not None:
        call.lent = True
        session._saferetry_call = call
    return session


def raw_database(client: Any, name: str) -> Any:
    """Return the driver's own database, past the guarded methods; a stand-in (``_stand_ins``) makes its own."""
    if (make := getattr(type(client), "_saferetry_raw_database", None)) is not None:
        return make(client, name)
    return (AsyncDatabase if isinstance(client, AsyncMongoClient) else Database)(client, name)


def unguarded(collection: Any) -> Any:
    """Return the driver's own collection, reading from the primary."""
    raw = raw_database(collection.database.client, collection.database.name)
    return raw.get_collection(collection.name, codec_options=collection.codec_options, read_preference=ReadPreference.PRIMARY)


def client_of(owner: Any) -> Any:
    """Return the client of a collection, a database or a client."""
    if isinstance(owner, (Collection, AsyncCollection)):
        return owner.database.client
    return owner.client if isinstance(owner, (Database, AsyncDatabase)) else owner


def namespace_of(owner: Any) -> str:
    """Return the name of a collection, a database or a client, for messages."""
    if isinstance(owner, (Collection, AsyncCollection)):
        return owner.full_name
    return owner.name if isinstance(owner, (Database, AsyncDatabase)) else "the client"


def is_async(client: Any) -> bool:
    """Whether a client is an AsyncMongoClient."""
    return isinstance(client, AsyncMongoClient)


def is_async_database(database: Any) -> bool:
    """Whether a database belongs to an AsyncMongoClient."""
    return isinstance(database, AsyncDatabase)


def open_session(client: Any, address: Address, cap_ms: int | None) -> Any:
    """Return a session for a transaction at an address of ours.

    Args:
        client: A guarded client.
        address: Session id and number.
        cap_ms: The longest ``maxTimeMS`` of its commands until ``let_join``.
    """
    session = client.start_session(causal_consistency=False)
    if (guarded := _GUARDED_SESSIONS.get(type(session))) is not None:  # a stand-in's is ours anyway
        session.__class__ = guarded
    session._server_session = PinnedServerSession(address)
    session._saferetry_cap = cap_ms
    return session


def remember_begun(client: Any, session: Any) -> None:
    """Remember a session of ``open_session`` as it is when its transaction has just begun and nothing was sent."""
    if type(session) in _GUARDED_SESSIONS.values():
        client._saferetry_guard.transaction_mould = SessionMould(session, client)


def begun_as_before(client: Any, address: Address, cap_ms: int | None) -> Any:
    """Return a session as ``open_session``'s whose transaction has begun, or None where none is remembered."""
    mould: SessionMould | None = client._saferetry_guard.transaction_mould
    return None if mould is None else mould.cast_at(address, client, _saferetry_cap=cap_ms)


def address_of(session: Any) -> Address:
    """Return the address of a session that ``open_session`` made."""
    return session._server_session.address  # type: ignore[no-any-return]


def let_join(session: Any, execution: Any) -> None:
    """Let the operations of an execution join a session's transaction, with the limits that they have elsewhere."""
    session._saferetry_cap = None
    session._saferetry_execution = execution


def runs_in(session: Any, execution: Any) -> bool:
    """Whether a session is that of an execution's transaction; a cursor passes it on (``Cursor.distinct``)."""
    return getattr(session, "_saferetry_execution", None) is execution


def execution_of(operation: Any) -> Any:
    """Return the execution in whose transaction a cursor fetches a batch; None elsewhere, and in a call that watches itself.

    A cursor made past the guarded methods, as ``GridFS.find`` makes it, has a session that the driver lent: with its first
    batch it becomes one of the record's transaction.
    """
    if in_driver_call():
        return None
    session = operation.session
    execution = getattr(session, "_saferetry_execution", None)
    scope = scope_here()
    if execution is None and scope is not None and not scope.ended and scope.transaction is not None:
        is_lent = isinstance(session, (GuardedSession, AsyncGuardedSession)) and session._saferetry_call is None
        if is_lent and operation.name != "getMore":
            session._saferetry_execution = execution = scope.transaction
    return execution


def fetch_in(operation: Any, execution: Any) -> None:
    """Let a batch be fetched in an execution's transaction."""
    if operation.session is not execution.session:
        operation.session = execution.session
        operation.read_preference = ReadPreference.PRIMARY


def _refuse_closed(command: Mapping[str, Any]) -> None:
    """Refuse a statement whose transaction is over: the driver would send it outside any.

    Raises:
        ConfigurationError: It is none that ends a cursor.
    """
    if next(iter(command)) != "killCursors":
        raise ConfigurationError(OVER)


TRANSACTION_OPTIONS: Mapping[str, Any] = {  # of a record's transaction, whatever the client says
    "read_concern": ReadConcern("snapshot"),
    "write_concern": WriteConcern("majority"),
    "read_preference": ReadPreference.PRIMARY,
}


def _dress(session: Any, command: MutableMapping[str, Any], is_retryable: bool, conn: Any) -> None:  # noqa: FBT001
    """Give a command its limit, tag and statement id, and count the send."""
    name = next(iter(command))
    if name in _UNDRESSED:
        return
    call: DriverCall | None = session._saferetry_call
    guard: Guard = session._client._saferetry_guard
    anchor = SCOPE.get()
    scope = None if anchor is None or anchor.scope.ended else anchor.scope
    announced = call is not None and call.is_write
    is_write = name not in READ_COMMANDS or (announced and name == "aggregate")
    is_write = is_write or (name == "aggregate" and call is None and writes(command.get("pipeline")))
    _limit(session, guard, command, scope.remaining if scope is not None else None)
    if not is_write:
        if scope is not None and scope.transaction is not None and _is_data_read(session, name):
            scope.refuse_unannounced_read(name)
        return
    if call is not None and announced:
        is_retryable = is_retryable or _number(session, call, command, conn)
        if not is_retryable and call.was_numbered:
            raise UnprotectedWriteError(
                f"{name} was not sent again: this server takes no transaction number, so that it could take effect twice"
            )
        if call.wants_number and not is_retryable:
            guard.note_unnumbered(name)
        call.sends += 1
        call.numbered = call.numbered and is_retryable
        call.mongos = conn.is_mongos
        call.wire_version = conn.max_wire_version
        if call.statement_id and is_retryable:
            command["stmtId"] = call.statement_id
    elif session._implicit:
        _note_unannounced(guard, scope, name)
    if scope is not None and scope.tag and name in _TAGGED and conn.max_wire_version >= COMMENT_ON_WRITES:
        command.setdefault("comment", scope.tag)


def _note_unannounced(guard: Guard, scope: Scope | None, name: str) -> None:
    """Take note of a write that no guarded method announced.

    Raises:
        ConfigurationError: It would be sent beside a record's transaction.
        UnprotectedWriteError: Strict refuses it.
    """
    is_ours = in_driver_call()  # further commands of a method, or what an event listener sends meanwhile
    if scope is not None:
        scope.note_unannounced(name, strict=guard.settings.strict and not is_ours)
        if not is_ours:
            guard.warn_once("unannounced", f"the command {name} {PAST_METHODS}: a lost reply leaves it unknown. {REMEDY}")
    elif guard.settings.strict and not is_ours:
        raise UnprotectedWriteError(f"the command {name} {PAST_METHODS} and outside any record, which strict refuses")


def _is_data_read(session: Any, name: str) -> bool:
    """Whether it is a read that no guarded method announced, nor belongs to what one of them calls."""
    return name in _READS and session._implicit and session._saferetry_call is None and not in_driver_call()


def _number(session: Any, call: DriverCall, command: MutableMapping[str, Any], conn: Any) -> bool:
    """Number a command that the driver would send without a number although the server remembers writes; whether it was.

    The driver asks the topology, not the connection: while another thread's error has the server marked as unknown, it takes
    it for one without retryable writes. Such a command would be a second write where it is sent again.
    """
    if not call.is_numberable or call.address is None or not session._client.options.retry_writes:
        return False
    if not (conn.supports_sessions and (conn.is_repl or conn.is_mongos)):
        return False
    command["txnNumber"] = call.address.number
    return True


def _limit(session: Any, guard: Guard, command: MutableMapping[str, Any], remaining: Callable[[], float] | None) -> None:
    if csot.get_timeout() is not None:  # timeoutMS or pymongo.timeout limits it (0, "no limit", included)
        return
    given = command.pop("maxTimeMS", None)
    if given is not None and given == session._saferetry_limit:
        given = session._saferetry_given  # the driver resends the same document: that limit is ours, not the user's
    if given is not None:
        command["maxTimeMS"] = given
    limit = limit_of(guard.limits, command, remaining)
    if session._saferetry_cap is not None:
        limit = min(limit or session._saferetry_cap, session._saferetry_cap)
    if limit is None:
        return
    if given and is_too_long(guard.limits, given):
        guard.complain(
            "maxTimeMS",
            f"maxTimeMS {given} is not below socketTimeoutMS {guard.limits.socket_timeout_ms}, so that the client would "
            f"give up while the server works on: {limit} is used; give a lower maxTimeMS or a higher socketTimeoutMS",
        )
    if remaining is not None and guard.limits.socket_timeout_ms is None:
        guard.warn_once(
            "no socket timeout",
            "no socketTimeoutMS is set: the server's work is limited, but the client itself waits for ever on a silent "
            "network; set socketTimeoutMS in the URI or SAFERETRY_SOCKET_TIMEOUT_MS",
        )
    command["maxTimeMS"] = session._saferetry_limit = limit
    session._saferetry_given = given


# clients


@dataclass
class Guard:
    """Hold what belongs to one guarded client."""

    settings: Settings
    limits: Limits
    rng: random.Random
    pool: AddressPool = field(default_factory=AddressPool)
    slots: Slots = field(default_factory=Slots)
    marker_collections: dict[str, Any] = field(default_factory=dict)  # by namespace
    prepared_markers: set[str] = field(default_factory=set)
    session_mould: SessionMould | None = None  # of a session that the driver lends
    transaction_mould: SessionMould | None = None  # of one whose transaction has begun
    objection: str = ""  # why writes of this client are refused inside records
    is_encrypted: bool = False  # the client encrypts by itself (``auto_encryption_opts``)
    warned: set[str] = field(default_factory=set)

    @functools.cached_property
    def is_particular(self) -> bool:
        """Whether there is something to refuse of this client's writes in records."""
        return bool(self.objection or self.is_encrypted or self.settings.strict)

    def warn_once(self, cause: str, message: str) -> None:
        """Log a warning, once for each cause."""
        if cause not in self.warned:
            self.warned.add(cause)
            logger.warning(message)

    def complain(self, cause: str, message: str) -> None:
        """Warn once; under strict raise.

        Raises:
            ConfigurationError: Under strict.
        """
        if self.settings.strict:
            raise ConfigurationError(message)
        self.warn_once(cause, message)

    def note_unnumbered(self, command_name: str) -> None:
        """Warn once that a write is about to be sent without a transaction number; under strict raise.

        Raises:
            UnprotectedWriteError: Under strict; nothing was sent.
        """
        message = (
            f"{command_name} is sent without a transaction number (a standalone server, or retryWrites=false), so that a lost "
            "reply leaves it unknown: run a replica set, which may have one node (mongod --replSet rs0, then rs.initiate())"
        )
        if self.settings.strict:
            raise UnprotectedWriteError(f"{message}; strict refuses it")
        self.warn_once("unnumbered", message)

    def discard(self, address: Address) -> None:
        """Throw an address away, and say so when there are many: each is a session the server keeps for 30 minutes."""
        self.pool.discard(address)
        if self.pool.discarded % 1_000 == 0:
            logger.warning("%d sessions were thrown away after writes of unknown outcome", self.pool.discarded)


def longest_idle(client: Any) -> float:
    """Return the seconds, half of logicalSessionTimeoutMinutes, after which a session may be too old for a command."""
    minutes = client.topology_description.logical_session_timeout_minutes
    return minutes * 30.0 if minutes else LONGEST_IDLE


def guard_of(client: Any) -> Guard:
    """Return the guard of a guarded client."""
    return client._saferetry_guard  # type: ignore[no-any-return]


def guarded_client(client: Any) -> Any:
    """Return a client as records know it: itself, the stand-in of one that is not PyMongo's, or None if it is not guarded."""
    if (stand_in := getattr(type(client), "_saferetry_stand_in", None)) is not None:
        return stand_in(client)
    return client if "_saferetry_guard" in getattr(client, "__dict__", {}) else None


def install_guard(client: Any, settings: Settings) -> None:
    """Put a guard on a client.

    Raises:
        ConfigurationError: Under strict: its socket timeout is too short, or ``max_time_ms`` is not below it.
    """
    seconds = client.options.pool_options.socket_timeout
    socket_timeout_ms = round(seconds * 1000) if seconds else None
    limits = Limits.of(socket_timeout_ms, settings.max_time_ms, settings.cursor_max_time_ms)
    rng = random.Random(settings.seed)  # noqa: S311 - jitter, no secret
    guard = Guard(settings, limits, rng, is_encrypted=getattr(client, "_encrypter", None) is not None)
    has_own_limits = client.options.timeout is not None  # with timeoutMS the driver does not look at the socket timeout
    is_too_short = socket_timeout_ms is not None and socket_timeout_ms < SHORTEST_SOCKET_TIMEOUT_MS
    if is_too_short and not has_own_limits and not settings.disabled:
        guard.objection = (
            f"socketTimeoutMS is {socket_timeout_ms}: give {SHORTEST_SOCKET_TIMEOUT_MS} or more, since a limit for the "
            "server must fit below it; writes inside records are refused"
        )
        guard.complain("socket timeout", guard.objection)
    if settings.max_time_ms is not None and is_too_long(limits, settings.max_time_ms) and not settings.disabled:
        guard.complain(
            "max_time_ms",
            f"max_time_ms {settings.max_time_ms} is not below socketTimeoutMS {socket_timeout_ms}: {limits.inside_ms} is "
            "used; give a lower max_time_ms or a higher socketTimeoutMS",
        )
    client._saferetry_guard = guard


# cancelling

CANCEL_SECONDS = 1


def cancel(client: Any, address: Address) -> None:
    """Stop what runs or waits on the server under an address of ours; failures are logged."""
    Context().run(_cancel, client, address)


def _cancel(client: Any, address: Address) -> None:
    try:
        with pymongo.timeout(CANCEL_SECONDS):
            raw_database(client, "admin").command("killSessions", [address.session_id])
    except Exception as exc:  # noqa: BLE001 - cancelling is a service on top: the write's own error must leave
        _log_uncancelled(exc)


async def cancel_async(client: Any, address: Address) -> None:
    """Stop what runs or waits on the server under an address of ours; failures are logged."""
    try:
        with pymongo.timeout(CANCEL_SECONDS):
            await raw_database(client, "admin").command("killSessions", [address.session_id])
    except Exception as exc:  # noqa: BLE001 - cancelling is a service on top: the write's own error must leave
        _log_uncancelled(exc)


def _log_uncancelled(exc: Exception) -> None:
    logger.info("a write of unknown outcome could not be stopped on the server: %s", type(exc).__name__)
