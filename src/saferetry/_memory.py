"""A server in memory: what MongoDB remembers of numbered writes, and its transactions, around a mongomock client.

What is emulated is what saferetry builds on (docs/limits.md): a write at an address that took effect is answered from memory;
a transaction sees and changes a copy until it commits; a higher number on a session ends what was open there.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
)
from pymongo.operations import InsertOne
from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

from saferetry._copies import Copy, contents, duplicate_of, store_of
from saferetry._faults import Fault, Faults, Point
from saferetry._seam import DriverCall, announced_call, give_details, inserted_document, scope_here

WIRE_VERSION = 21  # server 7.0
_TRANSIENT = ("TransientTransactionError",)
_UNKNOWN_COMMIT = ("UnknownTransactionCommitResult", "RetryableWriteError")
_MANY = ("insert_many", "update_many", "delete_many", "bulk_write")
_WRITE_CONFLICT, _OLD_NUMBER, _USED_NUMBER, _NO_TRANSACTION, _DUPLICATE = 112, 225, 117, 251, 11000


class Place(Protocol):
    """Say what is known of a collection, database or client that calls are made on."""

    @property
    def _saferetry_mock(self) -> Any:
        """The one of mongomock's."""

    @property
    def _saferetry_faults(self) -> Faults:
        """What fails between it and the server."""

    @property
    def _saferetry_is_own(self) -> bool:
        """Whether the call is saferetry's, as those for markers."""


@dataclass(frozen=True)
class Request:
    """Be a call to be made on one of mongomock's collections, databases or clients."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, target: Any) -> Any:
        """Make it."""
        return getattr(target, self.name)(*self.args, **self.kwargs)

    def first(self, name: str) -> Any:
        """Return its first argument."""
        return self.args[0] if self.args else self.kwargs.get(name)


class MemorySession:
    """Be a session for a transaction; the methods are those of the driver's."""

    _server_session: Any
    _saferetry_cap: int | None = None
    _saferetry_execution: Any = None

    def __init__(self, memory: Memory, faults: Faults) -> None:
        self._memory = memory
        self._faults = faults
        self.in_transaction = False
        self.transaction: _Transaction | None = None
        self.is_committed = False

    def start_transaction(self, **options: Any) -> None:  # noqa: ARG002 - the driver's: one way of reading and writing only
        """Start one; the server hears of it with the first statement."""
        self.in_transaction = True

    def commit_transaction(self) -> None:
        """Let others see it.

        Raises:
            PyMongoError: It was not committed, or that is unknown.
        """
        fault = self._faults.strike("commit_transaction")
        self.in_transaction = False
        if fault is None or fault.point is Point.REPLY:
            self._memory.commit(self)
        if fault is not None:
            raise _labelled(fault.make(), _UNKNOWN_COMMIT)

    def abort_transaction(self) -> None:
        """Forget it."""
        self.in_transaction = False
        self._memory.abort(self)

    @property
    def address(self) -> tuple[bytes, int]:
        """The session id, and the transaction's number."""
        server_session = self._server_session
        return bytes(server_session.session_id["id"]), int(server_session.transaction_id)


@dataclass(eq=False)
class _Transaction:
    number: int
    copy: Copy


@dataclass
class _Answers:
    """Remember the answers to the statements of the newest number on a session, as a server does."""

    number: int = -1
    of_statements: dict[int, Callable[[], Any]] = field(default_factory=dict)

    def find(self, number: int, statement_id: int) -> Callable[[], Any] | None:
        if number != self.number:
            self.number, self.of_statements = number, {}
        return self.of_statements.get(statement_id)


@dataclass
class Memory:
    """Be the server; thread-safe."""

    client: Any
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _answers: defaultdict[bytes, _Answers] = field(default_factory=lambda: defaultdict(_Answers))
    _newest: dict[bytes, int] = field(default_factory=dict)
    _open: dict[bytes, _Transaction] = field(default_factory=dict)

    @classmethod
    def of(cls, client: Any) -> Memory:
        """Return the one of a mongomock client's server, which other clients may share (``mongomock.patch``).

        Raises:
            DriverMismatchError: This mongomock is not one that saferetry knows.
        """
        memory: Memory = vars(store_of(client)).setdefault("_saferetry_memory", cls(client))
        return memory

    def run(self, place: Place, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call.

        Args:
            place: What it is made on.
            name: The method.
            args: Its arguments, a ``MemorySession`` perhaps among them.
            kwargs: Its arguments.

        Raises:
            Exception: As mongomock does, and what faults make.
        """
        mock = place._saferetry_mock
        session, request = _without_session(mock, Request(name, args, kwargs))
        collection = mock.name if hasattr(type(mock), "full_name") else ""
        fault = place._saferetry_faults.strike(name, collection, is_own=place._saferetry_is_own)
        if session is not None:
            return self._join(session, fault, mock, request)
        call = announced_call()
        if fault is not None and fault.point is not Point.REPLY:
            _announce(call, fault)
            raise fault.make()
        before = contents(mock) if call is not None and name in _MANY else None
        answer = self._answer(call, mock, request)
        if _was_refused_by_the_driver(_error_of(answer)) and (before is None or before == contents(mock)):
            return answer()  # nothing was sent
        _announce(call, fault)
        if fault is not None:
            raise fault.make()
        return answer()

    def _answer(self, call: DriverCall | None, mock: Any, request: Request) -> Callable[[], Any]:
        """Make a call, unless it is a write that is remembered; return what gives its result or raises its error."""
        # In records a duplicate is told of as a server does: saferetry decides by it.
        teller = self.client if call is not None else None
        with self._lock:
            if call is None or not _is_numbered(call) or call.address is None:
                return _answer(mock, request, teller)
            answers = self._answers[bytes(call.address.session_id["id"])]
            answer = answers.find(int(call.address.number), call.statement_id)
            if answer is None:
                answer = _answer(mock, request, teller)
                if _took_effect(answer, request.kwargs):
                    answers.of_statements[call.statement_id] = answer
        return answer

    # transactions

    def _join(self, session: MemorySession, fault: Fault | None, mock: Any, request: Request) -> Any:
        if fault is not None and fault.point is not Point.REPLY:
            if fault.point is Point.SERVER:
                self.abort(session)
            raise _labelled(fault.make(), _TRANSIENT)
        with self._lock:
            transaction = self._current(session)
            answer = _answer(transaction.copy.place(mock), request, transaction.copy.client)
            if isinstance(_error_of(answer), PyMongoError):  # as a server, which ends the transaction with the first error
                self.abort(session)
        if fault is not None:
            raise _labelled(fault.make(), _TRANSIENT)
        return answer()

    def _current(self, session: MemorySession) -> _Transaction:
        """Return a session's transaction; its first statement ends an older one.

        Raises:
            OperationFailure: Another one is newer, or it was ended.
        """
        lsid, number = session.address
        newest = self._newest.get(lsid, -1)
        if newest > number:
            _refuse(f"Cannot go on, because a newer transaction with txnNumber {newest} has started", _OLD_NUMBER)
        if session.transaction is None:
            if newest == number:
                _refuse(f"Transaction {number} has been started before", _USED_NUMBER)
            self._newest[lsid] = number
            session.transaction = self._open[lsid] = _Transaction(number, Copy(self.client))
        if self._open.get(lsid) is not session.transaction:
            _refuse(f"Transaction {number} has been aborted", _NO_TRANSACTION, _TRANSIENT)
        return session.transaction

    def commit(self, session: MemorySession) -> None:
        """Put a transaction's changes into the server; once.

        Raises:
            OperationFailure: It was ended, or something else has changed what it changed.
        """
        with self._lock:
            if session.is_committed or session.transaction is None:
                return
            transaction = self._current(session)
            del self._open[session.address[0]]
            if not transaction.copy.put_back():
                _refuse("WriteConflict: what it changed was changed meanwhile", _WRITE_CONFLICT, _TRANSIENT)
            session.is_committed = True

    def abort(self, session: MemorySession) -> None:
        """Forget a transaction."""
        with self._lock:
            lsid, _ = session.address
            if session.transaction is not None and self._open.get(lsid) is session.transaction:
                del self._open[lsid]


def _is_numbered(call: DriverCall) -> bool:
    return call.is_write and call.is_numberable and call.address is not None


def _announce(call: DriverCall | None, fault: Fault | None) -> None:
    """Tell a guarded method what was sent for it."""
    if call is None or not call.is_write:
        return
    call.lent, call.wire_version, call.numbered = True, WIRE_VERSION, _is_numbered(call)
    call.sends += 1 if fault is None else _sends_of(fault, numbered=call.numbered)


def _sends_of(fault: Fault, *, numbered: bool) -> int:
    """Return how often the driver sends a write that fails: where it resends by itself, that fails as well."""
    if fault.point is Point.BEFORE_SENDING:
        return 0
    error = fault.make()
    is_retried = fault.point is not Point.SERVER or error.has_error_label("RetryableWriteError")
    return 2 if numbered and is_retried else 1


def _was_refused_by_the_driver(error: Exception | None) -> bool:
    """Whether a call was refused before sending: what mongomock does not know is not the server's answer."""
    return error is not None and not isinstance(error, PyMongoError)


def _without_session(mock: Any, request: Request) -> tuple[MemorySession | None, Request]:
    """Return a session of ours, and the call without it, which mongomock would refuse."""
    args, kwargs = request.args, request.kwargs
    if not any(isinstance(value, MemorySession) for value in (*args, *kwargs.values())):
        return None, request
    bound = inspect.signature(getattr(type(mock), request.name)).bind(mock, *args, **kwargs)
    variable = {kind.kind: name for name, kind in bound.signature.parameters.items()}
    more = bound.arguments.pop(variable.get(inspect.Parameter.VAR_KEYWORD, ""), {})
    rest = bound.arguments.pop(variable.get(inspect.Parameter.VAR_POSITIONAL, ""), ())
    given = {**bound.arguments, **more}
    session = given.pop("session")
    given.pop("self")
    if rest:  # what comes before them has to come by position, too
        return session, Request(request.name, (*args[: len(args) - len(rest)], *rest), more)
    return session, Request(request.name, (), given)


def _answer(mock: Any, request: Request, teller: Any) -> Callable[[], Any]:
    """Make a call; return what gives its result or raises its error."""
    try:
        result = request(mock)
    except Exception as exc:  # noqa: BLE001 - raised by whoever hears the answer
        return partial(_raise, _told(exc, mock, request, teller))
    return lambda: result


def _raise(exc: Exception) -> NoReturn:
    raise exc


def _error_of(answer: Callable[[], Any]) -> Exception | None:
    return answer.args[0] if isinstance(answer, partial) else None


def _told(exc: Exception, mock: Any, request: Request, teller: Any) -> Exception:
    """Return a duplicate's error with what a server tells of it."""
    if isinstance(exc, BulkWriteError) and getattr(scope_here(), "derived_ids", None) is not None:
        _tell_ids(exc, mock, request)
    if teller is not None and isinstance(exc, DuplicateKeyError) and exc.details is None:
        details = duplicate_of(teller, mock, request)
        if details is None and request.name == "insert_one":
            details = {"keyPattern": {"_id": 1}, "keyValue": {"_id": request.first("document")["_id"]}}
        if details is not None:
            give_details(exc, {"code": exc.code, "errmsg": str(exc), **details})
    return exc


def _tell_ids(exc: BulkWriteError, mock: Any, request: Request) -> None:
    """Say of an insert whose ``_id`` was there that it was that, where saferetry has made it from the record."""
    for entry in exc.details["writeErrors"]:
        inserted = request.first("requests")[entry["index"]]
        if entry["code"] == _DUPLICATE and isinstance(inserted, InsertOne):
            key = {"_id": inserted_document(inserted)["_id"]}
            if mock.find_one(key) is not None:
                entry |= {"keyPattern": {"_id": 1}, "keyValue": key}


def _took_effect(answer: Callable[[], Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a write changed something: only that is remembered, and the others are evaluated again."""
    error = _error_of(answer)
    if error is not None:
        return isinstance(error, BulkWriteError) and _counts(error.details)
    match result := answer():
        case InsertOneResult() | InsertManyResult():
            return True
        case UpdateResult():
            return bool(result.modified_count or result.upserted_id is not None)
        case DeleteResult():
            return bool(result.deleted_count)
        case BulkWriteResult():
            return _counts(result.bulk_api_result)
    return result is not None or bool(kwargs.get("upsert"))  # findAndModify


def _counts(result: Mapping[str, Any]) -> bool:
    return any(result.get(name) for name in ("nInserted", "nUpserted", "nModified", "nRemoved"))


def _labelled(error: PyMongoError, labels: tuple[str, ...]) -> PyMongoError:
    if isinstance(error, AutoReconnect):
        return type(error)(str(error), {"errorLabels": list(labels)})
    return error


def _refuse(message: str, code: int, labels: tuple[str, ...] = ()) -> NoReturn:
    raise OperationFailure(message, code, {"ok": 0.0, "code": code, "errmsg": message, "errorLabels": list(labels)})
