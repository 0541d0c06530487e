"""The guarded methods: one table, and how each is planned."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bson.objectid import ObjectId
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.collection import Collection

from saferetry._arguments import Parameters
from saferetry._call import WriteCall
from saferetry._command import Target, Terms
from saferetry._decisions import tell
from saferetry._execution import JoinedCall
from saferetry._identity import DerivedIds
from saferetry._limits import READ_COMMANDS, writes
from saferetry._parts import has_multi
from saferetry._plans import BulkPlan, InsertManyPlan, InsertOnePlan, Plan
from saferetry._read import ReadCall
from saferetry._record import OPEN_RECORDS, Record, is_repeatable
from saferetry._seam import DRIVER_CALL, SCOPE, Guard, Scope, client_of, guard_of, namespace_of, runs_in, session_of
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
_PLANS: Mapping[Kind, type[Plan]] = {
    Kind.INSERT_ONE: InsertOnePlan,
    Kind.INSERT_MANY: InsertManyPlan,
    Kind.BULK: BulkPlan,
}
_terms = functools.cache(Terms)  # there are few, and every call has some


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
        self.parameters = Parameters(self.original)
        self.bulk_write: Any = getattr(driver_type, "bulk_write", None)
        self.find_one: Any = getattr(driver_type, "find_one", None)
        self._plan_type = _PLANS.get(kind, Plan)
        self._is_of_collection = issubclass(driver_type, (Collection, AsyncCollection))
        self._is_read = kind in _READS
        self._is_numbered = kind not in _UNNUMBERED
        self._depends = kind in (Kind.PIPELINE, Kind.COMMAND)  # on its arguments, whether it reads
        self._may_say_concern = not {"kwargs", "command"}.isdisjoint(self.parameters.names)
        self._iterables = [argument for argument in _ITERABLES if argument in self.parameters.names]

    def open(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WriteCall | ReadCall | JoinedCall | None:
        """Return the call to be made, or None where the driver is to be called as it is.

        Raises:
            ConfigurationError: It cannot be made here: the record has ended, or it is refused inside records.
            UnprotectedWriteError: Strict refuses it.
            RetryRefusedError: It repeats a call of unknown outcome.
        """
        client = owner._database._client if self._is_of_collection else client_of(owner)
        guard: Guard = client._saferetry_guard
        announced = DRIVER_CALL.get()
        if guard.settings.disabled or (announced is not None and not announced.done):
            return None  # the driver, or a guarded method itself, calls it
        anchor = SCOPE.get()
        scope = None if anchor is None else anchor.scope
        record = scope if isinstance(scope, Record) and not scope.ended else None
        if record is None and not self._depends:
            _look_outside(guard, self.name, scope, is_read=self._is_read)
            return None
        try:
            arguments = self.parameters.bind(owner, args, kwargs)
        except TypeError:
            return None  # the driver says what is wrong
        is_read = self._reads(arguments) if self._depends else self._is_read
        if record is None:
            _look_outside(guard, self.name, scope, is_read=is_read)
            return None
        if record.transaction is not None and self.kind is not Kind.METADATA:
            return self._join(record, owner, client, arguments, is_read=is_read)
        if self.kind is Kind.CURSOR:
            return None  # the driver's own retry of its first command stands
        foreign = session_of(client, arguments) is not None
        if is_read:
            invoke = functools.partial(self.original, owner, *args, **kwargs)
            return None if foreign else ReadCall(record, client, guard, invoke, lambda: self._subject(owner))
        target = Target(owner, client, guard)
        terms = _terms(self._is_numbered, self._is_acknowledged(owner, arguments), foreign)
        if guard.is_particular or self.kind is Kind.REFUSED or not terms.acknowledged:
            self._check(target, terms, arguments)
        return self._call(record, target, arguments, terms)

    def _join(self, record: Record, owner: Any, client: Any, arguments: dict[str, Any], *, is_read: bool) -> JoinedCall:
        self._check_joining(record, owner, client, arguments, is_read=is_read)
        if self._iterables:
            self._list(arguments)
        is_unordered = arguments.get("ordered") is False
        if is_unordered and (self.name, namespace_of(owner)) in record.transaction.in_order:
            arguments["ordered"] = True
        plan = self._plan_type(self, owner, arguments)
        if plan.inserted.documents:
            plan.inserted.make_ids({})
        return JoinedCall(record, client, plan, is_write=not is_read, is_unordered=is_unordered)

    def _check_joining(self, record: Record, owner: Any, client: Any, arguments: Mapping[str, Any], *, is_read: bool) -> None:
        if (objection := guard_of(client).objection) and not is_read:
            raise ConfigurationError(objection)
        reason = ""
        if self.kind in (Kind.DDL, Kind.COMMAND, Kind.REFUSED, Kind.APART) or (self.kind is Kind.PIPELINE and not is_read):
            reason = "MongoDB does not run it in a transaction"
        elif (session := session_of(client, arguments)) is not None and not runs_in(session, record.transaction):
            reason = "it has a session of its own"
        elif not is_read and not self._is_acknowledged(owner, arguments):
            reason = "write concern 0 asks nobody whether it was applied"
        if reason:
            tell("refused", self._subject(owner), reason)
            raise ConfigurationError(
                f"{self._subject(owner)} cannot join the record's transaction ({reason}), and beside it would "
                "wait for it or be repeated with it: call it before or after the handler"
            )

    def _is_acknowledged(self, owner: Any, arguments: Mapping[str, Any]) -> bool:
        if not self._may_say_concern:
            return owner._write_concern.acknowledged  # type: ignore[no-any-return]
        given = arguments["kwargs"].get("writeConcern") if "kwargs" in arguments else None
        if given is None and "command" in arguments and isinstance(command := arguments["command"], Mapping):
            given = command.get("writeConcern")
        if isinstance(given, Mapping):
            return given.get("w") != 0
        return bool(owner.write_concern.acknowledged)

    def _subject(self, owner: Any) -> str:
        return f"{self.name} on {namespace_of(owner)}"

    def _reads(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call reads, where that depends on its arguments."""
        if self.kind is Kind.PIPELINE:
            return not writes(arguments.get("pipeline"))
        command = arguments.get("command")
        name = command if isinstance(command, str) else next(iter(command), "") if isinstance(command, Mapping) else ""
        parts = {**(command if isinstance(command, Mapping) else {}), **arguments.get("kwargs", {})}  # as the driver does
        return name in READ_COMMANDS and not writes(parts.get("pipeline"))

    def _check(self, target: Target, terms: Terms, arguments: Mapping[str, Any]) -> None:
        if target.guard.objection:
            raise ConfigurationError(target.guard.objection)
        if self.kind is Kind.REFUSED:
            raise ConfigurationError(
                "MongoClient.bulk_write cannot be protected in a record: use the collections' bulk_write, or call it outside"
            )
        if target.guard.is_encrypted:
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
        if self._iterables:
            self._list(arguments)
        plan = self._plan(target, arguments, terms)
        earlier: WriteCall | None = record.unknown_call
        if earlier is not None:
            if earlier.is_repeated_by(target, self.name, plan, terms):
                earlier.resume(target, plan)
                return earlier
            record.unknown_call = None
        if plan.inserted.documents:
            ids = record.derived_ids
            plan.inserted.make_ids({}, None if ids is None else _deriving(ids, target))
        return WriteCall(record, target, self.name, plan, terms)

    def _plan(self, target: Target, arguments: dict[str, Any], terms: Terms) -> Plan:
        """Return what the call comes to; nothing of the user's is changed yet."""
        is_whole = terms.foreign or not terms.acknowledged
        return self._plan_type(self, target.owner, arguments, multi=not terms.addressable, is_whole=is_whole)

    def _list(self, arguments: dict[str, Any]) -> None:
        """Make arguments that may be any iterable lists: they may have to be sent again, and give other items each time."""
        for name in self._iterables:
            if name in arguments:
                arguments[name] = _listed(arguments[name])


def _deriving(ids: DerivedIds, target: Target) -> Callable[[Any], ObjectId]:
    """Return what makes ids from documents."""
    return lambda document: ids.make(target.namespace, document, target.owner.codec_options)


def _listed(value: Any) -> Any:
    if not isinstance(value, Iterable) or isinstance(value, (list, str, Mapping)) or not value:
        return value
    return list(value) or iter(())  # the driver tells an empty list from an iterator without an item


def _look_outside(guard: Guard, name: str, scope: Scope | None, *, is_read: bool) -> None:
    """Look at a call outside any open record.

    Raises:
        ConfigurationError: A write in a record that has ended.
        UnprotectedWriteError: Under strict, a write outside any record.
    """
    if is_read:
        return
    if scope is not None and scope.ended:
        raise ConfigurationError(
            f"{name} was called in the record {scope.label()}, which has ended: a thread or task outlived its handler; "
            "wait for it inside the handler (a process forked inside it needs a record of its own)"
        )
    if guard.settings.strict:
        raise UnprotectedWriteError(
            f"{name} was called outside any record, which strict refuses: decorate the handler with saferetry.handler, use "
            "'with record(...)', or bind a thread's function with propagate()"
        )
    if others := OPEN_RECORDS.elsewhere():
        for other in others:
            other.note_effect(f"meanwhile {name} was called in a thread outside the record")
        guard.warn_once(
            "outside",
            f"{name} was called in a thread outside any record while a record was open in another: it is not protected, and "
            "that record's handler will not be executed again; bind the thread's function with propagate()",
        )
