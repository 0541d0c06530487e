"""What handlers do: steps, which are data, made into calls on a database, guarded or plain, sync or async."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gridfs
import pymongo
from gridfs.asynchronous import AsyncGridFS
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import BulkWriteError, DuplicateKeyError, PyMongoError, WriteConcernError, WriteError

import saferetry
from tests.support.driving import done

OWNER = "@o"  # stands for the record's name in the arguments of a step
DOCUMENTS = "docs"
SHARED = "shared"
COUNTER = "counter"
LEFT_OUT = "left out"
READS = frozenset({"find", "find_one", "count_documents", "distinct", "aggregate"})
SHOW_DOCUMENTS = READS | {"find_one_and_update", "find_one_and_replace", "find_one_and_delete"}
GRIDFS = frozenset({"gridfs_put", "gridfs_delete"})
_DUPLICATE = 11000
_MANY_STATEMENTS = 100
_KIND_ORDER = ("InsertOne", "UpdateOne", "ReplaceOne", "UpdateMany", "DeleteOne", "DeleteMany")
_INSERTS, _UPDATES = ("InsertOne",), ("UpdateOne", "ReplaceOne", "UpdateMany")
_MANY = ("UpdateMany", "DeleteMany")


class AppError(Exception):
    """An error of the handler's own."""


@dataclass(frozen=True)
class Condition:
    """Let a step be done only if one of the record's documents has this much of `n`."""

    key: int
    at_least: int


@dataclass(frozen=True)
class Step:
    """One thing that a handler does.

    Attributes:
        do: a method of the collection, or "count" (the shared counter), "fail", "gridfs_put", "gridfs_delete".
        arguments: the method's keyword arguments, `OWNER` for the record's name; a bulk's requests as [kind, arguments].
        condition: whether it is done at all.
        catches: whether the handler catches duplicates and goes on.
        tries: how often the handler calls it while it fails, as people do with tenacity.
    """

    do: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    condition: Condition | None = None
    catches: bool = False
    tries: int = 1

    @property
    def is_write(self) -> bool:
        """Whether it may change something."""
        return self.do != "fail" and self.do not in READS

    @property
    def is_multi(self) -> bool:
        """Whether a statement of it may change many documents, so that the server may do a part of it."""
        if self.do == "bulk_write":
            return any(kind in _MANY for kind, _ in self.arguments["requests"])
        return self.do in ("update_many", "delete_many", *GRIDFS)

    @property
    def is_one_statement(self) -> bool:
        """Whether it is one statement about one document."""
        return self.is_write and not self.is_multi and self.do not in ("bulk_write", "insert_many")

    def prefixes(self, more: int) -> Iterator[Step]:
        """Yield the step with the first statement only, with the first two, and so on, all of them left out.

        Args:
            more: documents that there are more than before; of thousands of inserts only so many are looked at.
        """
        name = {"bulk_write": "requests", "insert_many": "documents"}.get(self.do)
        if name is None:
            return
        statements = list(self.arguments[name])
        if self.do == "bulk_write" and not self.arguments.get("ordered", True):  # by kind, those that are multi last
            statements.sort(key=lambda request: (_place_of_kind(request[0]), request[0] in _MANY))
        counts = range(1, len(statements))
        for count in counts if len(counts) < _MANY_STATEMENTS else {more} & set(counts):
            yield Step(self.do, {**self.arguments, name: statements[:count]}, catches=True)


def _place_of_kind(kind: str) -> int:
    return 0 if kind in _INSERTS else 1 if kind in _UPDATES else 2


@dataclass
class Progress:
    """Where a handler is; filled while it runs, anew by each execution."""

    at: int = 0
    first_write: int = 0  # of the record's write calls, the one that belongs to the present step
    results: list[Any] = field(default_factory=list)
    executions: int = 0

    def begin(self) -> None:
        """Begin an execution."""
        self.at, self.first_write, self.executions = 0, 0, self.executions + 1
        self.results.clear()


async def run(database: Any, owner: str, steps: Sequence[Step], progress: Progress) -> list[Any]:
    """Run a handler's steps; return their results. In a sync client's database nothing waits."""
    progress.begin()
    for number, step in enumerate(steps):
        progress.at = number
        record = saferetry.current_record()
        progress.first_write = len(record.writes) if record is not None else 0
        if step.condition is not None and not await _holds(database, owner, step.condition):
            progress.results.append(LEFT_OUT)
            continue
        try:
            progress.results.append(await _tried(database, owner, step, progress))
        except (DuplicateKeyError, BulkWriteError, WriteError) as exc:
            if not (step.catches and is_duplicate(exc)):
                raise
            progress.results.append(exc)
    return progress.results


def is_duplicate(exc: BaseException) -> bool:
    """Whether an error says nothing but that keys were there already."""
    if isinstance(exc, BulkWriteError):
        errors = exc.details.get("writeErrors", [])
        return bool(errors) and all(error["code"] == _DUPLICATE for error in errors)
    return isinstance(exc, DuplicateKeyError)


async def _holds(database: Any, owner: str, condition: Condition) -> bool:
    found = await done(database[DOCUMENTS].find_one({"_id": f"{owner}:{condition.key}"}))
    return found is not None and found.get("n", 0) >= condition.at_least


async def _tried(database: Any, owner: str, step: Step, progress: Progress) -> Any:
    for left in reversed(range(step.tries)):
        try:
            return await call(database, owner, step, progress)
        except PyMongoError as exc:
            if not left or is_data_error(exc) or _says_applied(exc):
                raise
    raise AssertionError("unreachable")


def _says_applied(exc: PyMongoError) -> bool:
    """Whether it was applied and only its durability is unknown, so that another call is another write."""
    if isinstance(exc, BulkWriteError):
        return bool(exc.details.get("writeConcernErrors")) and not exc.details.get("writeErrors")
    return isinstance(exc, WriteConcernError)


def is_data_error(exc: BaseException) -> bool:
    """Whether the data are at fault, so that nobody would call again."""
    return is_duplicate(exc) or (isinstance(exc, (WriteError, BulkWriteError)) and _code_of(exc) in (14, 2, 28, 66))


def _code_of(exc: WriteError | BulkWriteError) -> int | None:
    if isinstance(exc, BulkWriteError):
        errors = exc.details.get("writeErrors", [])
        return errors[-1]["code"] if errors else None
    return exc.code


async def call(database: Any, owner: str, step: Step, progress: Progress) -> Any:
    """Make a step's call."""
    arguments = _filled(step.arguments, owner)
    if step.do in _SPECIAL:
        return await _SPECIAL[step.do](database, arguments, progress)
    if step.do == "bulk_write":
        arguments["requests"] = [getattr(pymongo, kind)(**given) for kind, given in arguments["requests"]]
    result = await done(getattr(database[DOCUMENTS], step.do)(**arguments))
    return await done(result.to_list()) if step.do in ("find", "aggregate") else result


def _filled(value: Any, owner: str) -> Any:
    match value:
        case str():
            return value.replace(OWNER, owner)
        case Mapping():
            return {_filled(name, owner): _filled(item, owner) for name, item in value.items()}
        case list() | tuple():
            return [_filled(item, owner) for item in value]
    return value


async def _count(database: Any, arguments: Mapping[str, Any], progress: Progress) -> Any:
    update = {"$inc": {"n": 1}, "$set": {"last": arguments["owner"]}}
    return await done(database[SHARED].update_one({"_id": COUNTER}, update))


async def _fail(database: Any, arguments: Mapping[str, Any], progress: Progress) -> Any:
    if progress.executions <= arguments["times"]:
        raise AppError("the handler has an error of its own")
    return "went on"


def _bucket(database: Any) -> Any:
    return AsyncGridFS(database) if isinstance(database, AsyncDatabase) else gridfs.GridFS(database)


async def _gridfs_put(database: Any, arguments: Mapping[str, Any], progress: Progress) -> Any:
    content = io.BytesIO(b"x" * arguments["size"])
    own = {"_id": arguments["id"], "filename": arguments["owner"], "chunkSize": arguments["chunk"]}
    return await done(_bucket(database).put(content, **own))


async def _gridfs_delete(database: Any, arguments: Mapping[str, Any], progress: Progress) -> Any:
    return await done(_bucket(database).delete(arguments["id"]))


_SPECIAL: Mapping[str, Callable[[Any, Mapping[str, Any], Progress], Awaitable[Any]]] = {
    "count": _count,
    "fail": _fail,
    "gridfs_put": _gridfs_put,
    "gridfs_delete": _gridfs_delete,
}
