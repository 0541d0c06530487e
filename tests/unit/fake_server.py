"""A driver and a server in one, in memory: guarded collections run on it without a network, and faults come as a script.

The server remembers writes as mongod does: by session, number and statement id, effects only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

from bson.objectid import ObjectId
from pymongo import InsertOne
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    ExecutionTimeout,
    ServerSelectionTimeoutError,
)
from pymongo.results import BulkWriteResult, InsertOneResult, UpdateResult

from saferetry import MongoClient, Settings, _retry, _seam
from saferetry._collections import _guarded
from saferetry._parts import empty_result
from saferetry._seam import DriverCall

# What may happen to one send.
Fault = Literal["ok", "no server", "lost", "reply lost", "timed out", "wait queue"]
KEEPS_WRITE_ERRORS = 13

Place = tuple[bytes, int, int]


class FakeServer:
    """One replica set (or standalone) that knows documents by ``_id`` and counters by name.

    Attributes:
        faults: What happens to the next sends; after them all is well.
        numbers: It numbers writes (a replica set).
        wire_version: 9 is server 4.4, 13 is 5.0.
    """

    def __init__(self, faults: Sequence[Fault] = (), *, numbers: bool = True, wire_version: int = 17) -> None:
        self.faults = list(faults)
        self.numbers = numbers
        self.wire_version = wire_version
        self.documents: dict[Any, dict[str, Any]] = {}
        self.copies: Counter[Any] = Counter()  # times that a document or counter was really written
        self.memory: dict[Place, Any] = {}
        self.collisions: list[Place] = []  # two writes at one address: the second was swallowed
        self.sends = 0
        self.driver_calls = 0
        self.seen: list[tuple[str, Any]] = []  # (method, argument) of every driver call

    # --- the server

    def apply(self, call: DriverCall | None, statements: Sequence[tuple[Any, Any]], *, ordered: bool) -> dict[str, Any]:
        """Run a command: statements are (what it writes, document or None)."""
        result = empty_result()
        for at, (token, document) in enumerate(statements):
            place = self._place(call, at)
            if place in self.memory:
                if self.memory[place] != token:
                    self.collisions.append(place)
            elif document is not None and document["_id"] in self.documents:
                error = {"index": at, "code": 11000, "errmsg": "E11000", "keyPattern": {"_id": 1}}
                result["writeErrors"].append({**error, "keyValue": {"_id": document["_id"]}})
                if ordered:
                    break
                continue
            else:
                self._write(token, document)
                if place is not None:
                    self.memory[place] = token
            if document is not None:
                result["nInserted"] += 1
            else:
                result["nMatched"] += 1
                result["nModified"] += 1
        return result

    def _place(self, call: DriverCall | None, at: int) -> Place | None:
        if call is None or call.address is None:
            return None
        return bytes(call.address.session_id["id"]), int(call.address.number), call.statement_id + at

    def _write(self, token: Any, document: dict[str, Any] | None) -> None:
        self.copies[token] += 1
        if document is not None:
            self.documents[document["_id"]] = dict(document)

    # --- the driver

    def run(self, method: str, argument: Any, statements: Sequence[tuple[Any, Any]], **options: Any) -> dict[str, Any]:
        """Make a driver call: up to two sends where the server numbers, one where it does not."""
        ordered, numbered = options.get("ordered", True), options.get("numbered", True) and self.numbers
        acknowledged = options.get("acknowledged", True) and options.get("session") is None
        self.driver_calls += 1
        self.seen.append((method, argument))
        call = _seam.DRIVER_CALL.get() if acknowledged else None
        error: Exception | None = None
        for _ in range(2 if numbered else 1):
            fault = self.faults.pop(0) if self.faults else "ok"
            if fault in ("no server", "wait queue"):
                raise error or (ServerSelectionTimeoutError("no server") if fault == "no server" else AutoReconnect("queue"))
            self._count(call, numbered=numbered)
            if fault == "timed out":
                raise ExecutionTimeout("too long", 50, {"ok": 0, "code": 50})
            if fault == "lost":
                error = AutoReconnect("lost")
                continue
            address = call if numbered else None
            is_known = self._is_known(address, statements)
            result = self.apply(address, statements, ordered=ordered)
            if fault == "reply lost":
                error = AutoReconnect("lost")
                continue
            if is_known and self.wire_version < KEEPS_WRITE_ERRORS and not ordered:
                result["writeErrors"] = []  # servers before 5.0 forget them
            return result
        assert error is not None
        raise error

    def _is_known(self, call: DriverCall | None, statements: Sequence[Any]) -> bool:
        return any(self._place(call, at) in self.memory for at in range(len(statements)))

    def _count(self, call: DriverCall | None, *, numbered: bool) -> None:
        self.sends += 1
        if call is not None:
            call.sends += 1
            call.numbered = call.numbered and numbered
            call.wire_version = self.wire_version


class _FakeDriverCollection(Collection[dict[str, Any]]):
    """The driver's collection, its commands sent to a fake server."""

    server: FakeServer

    def bulk_write(self, requests: Any, ordered: bool = True, session: Any = None, comment: Any = None) -> Any:  # type: ignore[override]  # noqa: FBT002 - the driver's
        for request in requests:
            if isinstance(request, InsertOne):
                request._doc.setdefault("_id", ObjectId())
        statements = [
            (request._doc["_id"], request._doc) if isinstance(request, InsertOne) else (request._filter["counter"], None)
            for request in requests
        ]
        numbered = not any(type(request).__name__ in ("UpdateMany", "DeleteMany") for request in requests)
        result = self.server.run(
            "bulk_write", requests, statements, ordered=ordered, numbered=numbered, session=session, acknowledged=self._acks()
        )
        if result["writeErrors"]:
            raise BulkWriteError(result)
        return BulkWriteResult(result, acknowledged=True)

    def insert_one(self, document: Any, session: Any = None, comment: Any = None) -> InsertOneResult:  # type: ignore[override]  # the driver's
        document.setdefault("_id", ObjectId())
        result = self.server.run(
            "insert_one", document, [(document["_id"], document)], session=session, acknowledged=self._acks()
        )
        for error in result["writeErrors"]:
            raise DuplicateKeyError("E11000", 11000, error)
        return InsertOneResult(document["_id"], acknowledged=True)

    def update_one(self, filter: Any, update: Any, session: Any = None) -> UpdateResult:  # type: ignore[override]  # noqa: A002 - the driver's
        statements = [(filter["counter"], None)]
        self.server.run("update_one", update, statements, session=session, acknowledged=self._acks())
        return UpdateResult({"n": 1, "nModified": 1}, acknowledged=True)

    def update_many(self, filter: Any, update: Any, session: Any = None) -> UpdateResult:  # type: ignore[override]  # noqa: A002 - the driver's
        self.server.run("update_many", update, [(filter["counter"], None)], numbered=False, session=session)
        return UpdateResult({"n": 1, "nModified": 1}, acknowledged=True)

    def _acks(self) -> bool:
        return bool(self.write_concern.acknowledged)


class _FakeDriverDatabase(Database[dict[str, Any]]):
    """The driver's database, its commands sent to a fake server."""

    server: FakeServer

    def command(self, command: Any, value: Any = 1, session: Any = None, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # the driver's
        self.server.run("command", command, [("command", None)], numbered=False, session=session)
        return {"ok": 1}


_FakeCollection: type[Any] = _guarded(type("_FakeCollection", (_FakeDriverCollection,), {}))
_FakeDatabase: type[Any] = _guarded(type("_FakeDatabase", (_FakeDriverDatabase,), {}))


class Fake:
    """A guarded client whose collections and databases run on a fake server."""

    def __init__(self, server: FakeServer, **settings: Any) -> None:
        short = {"backoff_base_ms": 1, "backoff_cap_ms": 1, "cancel": False}
        self.server = server
        self.client = MongoClient[dict[str, Any]](connect=False, saferetry=Settings(**{**short, **settings}))

    def collection(self, **options: Any) -> Any:
        """Return a guarded collection."""
        made = _FakeCollection(self.client["d"], "c", **options)
        made.server = self.server
        return made

    def database(self) -> Any:
        """Return a guarded database."""
        made = _FakeDatabase(self.client, "d")
        made.server = self.server
        return made


class _Looking:
    """Find documents on a fake server, past the guarded methods and its faults."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def find(self, query: dict[str, Any], projection: dict[str, Any], *, batch_size: int) -> _Looking:
        assert projection == {"_id": 1}
        self._wanted = query["_id"]["$in"]
        assert batch_size == len(self._wanted)  # one command answers
        return self

    def to_list(self) -> list[dict[str, Any]]:
        return [{"_id": value} for value in self._wanted if value in self._server.documents]


@contextmanager
def fake(faults: Sequence[Fault] = (), *, numbers: bool = True, wire_version: int = 17, **settings: Any) -> Iterator[Fake]:
    """Give a guarded client on a fake server."""
    made = Fake(FakeServer(faults, numbers=numbers, wire_version=wire_version), **settings)
    try:
        with mock.patch.object(_retry, "unguarded", return_value=_Looking(made.server)):
            yield made
    finally:
        made.client.close()


def retried(work: Callable[[], Any], times: int, *errors: type[Exception]) -> Any:
    """Call `work` again as people's own retry loops do; return its result, or the last error of these."""
    outcome: Any = None
    for _ in range(times):
        try:
            return work()
        except errors as exc:
            outcome = exc
    return outcome


def is_failed(outcome: Any) -> bool:
    """Whether `retried` gave an error."""
    return isinstance(outcome, Exception)
