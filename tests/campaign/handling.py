"""One delivery, handled: the handler of a plan, and what is told of it afterwards, as JSON has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pymongo
from bson.objectid import ObjectId
from gridfs.errors import FileExists, GridFSError
from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError, WriteError
from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

import saferetry
from saferetry import Failure, RecordKey
from saferetry.errors import SafeRetryError
from tests.campaign import steps
from tests.campaign.schedule import Lane, Plan
from tests.campaign.steps import AppError, Progress
from tests.matrix.runner import Disguise

OPTIONS: dict[str, Any] = {
    "heartbeatFrequencyMS": 500,
    "serverMonitoringMode": "poll",
    "serverSelectionTimeoutMS": 3_000,
    "retryWrites": True,
}
_CODES_OF_DATA = frozenset({2, 14, 28, 66, 121, 11000})


@dataclass
class Told:
    """What a handler's delivery came to.

    Attributes:
        is_done: it returned.
        answer: what it returned.
        results: of its steps, of the last execution.
        at: the step at which it ended.
        executions: how often its handler was begun.
        error: type, code, whether the data are at fault, whether it is one of saferetry's; None if it is done.
        recovered: the reason that its recoverer was given, "" if that was not called.
        writes: [method, outcome, calls, sends] of the last execution's write calls.
        first_write: of those, the first of the last step.
        decision: what was decided about the call that failed, "" if nothing was.
        is_killed: its process was killed.
    """

    is_done: bool = False
    answer: Any = None
    results: list[Any] = field(default_factory=list)
    at: int = 0
    executions: int = 0
    error: dict[str, Any] | None = None
    recovered: str = ""
    writes: list[list[Any]] = field(default_factory=list)
    first_write: int = 0
    decision: str = ""
    is_killed: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def connect(lane: Lane, uri: str, app_name: str, database: str, **options: Any) -> Any:
    """Return a guarded client of a lane, whose markers are in a database."""
    make: Any = saferetry.AsyncMongoClient if lane.kind == "async" else saferetry.MongoClient
    settings = saferetry.Settings(
        backoff_base_ms=2, backoff_cap_ms=20, max_attempts=lane.max_attempts, marker_database=database
    )
    given = {**OPTIONS, "socketTimeoutMS": round(lane.socket_timeout * 1000), "appName": app_name, **options}
    if lane.timeout:
        given["timeoutMS"] = round(lane.timeout * 1000)
        del given["socketTimeoutMS"]
    return make(uri, saferetry=settings, **given)


class Handler:
    """The handler of one delivery of a plan.

    Attributes:
        progress: where it is.
    """

    def __init__(self, plan: Plan, client: Any, database_name: str) -> None:
        self.plan = plan
        self.progress = Progress()
        self.record: Any = None
        self.recovered = ""
        self.exception: Exception | None = None
        self._client = client
        self._database_name = database_name

    def where(self) -> str:
        """Return the method it is at."""
        return self.plan.steps[self.progress.at].do

    async def work(self, argument: Plan) -> Any:
        """Be the handler's body."""
        self.record = saferetry.current_record()
        database = self._client[self._database_name]
        results = await steps.run(database, argument.owner, argument.steps, self.progress)
        return comparable(results, self._database_name)

    def _recover(self, failure: Failure) -> Any:
        self.recovered, self.exception = failure.reason, failure.exception
        return "recovered"

    def decorated(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a handler around the body, plain or async."""
        plan = self.plan
        if plan.guarantee == "outside":
            return work
        options: dict[str, Any] = {}
        if plan.guarantee == "transaction":
            options = {"store_result": plan.stores}
        return saferetry.handler(
            key=RecordKey(plan.stream, 0, plan.position, group="campaign", digest=plan.owner.encode()),
            guarantee=plan.guarantee,
            client=self._client,
            name="campaign",
            budget=plan.budget,
            retry_on=(AppError, PyMongoError) if plan.retries else AppError,
            recoverer=self._recover if plan.recovers else None,
            **options,
        )(work)

    def done(self, answer: Any) -> Told:
        """Return what is told of a handler that returned."""
        if self.exception is not None:
            return self.failed(self.exception)
        return replace(self._told(), is_done=True, answer=answer)

    def failed(self, exc: BaseException) -> Told:
        """Return what is told of a handler that an error left."""
        report = getattr(exc, "saferetry", None)
        return replace(self._told(), error=described(exc), decision=report.decision if report is not None else "")

    def _told(self) -> Told:
        views = self.record.writes if self.record is not None else ()
        return Told(
            results=comparable(self.progress.results, self._database_name),
            at=self.progress.at,
            executions=self.progress.executions,
            recovered=self.recovered,
            writes=[["", "UNKNOWN", 0, 0]]
            if self.record is None
            else [[view.method, view.outcome.name, view.calls, view.sends] for view in views],
            first_write=self.progress.first_write,
        )


def described(exc: BaseException) -> dict[str, Any]:
    """Return what an error says, without what differs from run to run."""
    code = getattr(exc, "code", None)
    described: dict[str, Any] = {"type": type(exc).__name__, "code": code, "ours": isinstance(exc, SafeRetryError)}
    described["data"] = isinstance(exc, (WriteError, OperationFailure)) and code in _CODES_OF_DATA
    described["network"] = isinstance(exc, PyMongoError) and not isinstance(exc, (OperationFailure, GridFSError))
    if isinstance(exc, FileExists):
        described["data"] = True
    if isinstance(exc, BulkWriteError):
        errors = exc.details.get("writeErrors", [])
        described["errors"] = [[error["index"], error["code"]] for error in errors]
        described["counts"] = {name: exc.details.get(name, 0) for name in _COUNTS}
        described["data"] = bool(errors) and all(error["code"] in _CODES_OF_DATA for error in errors)
    described["app"] = isinstance(exc, AppError)
    return described


_COUNTS = ("nInserted", "nUpserted", "nMatched", "nModified", "nRemoved")
_RESULTS: dict[type[Any], tuple[str, ...]] = {
    BulkWriteResult: ("inserted_count", "matched_count", "modified_count", "deleted_count", "upserted_count", "upserted_ids"),
    DeleteResult: ("deleted_count",),
    InsertManyResult: ("inserted_ids",),
    InsertOneResult: ("inserted_id",),
    UpdateResult: ("matched_count", "modified_count", "upserted_id"),
}


def comparable(value: Any, database_name: str) -> Any:
    """Return results, or documents, in a form that can be compared: made ids by their number in order of appearance."""
    plain: Any = json.loads(json.dumps(Disguise(database_name).of(_plain(value)), default=str))
    return plain


def _plain(value: Any) -> Any:
    match value:
        case Exception():
            return {"raised": described(value)}
        case dict():
            return {str(name): _plain(item) for name, item in value.items() if name not in ("last", "uploadDate")}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bytes():
            return f"{len(value)} bytes"
        case str() | int() | float() | None | ObjectId():
            return value
    if (names := _RESULTS.get(type(value))) is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    return str(value)


RawDatabase = pymongo.database.Database[dict[str, Any]]
