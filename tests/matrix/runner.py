"""Run a row of the matrix undisturbed and disturbed, and make what is seen comparable.

A row is written once. The undisturbed run is plain PyMongo's; the disturbed one goes through the guarded client, of either
API, behind a proxy that strikes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pymongo
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure
from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

import saferetry
from saferetry import WriteView
from tests.support import CommandLog, Mode, Mongod, Proxy
from tests.support.driving import done

STOCK: tuple[Mapping[str, Any], ...] = (
    {"_id": 1, "n": 1, "tags": ["a", "b"]},
    {"_id": 2, "n": 2, "tags": ["b"]},
    {"_id": 3, "n": 3, "tags": []},
)
WRITE_COMMANDS = ("insert", "update", "delete", "findAndModify")
DRIVER_SENDS = 2  # of one driver call of a numbered command: the driver's own resend


@dataclass(frozen=True)
class Row:
    """One call of the matrix.

    Attributes:
        name: Names it in test ids.
        call: Makes the call on a collection, and returns what it returns (in asyncio something to await).
        commands: The wire commands it comes to, in order.
        setup: Documents that are there before.
        unique: A field with a unique index, "" for none.
        loses_errors: A server before 5.0 answers a resend without the errors, or with misplaced ones, so that more is asked.
    """

    name: str
    call: Callable[[Any], Any]
    commands: Sequence[str]
    setup: Sequence[Mapping[str, Any]] = STOCK
    unique: str = ""
    loses_errors: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Fault:
    """What the proxy does to some command, and how often."""

    mode: Mode
    times: int

    def __str__(self) -> str:
        return f"{self.mode}-{self.times}"


LOST_TWICE = Fault("close", 2)


@dataclass(frozen=True)
class Seen:
    """What a run left and answered, without what differs by nature."""

    left: Any
    answer: Any


@dataclass(frozen=True)
class Run:
    """One disturbed run."""

    seen: Seen
    answer: Any  # as it was
    writes: tuple[WriteView, ...]


async def answer_of(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the error it raises."""
    try:
        return await done(call())
    except Exception as exc:  # noqa: BLE001 - errors are answers here, and compared
        return exc


@dataclass
class Ground:
    """What a test of the matrix stands on."""

    mongod: Mongod
    admin: pymongo.MongoClient[dict[str, Any]]
    log: CommandLog
    proxy: Proxy
    connect: Callable[..., Any]
    name: str

    @property
    def left(self) -> pymongo.database.Database[dict[str, Any]]:
        """The database of the disturbed run, looked at past the proxy."""
        return self.admin[self.name]

    def documents(self) -> list[dict[str, Any]]:
        """Return what is in the collection of the disturbed run."""
        return list(self.left.c.find())

    def prepare(self, database_name: str, row: Row) -> None:
        """Put a row's documents into a database."""
        collection = self.admin[database_name].c
        if row.unique:
            collection.create_index(row.unique, unique=True)  # first: with documents it takes 100 ms
        if row.setup:
            collection.insert_many(copy.deepcopy([dict(document) for document in row.setup]))

    async def undisturbed(self, row: Row) -> Seen:
        """Run a row on plain PyMongo."""
        name = self.name + "_plain"
        self.prepare(name, row)
        answer = await answer_of(lambda: row.call(self.admin[name].c))
        return seen(self.admin[name], answer)

    async def each_lost(self, row: Row, *, times: int = DRIVER_SENDS) -> Run:
        """Run a row on a guarded client, the replies of each of its commands lost so many times."""
        self.prepare(self.name, row)
        client = self.connect(self.proxy.uri())
        losses = lose_each(self.proxy, row.commands, times=times)
        async with saferetry.record(name=row.name) as record:
            answer = await answer_of(lambda: row.call(client[self.name].c))
            writes = record.writes
        assert losses == [command for command in row.commands for _ in range(times)]
        return Run(seen(self.left, answer), answer, writes)

    async def disturbed(self, row: Row, fault: Fault, *, place: int = 0, **options: Any) -> Run:
        """Run a row on a guarded client, its command at `place` struck by a fault."""
        self.prepare(self.name, row)
        client = self.connect(self.proxy.uri(), **options)
        await done(client.admin.command("ping"))
        command = row.commands[place]
        self.proxy.arm(None, fault.mode, fault.times, command=command, skip=list(row.commands[:place]).count(command))
        self.log.clear()
        async with saferetry.record(name=row.name) as record:
            answer = await answer_of(lambda: row.call(client[self.name].c))
            writes = record.writes
        return Run(seen(self.left, answer), answer, writes)

    @property
    def server(self) -> tuple[int, int]:
        """The server's major and minor version."""
        major, minor = self.mongod.version.split(".")[:2]
        return int(major), int(minor)


def report_of(exc: BaseException) -> saferetry.CallReport:
    """Return what saferetry says about a failed call."""
    report: saferetry.CallReport = vars(exc)["saferetry"]
    return report


def lose_each(proxy: Proxy, commands: Sequence[str], *, times: int = DRIVER_SENDS) -> list[str]:
    """Lose the replies of each of these commands, in this order, so many times; return where each loss is noted."""
    losses: list[str] = []

    def arm(place: int) -> None:
        before = len(losses)

        def note() -> None:
            losses.append(commands[place])
            if len(losses) == before + times and place + 1 < len(commands):
                arm(place + 1)

        is_like_the_last = place > 0 and commands[place] == commands[place - 1]  # whose answered send is to pass
        proxy.arm(None, "close", times, command=commands[place], skip=int(is_like_the_last), on_hit=note)

    arm(0)
    return losses


def addresses(log: CommandLog, *names: str) -> list[tuple[bytes, int, int]]:
    """Return (lsid, txnNumber, stmtId) of each send, in order."""
    return [
        (bytes(command["lsid"]["id"]), command["txnNumber"], command.get("stmtId", 0))
        for command in log.commands(*(names or WRITE_COMMANDS))
    ]


# --- what is seen, without what differs by nature --------------------------------------------------------------------------

_SERVERS_OWN = frozenset({"opTime", "electionId", "$clusterTime", "operationTime", "retriedStmtIds"})
_OBJECT_ID = re.compile(r"ObjectId\('([0-9a-f]{24})'\)")  # as the server writes it in messages
_RESULTS = (BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult)


@dataclass
class Disguise:
    """Replace what differs from run to run: each ObjectId by its number in order of appearance, the database's name."""

    database_name: str
    object_ids: dict[ObjectId, str] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """Return a value in a form that can be compared."""
        match value:
            case ObjectId():
                return self.object_ids.setdefault(value, f"ObjectId {len(self.object_ids)}")
            case RawBSONDocument():
                return self.of(dict(value))
            case Mapping():
                return {self.of(key): self.of(item) for key, item in value.items() if key not in _SERVERS_OWN}
            case list() | tuple():
                return [self.of(item) for item in value]
            case str():
                named = value.replace(self.database_name, "database")
                return _OBJECT_ID.sub(lambda match: str(self.of(ObjectId(match[1]))), named)
            case OperationFailure():
                details = self.of(value.details)
                return {"error": type(value).__name__, "code": value.code, "details": details}
            case Exception():
                return {"error": type(value).__name__}
            case _ if isinstance(value, _RESULTS):
                names = [name for name in dir(type(value)) if isinstance(getattr(type(value), name), property)]
                return {"result": type(value).__name__, **{name: self.of(getattr(value, name)) for name in names}}
        return value


def seen(database: pymongo.database.Database[dict[str, Any]], answer: Any) -> Seen:
    """Return what a database holds now, and an answer, in a form that can be compared."""
    disguise = Disguise(database.name)
    left = {
        name: {
            "documents": disguise.of(sorted(database[name].find(), key=_without_object_ids)),
            "indexes": disguise.of(database[name].index_information()),
        }
        for name in sorted(database.list_collection_names())
    }
    return Seen(left, disguise.of(_plain_cursor(answer)))


def _without_object_ids(document: Mapping[str, Any]) -> str:
    """Return what documents are sorted by: a server that recovers from its oplog keeps no order."""
    return repr([item for item in document.items() if not isinstance(item[1], ObjectId)])


def _plain_cursor(answer: Any) -> Any:
    """Return a cursor's or a collection's kind instead of itself; only $out and $merge give cursors here, empty ones."""
    if isinstance(answer, (Mapping, Exception, str, int, list, *_RESULTS, type(None))):
        return answer
    return type(answer).__name__.removeprefix("Async")
