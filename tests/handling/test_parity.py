"""Outside records, and under the kill switch, a guarded client does what a plain one does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pymongo import DeleteOne, InsertOne, UpdateMany, UpdateOne, WriteConcern
from pymongo.errors import NetworkTimeout, PyMongoError

from saferetry import record
from tests.support import CommandLog, Mode, Mongod, Proxy, app_name, fail_command, wait_until_idle
from tests.support.driving import Api, ProxyFactory, RawClient, application_retry, done, quick

LABELS = ("RetryableWriteError", "RetryableError", "SystemOverloadedError", "NoWritesPerformed")
RESULTS = ("inserted_id", "inserted_ids", "matched_count", "modified_count", "deleted_count", "bulk_api_result")
INCREMENT = {"$inc": {"n": 1}}
METHODS: dict[str, Callable[[Any], Any]] = {
    "insert_one": lambda c: c.insert_one({"_id": 9}),
    "insert_many": lambda c: c.insert_many([{"_id": 8}, {"_id": 9}]),
    "insert_duplicate": lambda c: c.insert_one({"_id": 1}),
    "insert_many_unordered": lambda c: c.insert_many([{"_id": 1}, {"_id": 9}], ordered=False),
    "update_one": lambda c: c.update_one({"_id": 1}, INCREMENT),
    "replace_one": lambda c: c.replace_one({"_id": 1}, {"n": 5}),
    "update_many": lambda c: c.update_many({}, INCREMENT),
    "delete_one": lambda c: c.delete_one({"_id": 1}),
    "delete_many": lambda c: c.delete_many({}),
    "find_one_and_update": lambda c: c.find_one_and_update({"_id": 1}, INCREMENT),
    "bulk_write": lambda c: c.bulk_write([InsertOne({"_id": 9}), UpdateOne({"_id": 1}, INCREMENT), DeleteOne({})]),
    "bulk_write_multi": lambda c: c.bulk_write([InsertOne({"_id": 9}), UpdateMany({}, INCREMENT)]),
    "unacknowledged": lambda c: c.with_options(write_concern=WriteConcern(w=0)).insert_one({"_id": 1}),
    "find_one": lambda c: c.find_one({"_id": 1}),
    "find": lambda c: c.find(batch_size=1).to_list(),
    "count_documents": lambda c: c.count_documents({}),
    "distinct": lambda c: c.distinct("n"),
    "create_index": lambda c: c.create_index("n"),
    "command": lambda c: c.database.command("update", c.name, updates=[{"q": {}, "u": INCREMENT, "multi": True}]),
}
FEW = ("insert_one", "update_many", "find_one")
COMMANDS = ("insert", "update", "delete", "findAndModify", "find", "aggregate", "distinct", "createIndexes")


@dataclass(frozen=True)
class Fault:
    """What happens to the first commands of each call: on the wire, or in the server (`failCommand`)."""

    mode: Mode = "close"
    times: int = 1
    data: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = tuple(method for method in METHODS if method != "unacknowledged")


def server_error(code: int, *labels: str, times: int = 1) -> Fault:
    return Fault(times=times, data={"errorCode": code, "errorLabels": list(labels)})


def write_concern_error(code: int, *labels: str) -> Fault:
    error = {"code": code, "errmsg": "from a failpoint", "errInfo": {"wtimeout": code == 64}}
    return Fault(data={"writeConcernError": error, "errorLabels": list(labels)})


FAULTS = {
    "none": Fault(times=0, methods=tuple(METHODS)),  # only here: nobody tells when an unacknowledged write is through
    "reply lost once": Fault("close"),
    "reply lost twice": Fault("close", 2),
    "reply cut": Fault("cut_reply", 2),
    "cut once": Fault("cut"),
    "cut twice": Fault("cut", 2),
    "silence": Fault("drop_reply", 2, options={"socketTimeoutMS": 150}, methods=FEW),
    "blocked past the socket timeout": Fault(
        times=2,
        data={"blockConnection": True, "blockTimeMS": 300},
        options={"socketTimeoutMS": 150},
        methods=("update_many", "find_one"),  # a write of one document may be stopped by our limit: below
    ),
    "shutdown": server_error(91),
    "shutdown, labelled": server_error(91, "RetryableWriteError"),
    "not primary twice": server_error(10107, "RetryableWriteError", times=2),
    "write conflict": server_error(112),
    "interrupted": server_error(11601),
    "time limit": server_error(50),
    "throttled": server_error(16500),
    "overload": replace(server_error(462, "RetryableError", "SystemOverloadedError"), methods=FEW),
    "not authorised": server_error(13),
    "replication timed out": write_concern_error(64),
    "replication interrupted, labelled": write_concern_error(91, "RetryableWriteError"),
}


@dataclass(frozen=True)
class Seen:
    """What a call did, as its caller, the wire and the server see it."""

    sends: list[str]
    ending: object
    stored: list[dict[str, Any]]


class Bench:
    """Make calls under a fault and see what they do."""

    def __init__(self, proxy: Proxy, admin: RawClient, database_name: str, log: CommandLog) -> None:
        self.app_name = app_name()
        self.uri = proxy.uri(appName=self.app_name)
        self._proxy = proxy
        self._admin = admin
        self._collection = admin[database_name].c
        self._log = log

    async def see(self, client: Any, fault: Fault, scope: Callable[[], AbstractContextManager[Any]]) -> dict[str, Seen]:
        """Return what each method does."""
        return {method: await self._see(client, fault, scope, METHODS[method]) for method in fault.methods}

    async def _see(
        self,
        client: Any,
        fault: Fault,
        scope: Callable[[], AbstractContextManager[Any]],
        call: Callable[[Any], Any],
    ) -> Seen:
        await application_retry()(_ping, client)  # connected, and whatever the call before sent is through
        self._collection.delete_many({})
        self._collection.insert_many([{"_id": 1, "n": 0}, {"_id": 2, "n": 0}])
        self._log.clear()
        with self._armed(fault), scope():
            ending = await _ending(lambda: call(client[self._collection.database.name].c))
        self._proxy.recover()
        if "socketTimeoutMS" in fault.options:
            wait_until_idle(self._admin, self.app_name)
        return Seen(self._log.names(), ending, list(self._collection.find(sort=[("_id", 1)])))

    def _armed(self, fault: Fault) -> AbstractContextManager[object]:
        if fault.data:
            return fail_command(self._admin, app_name=self.app_name, commands=COMMANDS, times=fault.times, **fault.data)
        self._proxy.arm(mode=fault.mode, times=fault.times)
        return nullcontext()


async def _ping(client: Any) -> None:
    await done(client.admin.command("ping"))


async def _ending(call: Callable[[], Any]) -> object:
    try:
        result = await done(call())
    except PyMongoError as exc:
        labels = sorted(label for label in LABELS if exc.has_error_label(label))
        return type(exc), getattr(exc, "code", None), labels, exc.timeout, getattr(exc, "__notes__", [])
    if isinstance(result, dict):
        return {name: value for name, value in result.items() if name in ("_id", "n", "ok", "nModified")}
    if hasattr(result, "acknowledged"):
        shown = [name for name in RESULTS if hasattr(type(result), name)] if result.acknowledged else []
        return type(result).__name__, {name: getattr(result, name) for name in shown}
    return result


@pytest.fixture
def bench(proxy: ProxyFactory, admin: RawClient, database_name: str, log: CommandLog) -> Bench:
    """A proxy, an appName and a collection for calls under faults."""
    return Bench(proxy(), admin, database_name, log)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_outside_records_no_fault_leads_to_other_sends_errors_or_effects_than_with_a_plain_client(
    api: Api, bench: Bench, log: CommandLog, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    plain = await bench.see(api.raw_client(bench.uri, log=log, **fault.options), fault, nullcontext)
    with caplog.at_level(logging.DEBUG, "saferetry"):
        guarded = await bench.see(api.client(bench.uri, log=log, **fault.options), fault, nullcontext)
    assert guarded == plain
    assert [entry for entry in caplog.records if entry.name == "saferetry"] == []


@pytest.mark.parametrize("name", ["none", "reply lost twice", "silence", "throttled"])
async def test_under_the_kill_switch_no_fault_in_a_record_is_handled_otherwise_than_by_a_plain_client(
    api: Api, bench: Bench, log: CommandLog, name: str
) -> None:
    fault = FAULTS[name]
    plain = await bench.see(api.raw_client(bench.uri, log=log, **fault.options), fault, nullcontext)
    disabled = api.client(bench.uri, log=log, settings=quick(disabled=True), **fault.options)
    assert await bench.see(disabled, fault, lambda: record(("t", 0, 1))) == plain


async def _commands(client: Any, database_name: str, log: CommandLog) -> list[dict[str, Any]]:
    """Return the commands that all methods send, without what differs between any two clients."""
    for call in METHODS.values():
        await _ending(lambda call=call: call(client[database_name].c))  # type: ignore[misc]  # bound at once
    commands = log.commands()
    log.clear()
    for command in commands:
        command.update({name: "differs" for name in ("lsid", "$clusterTime", "txnNumber", "getMore") if name in command})
    return commands


async def test_outside_records_and_without_a_socket_timeout_the_commands_are_those_of_a_plain_client(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    uri = mongod.uri + "&socketTimeoutMS=0"
    admin[database_name].c.insert_many([{"_id": 1}, {"_id": 2}])
    plain = await _commands(api.raw_client(uri, log=log, socketTimeoutMS=None), database_name, log)
    admin[database_name].c.delete_many({})
    admin[database_name].c.insert_many([{"_id": 1}, {"_id": 2}])
    assert await _commands(api.client(uri, log=log, socketTimeoutMS=None), database_name, log) == plain


async def test_under_the_kill_switch_the_commands_in_a_record_are_those_of_a_plain_client(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_many([{"_id": 1}, {"_id": 2}])
    plain = await _commands(api.raw_client(mongod.uri, log=log), database_name, log)
    admin[database_name].c.delete_many({})
    admin[database_name].c.insert_many([{"_id": 1}, {"_id": 2}])
    with record(("t", 0, 1)):
        assert await _commands(api.client(mongod.uri, log=log, settings=quick(disabled=True)), database_name, log) == plain


SLOW = {"$where": "sleep(5) || true"}
LONG_WRITES: dict[str, Callable[[Any], Any]] = {
    "update_many": lambda c: c.update_many(SLOW, INCREMENT),
    "delete_many": lambda c: c.delete_many(SLOW),
    "bulk_write": lambda c: c.bulk_write([UpdateMany(SLOW, INCREMENT)]),
    "out": lambda c: c.aggregate(
        [
            {"$match": {"$expr": {"$function": {"body": "function() { sleep(5); return true }", "args": [], "lang": "js"}}}},
            {"$out": "out"},
        ]
    ),
}


async def test_outside_records_a_blocked_insert_one_is_sent_as_often_and_ends_as_with_a_plain_client(
    api: Api, admin: RawClient, bench: Bench, log: CommandLog
) -> None:
    fault = replace(FAULTS["blocked past the socket timeout"], methods=("insert_one",))
    plain = await bench.see(api.raw_client(bench.uri, log=log, **fault.options), fault, nullcontext)
    guarded = await bench.see(api.client(bench.uri, log=log, **fault.options), fault, nullcontext)
    assert guarded["insert_one"].sends == plain["insert_one"].sends
    assert guarded["insert_one"].ending == plain["insert_one"].ending


@pytest.mark.parametrize("method", LONG_WRITES)
async def test_outside_records_a_write_of_many_documents_longer_than_the_socket_timeout_is_finished_by_the_server(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog, method: str
) -> None:
    name = app_name()
    collection = api.client(mongod.uri, log=log, appName=name, socketTimeoutMS=200)[database_name].c
    admin[database_name].c.insert_many([{"n": 0} for _ in range(80)])
    with pytest.raises(NetworkTimeout) as caught:
        await done(LONG_WRITES[method](collection))
    assert log.sends("update", "delete", "aggregate") == 1
    assert not hasattr(caught.value, "__notes__")
    wait_until_idle(admin, name)
    untouched = admin[database_name].c.count_documents({"n": 0})
    assert untouched == (80 if method == "out" else 0)
    assert admin[database_name].out.count_documents({}) == (80 if method == "out" else 0)
