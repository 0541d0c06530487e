"""A handler's record ends on a server in memory as on a real one: the same results, errors, effects, markers and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from bson import ObjectId

import saferetry
from saferetry import Failure, RecordKey, current_record, testing
from saferetry.errors import SafeRetryError
from saferetry.lab.failpoints import fail_command
from saferetry.lab.proxy import Mode
from tests.mocks.scripts import Answered, Lost, Script, each_script, insert_some
from tests.support import Mongod, Proxy
from tests.support.driving import OPTIONS, RawClient, short_heartbeats

__all__ = ["short_heartbeats"]

MARKERS = "saferetry_records"


def plain(value: Any) -> Any:
    """Return a value without the ids that differ in every run, and the order of fields, which mongomock does not change."""
    if isinstance(value, ObjectId):
        return "an id"
    if isinstance(value, dict):
        return {name: plain(value[name]) for name in sorted(value)}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def played(script: Script, client: Any, name: str) -> dict[str, Any]:
    """Play a script; return all that can be seen of it."""
    records: list[Any] = []
    failures: list[Failure] = []

    def work(_: RecordKey) -> Any:
        records.append(current_record())
        return script.work(client[name])

    options = {"client": client} if script.options.get("guarantee") == "transaction" else {}
    handler = saferetry.handler(key=lambda key: key, name="work", recoverer=failures.append, **options, **script.options)(work)
    return {
        "ends": [delivered(handler, key) for key in script.deliveries],
        "executions": [record.execution for record in records],
        "writes": [
            (view.method, view.namespace, view.outcome, view.calls, view.sends) for record in records for view in record.writes
        ],
        "failures": [(failure.reason, type(failure.exception).__name__, failure.execution) for failure in failures],
        "codes": [getattr(failure.exception, "code", None) for failure in failures],
        "reports": [report_of(failure.exception) for failure in failures],
    }


def delivered(handler: Callable[[RecordKey], Any], key: RecordKey) -> Any:
    try:
        return plain(handler(key))
    except SafeRetryError as exc:  # misuse, which no recoverer gets
        return type(exc), str(exc)


def report_of(exc: Exception) -> Any:
    report = getattr(exc, "saferetry", None)
    return None if report is None else (report.decision, report.done, len(report.waits), report.write.outcome)


def left(database: Any) -> dict[str, Any]:
    """Return what there is afterwards."""
    found = {
        name: sorted(map(repr, map(plain, database[name].find({}, {"at": 0})))) for name in database.list_collection_names()
    }
    return {name: documents for name, documents in sorted(found.items()) if documents}


@pytest.fixture
def on_a_server(mongod: Mongod, admin: RawClient, database_name: str) -> Iterator[Any]:
    with ExitStack() as stack:

        def play(script: Script) -> Any:
            script.before(admin[database_name])
            proxy = stack.enter_context(Proxy(mongod.port))
            settings = replace(script.settings, marker_database=database_name)
            client = stack.enter_context(
                saferetry.MongoClient[Any](proxy.uri(**OPTIONS, appName=database_name), saferetry=settings)
            )
            client.admin.command("ping")
            with failing(admin, proxy, database_name, script.lost):
                seen = played(script, client, database_name)
            return seen, left(admin[database_name])

        yield play


@contextmanager
def failing(admin: RawClient, proxy: Proxy, app_name: str, lost: Lost | Answered | None) -> Iterator[None]:
    """Let a server or the way to it fail."""
    if isinstance(lost, Answered):
        data = {"errorCode": lost.code, "errorLabels": list(lost.labels)}
        times = lost.times * lost.sends
        with fail_command(admin, app_name=app_name, commands=[lost.command], times=times, **data):
            yield
        return
    if lost is not None:
        times = lost.times * lost.sends
        mode: Mode = "close" if lost.what == "reply" else "cut"
        proxy.arm(lost.collection.encode() or None, mode, times, command=lost.command, skip=lost.after)
    yield
    if lost is not None and lost.what == "reply":
        assert proxy.hits == lost.times * lost.sends


def in_memory(script: Script, name: str) -> Any:
    client = testing.mock_client(settings=replace(script.settings, marker_database=name))
    script.before(client[name])
    lost = script.lost
    faults = testing.faults(client)
    if isinstance(lost, Answered):
        faults.answer(lost.error(), lost.method, times=lost.times)
    elif lost is not None:
        lose = faults.lose_reply if lost.what == "reply" else faults.lose_request
        lose(lost.method, collection=lost.collection, times=lost.times, after=lost.after)
    seen = played(script, client, name)
    if not isinstance(lost, Answered):
        assert faults.pending == 0
    return seen, left(client[name])


@each_script
def test_a_record_ends_in_memory_as_on_a_server(script: Script, on_a_server: Any, database_name: str, mongod: Mongod) -> None:
    (memory, left_in_memory), (server, left_on_server) = in_memory(script, database_name), on_a_server(script)
    if script.work is insert_some and mongod.version.startswith("4."):
        del memory["writes"], server["writes"]  # such a server forgets errors: each statement is asked again
    assert memory == server
    assert left_in_memory == left_on_server
