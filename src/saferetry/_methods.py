"""The guarded methods: one table, and how each is planned."""

from __future__ import annotations

import datetime as dt
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bson.objectid import ObjectId
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.operations import InsertOne
from pymongo.results import InsertOneResult

from saferetry._arguments import Parameters
from saferetry._call import Target, Terms, WriteCall
from saferetry._decisions import tell
from saferetry._execution import JoinedCall, Statement
from saferetry._identity import canonical, without_moments
from saferetry._limits import READ_COMMANDS, writes
from saferetry._parts import (
    Inserted,
    Part,
    Plan,
    are_documents,
    are_requests,
    cut_bulk,
    has_multi,
    insert_many_result,
    inserted_by_requests,
    plain_requests,
    without_made_id,
)
from saferetry._read import ReadCall
from saferetry._record import OPEN_RECORDS, Record, is_repeatable
from saferetry._seam import Guard, bound_session, guard_of, in_driver_call, is_encrypted, runs_in, scope_here
from saferetry.errors import ConfigurationError, UnprotectedWriteError


class Kind(enum.Enum):
    """Say how a method is planned."""

    INSERT_ONE = enum.auto()
    INSERT_MANY = enum.auto()
    BULK = enum.auto()
    SINGLE = enum.auto()  # one statement that changes one document
    MULTI = enum.auto()  # may change many documents: never numbered
    DDL = enum.auto()  # defines data: never numbered, joins no transaction
    PIPELINE = enum.auto()  # MULTI if it ends in $out or $merge, else READ
    COMMAND = enum.auto()  # MULTI unless the command is known to read
    REFUSED = enum.auto()  # not inside records
    READ = enum.auto()
    CURSOR = enum.auto()  # a read whose first command is sent later
    METADATA = enum.auto()  # a read beside a transaction
    APART = enum.auto()  # a read that cannot see a transaction's own writes


_CLIENT: Mapping[str, Kind] = {
    "bulk_write": Kind.REFUSED,
    "drop_database": Kind.DDL,
    "list_database_names": Kind.METADATA,
    "list_databases": Kind.METADATA,
    "server_info": Kind.METADATA,
}
_DATABASE: Mapping[str, Kind] = {
    "aggregate": Kind.PIPELINE,
    "command": Kind.COMMAND,
    "create_collection": Kind.DDL,
    "cursor_command": Kind.COMMAND,
    "dereference": Kind.READ,
    "drop_collection": Kind.DDL,
    "list_collection_names": Kind.METADATA,
    "list_collections": Kind.METADATA,
    "validate_collection": Kind.APART,
}
_COLLECTION: Mapping[str, Kind] = {
    "aggregate": Kind.PIPELINE,
    "aggregate_raw_batches": Kind.PIPELINE,
    "bulk_write": Kind.BULK,
    "count_documents": Kind.READ,
    "create_index": Kind.DDL,
    "create_indexes": Kind.DDL,
    "create_search_index": Kind.DDL,
    "create_search_indexes": Kind.DDL,
    "delete_many": Kind.MULTI,
    "delete_one": Kind.SINGLE,
    "distinct": Kind.READ,
    "drop": Kind.DDL,
    "drop_index": Kind.DDL,
    "drop_indexes": Kind.DDL,
    "drop_search_index": Kind.DDL,
    "estimated_document_count": Kind.APART,
    "find": Kind.CURSOR,
    "find_one": Kind.READ,
    "find_one_and_delete": Kind.SINGLE,
    "find_one_and_replace": Kind.SINGLE,
    "find_one_and_update": Kind.SINGLE,
    "find_raw_batches": Kind.CURSOR,
    "index_information": Kind.METADATA,
    "insert_many": Kind.INSERT_MANY,
    "insert_one": Kind.INSERT_ONE,
    "list_indexes": Kind.METADATA,
    "list_search_indexes": Kind.METADATA,
    "options": Kind.METADATA,
    "rename": Kind.DDL,
    "replace_one": Kind.SINGLE,
    "update_many": Kind.MULTI,
    "update_one": Kind.SINGLE,
    "update_search_index": Kind.DDL,
}
GUARDED: tuple[Mapping[str, Kind], ...] = (_CLIENT, _DATABASE, _COLLECTION)  # as DRIVER_TYPES
_READS = (Kind.READ, Kind.CURSOR, Kind.METADATA, Kind.APART)
_ITERABLES = ("documents", "models")  # arguments that may be any iterable; elsewhere the driver wants a list, and says so
_UNNUMBERED = (Kind.MULTI, Kind.DDL, Kind.PIPELINE, Kind.COMMAND, Kind.REFUSED)


class Method:
    """Be one guarded method of one driver type.

    Args:
        name: Its name.
        kind: How it is planned.
        driver_type: The driver's own class that has it.
    """

    def __init__(self, name: str, kind: Kind, driver_type: type[Any]) -> None:
        self.name = name
        self.kind = kind
        self.original: Callable[..., Any] = getattr(driver_type, name)
        self._parameters = Parameters(self.original)
        self._driver_find_one: Any = getattr(driver_type, "find_one", None)
        self._bulk_write: Any = getattr(driver_type, "bulk_write", None)

    def open(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WriteCall | ReadCall | JoinedCall | None:
        """Return the call to be made, or None where the driver is to be called as it is.

        Raises:
            ConfigurationError: It cannot be made here: the record has ended, or it is refused inside records.
            UnprotectedWriteError: Strict refuses it.
            RetryRefusedError: It repeats a call of unknown outcome.
        """
        client = _client_of(owner)
        guard = guard_of(client)
        if guard.settings.disabled or in_driver_call():
            return None
        try:
            arguments = self._parameters.bind(owner, args, kwargs)
        except TypeError:
            return None  # the driver says what is wrong
        is_read = self._reads(arguments)
        record = _current(guard, self.name, is_read=is_read)
        if record is None:
            return None
        if record.transaction is not None and self.kind is not Kind.METADATA:
            return self._join(record, owner, client, arguments, is_read=is_read)
        if self.kind is Kind.CURSOR:
            return None  # the driver's own retry of its first command stands
        foreign = _session_of(client, arguments) is not None
        if is_read:
            invoke = functools.partial(self.original, owner, *args, **kwargs)
            return None if foreign else ReadCall(record, client, guard, invoke, lambda: self._subject(owner))
        target = Target(owner, client, guard, _namespace_of(owner))
        terms = Terms(self.kind not in _UNNUMBERED, _is_acknowledged(owner, arguments), foreign)
        self._check(target, terms, arguments)
        return self._call(record, target, arguments, terms)

    def _join(self, record: Record, owner: Any, client: Any, arguments: dict[str, Any], *, is_read: bool) -> JoinedCall:
        _check_client(client, is_read=is_read)
        self._check_joining(record, owner, client, arguments, is_read=is_read)
        _list(arguments)
        is_unordered = arguments.get("ordered") is False
        if is_unordered and (self.name, _namespace_of(owner)) in record.transaction.in_order:
            arguments["ordered"] = True
        inserted = self._inserted(arguments)
        inserted.make_ids({})
        execution = record.transaction

        def fingerprint() -> bytes | None:
            return self._canonical(owner, arguments, inserted.made_ids, execution.moments())

        def invoke(session: Any) -> Any:
            return self._parameters.call(owner, self._parameters.with_session(arguments, session))

        def find_one(*args: Any, **kwargs: Any) -> Any:
            return self._driver_find_one(owner, *args, **kwargs)

        document = arguments["document"] if self.kind is Kind.INSERT_ONE else None
        return JoinedCall(
            execution,
            record,
            client,
            method=self.name,
            namespace=_namespace_of(owner),
            is_write=not is_read,
            find_one=find_one,
            statement=Statement(fingerprint, document, getattr(owner, "codec_options", None)),
            invoke=invoke,
            is_unordered=is_unordered,
        )

    def _check_joining(self, record: Record, owner: Any, client: Any, arguments: Mapping[str, Any], *, is_read: bool) -> None:
        reason = ""
        if self.kind in (Kind.DDL, Kind.COMMAND, Kind.REFUSED, Kind.APART) or (self.kind is Kind.PIPELINE and not is_read):
            reason = "MongoDB does not run it in a transaction"
        elif (session := _session_of(client, arguments)) is not None and not runs_in(session, record.transaction):
            reason = "it has a session of its own"
        elif not is_read and not _is_acknowledged(owner, arguments):
            reason = "write concern 0 asks nobody whether it was applied"
        if reason:
            tell("refused", self._subject(owner), reason)
            raise ConfigurationError(
                f"{self._subject(owner)} cannot join the record's transaction ({reason}), and beside it would "
                "wait for it or be repeated with it: call it before or after the handler"
            )

    def _subject(self, owner: Any) -> str:
        return f"{self.name} on {_namespace_of(owner)}"

    def _reads(self, arguments: Mapping[str, Any]) -> bool:
        if self.kind is Kind.PIPELINE:
            return not writes(arguments.get("pipeline"))
        if self.kind is Kind.COMMAND:
            command = arguments.get("command")
            name = command if isinstance(command, str) else next(iter(command), "") if isinstance(command, Mapping) else ""
            parts = {**(command if isinstance(command, Mapping) else {}), **arguments.get("kwargs", {})}  # as the driver does
            return name in READ_COMMANDS and not writes(parts.get("pipeline"))
        return self.kind in _READS

    def _check(self, target: Target, terms: Terms, arguments: Mapping[str, Any]) -> None:
        _check_client(target.client, is_read=False)
        if self.kind is Kind.REFUSED:
            raise ConfigurationError(
                "MongoClient.bulk_write cannot be protected in a record: use the collections' bulk_write, or call it outside"
            )
        if is_encrypted(target.client):
            raise ConfigurationError(
                f"{self.name} on a client with auto_encryption_opts is not supported inside a record: "
                "encrypt explicitly (ClientEncryption), or write outside the record"
            )
        reason = self._why_unprotected(terms, arguments)
        if reason and target.guard.settings.strict and not is_repeatable():
            tell("refused", self._subject(target.owner), reason)
            raise UnprotectedWriteError(
                f"{self._subject(target.owner)} cannot be protected ({reason}), which strict refuses; "
                "wrap it in repeatable() if running it twice is right"
            )
        if not terms.acknowledged:
            target.guard.warn_once("w:0", f"{self.name} on {target.namespace} is sent once and never again: {reason}")

    def _why_unprotected(self, terms: Terms, arguments: Mapping[str, Any]) -> str:
        if not terms.acknowledged:
            return "write concern 0 asks nobody whether it was applied"
        if terms.foreign:
            return "it runs on a session of yours"
        if not terms.addressable:
            return "the server does not number it"
        if self.kind is Kind.BULK and has_multi(arguments["requests"]):
            return "the server does not number its members that change many documents"
        return ""

    def _call(self, record: Record, target: Target, arguments: dict[str, Any], terms: Terms) -> WriteCall:
        _list(arguments)
        plan = self._plan(target, arguments, terms)
        earlier: WriteCall | None = record.unknown_call
        if earlier is not None and earlier.is_repeated_by(target, self.name, plan, terms):
            earlier.resume(target, plan)
            return earlier
        record.unknown_call = None
        plan.inserted.make_ids({}, self._deriving(record, target))
        return WriteCall(record, target, self.name, plan, terms)

    @staticmethod
    def _deriving(record: Record, target: Target) -> Callable[[Any], ObjectId] | None:
        """Return what makes ids from documents, where the handler asked for that."""
        ids = record.derived_ids
        if ids is None:
            return None
        return lambda document: ids.make(target.namespace, document, target.owner.codec_options)

    # plans

    def _plan(self, target: Target, arguments: Mapping[str, Any], terms: Terms) -> Plan:
        """Return what the call comes to; nothing of the user's is changed yet."""
        inserted = self._inserted(arguments)
        fingerprint = functools.partial(self._canonical, target.owner, arguments)

        def invoke(owner: Any) -> Any:
            return self._parameters.call(owner, arguments)

        def recovered() -> InsertOneResult | None:
            is_one = self.kind is Kind.INSERT_ONE
            return InsertOneResult(arguments["document"]["_id"], acknowledged=True) if is_one else None

        whole = Part(invoke, multi=not terms.addressable, made_ids=inserted.made_ids)
        plan = Plan(lambda: [whole], inserted, fingerprint, recovered=recovered)
        if self.kind in (Kind.INSERT_ONE, Kind.SINGLE):
            return plan
        if terms.foreign or not terms.acknowledged:
            return plan
        if self.kind is Kind.BULK and are_requests(arguments["requests"]):
            return self._cut(plan, target, arguments["requests"], arguments)
        if self.kind is Kind.INSERT_MANY and are_documents(documents := arguments["documents"]):
            requests = [InsertOne(document) for document in documents]
            plan = self._cut(plan, target, requests, arguments)
            return replace(plan, conclude=lambda _: insert_many_result(documents))
        return plan  # where the arguments are wrong, the driver says so

    def _canonical(
        self,
        owner: Any,
        arguments: Mapping[str, Any],
        made_ids: Mapping[int, Any],
        moments: tuple[dt.datetime, dt.datetime] | None = None,
    ) -> bytes | None:
        """Return a call in a form that can be compared, without made ids and without the moments of an execution."""
        compared = {name: arguments[name] for name in sorted(arguments) if name != "session"}
        compared |= self._without_made_ids(arguments, made_ids)
        if moments is not None:
            compared = without_moments(compared, *moments)
        return canonical(compared, getattr(owner, "codec_options", None))

    def _cut(self, plan: Plan, target: Target, requests: Sequence[Any], arguments: Mapping[str, Any]) -> Plan:
        options = {name: value for name, value in arguments.items() if name not in ("requests", "documents")}
        cut = functools.partial(cut_bulk, self._bulk_write, target.owner, requests, options, made_ids=plan.inserted.made_ids)
        return replace(plan, cut=cut, ordered=bool(options.get("ordered", True)))

    def _inserted(self, arguments: Mapping[str, Any]) -> Inserted:
        match self.kind:
            case Kind.INSERT_ONE:
                return Inserted({0: arguments["document"]})
            case Kind.INSERT_MANY if are_documents(arguments["documents"]):
                return Inserted(dict(enumerate(arguments["documents"])))
            case Kind.BULK:
                return inserted_by_requests(arguments["requests"])
        return Inserted({})

    def _without_made_ids(self, arguments: Mapping[str, Any], made_ids: Mapping[int, Any]) -> dict[str, Any]:
        match self.kind:
            case Kind.INSERT_ONE:
                return {"document": without_made_id(arguments["document"], made_ids.get(0))}
            case Kind.INSERT_MANY:
                documents = enumerate(arguments["documents"])
                return {"documents": [without_made_id(document, made_ids.get(place)) for place, document in documents]}
            case Kind.BULK:
                return {"requests": plain_requests(arguments["requests"], made_ids)}
        return {}


def _list(arguments: dict[str, Any]) -> None:
    """Make arguments that may be any iterable lists: they may have to be sent again, and give other items each time."""
    for name in _ITERABLES:
        if name in arguments:
            arguments[name] = _listed(arguments[name])


def _listed(value: Any) -> Any:
    if not isinstance(value, Iterable) or isinstance(value, (list, str, Mapping)) or not value:
        return value
    return list(value) or iter(())  # the driver tells an empty list from an iterator without an item


def _current(guard: Guard, name: str, *, is_read: bool) -> Record | None:
    """Return the record that a call belongs to, or None outside any.

    Raises:
        ConfigurationError: A write in a record that has ended.
        UnprotectedWriteError: Under strict, a write outside any record.
    """
    scope = scope_here()
    record = scope if isinstance(scope, Record) and not scope.ended else None
    if is_read:
        return record
    if scope is not None and scope.ended:
        raise ConfigurationError(
            f"{name} was called in the record {scope.label()}, which has ended: a thread or task outlived its handler; "
            "wait for it inside the handler (a process forked inside it needs a record of its own)"
        )
    if record is None and guard.settings.strict:
        raise UnprotectedWriteError(
            f"{name} was called outside any record, which strict refuses: decorate the handler with saferetry.handler, use "
            "'with record(...)', or bind a thread's function with propagate()"
        )
    if record is None and (others := OPEN_RECORDS.elsewhere()):
        for other in others:
            other.note_effect(f"meanwhile {name} was called in a thread outside the record")
        guard.warn_once(
            "outside",
            f"{name} was called in a thread outside any record while a record was open in another: it is not protected, and "
            "that record's handler will not be executed again; bind the thread's function with propagate()",
        )
    return record


def _check_client(client: Any, *, is_read: bool) -> None:
    objection = guard_of(client).objection
    if objection and not is_read:
        raise ConfigurationError(objection)


def _client_of(owner: Any) -> Any:
    if isinstance(owner, (Collection, AsyncCollection)):
        return owner.database.client
    return owner.client if isinstance(owner, (Database, AsyncDatabase)) else owner


def _session_of(client: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the session that the user gave (some methods take it among ``**kwargs``) or bound, or None."""
    given = arguments.get("session")
    if given is None and "kwargs" in arguments:
        given = arguments["kwargs"].get("session")
    return given if given is not None else bound_session(client)


def _namespace_of(owner: Any) -> str:
    if isinstance(owner, (Collection, AsyncCollection)):
        return owner.full_name
    return owner.name if isinstance(owner, (Database, AsyncDatabase)) else "the client"


def _is_acknowledged(owner: Any, arguments: Mapping[str, Any]) -> bool:
    given = arguments["kwargs"].get("writeConcern") if "kwargs" in arguments else None
    if given is None and "command" in arguments and isinstance(command := arguments["command"], Mapping):
        given = command.get("writeConcern")
    if given is not None and isinstance(given, Mapping):
        return given.get("w") != 0
    return bool(owner.write_concern.acknowledged)
