"""The seam: its self-check, a contract for each private name of the driver, and what it does to a command."""

from __future__ import annotations

import contextvars
import importlib
import inspect
import logging
import pkgutil
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import pymongo
import pytest
from bson.int64 import Int64
from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne, _csot
from pymongo.asynchronous.bulk import _AsyncBulk
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase as DriverAsyncDatabase
from pymongo.asynchronous.mongo_client import AsyncMongoClient as DriverAsyncMongoClient
from pymongo.asynchronous.pool import AsyncConnection
from pymongo.read_preferences import ReadPreference
from pymongo.synchronous.bulk import _Bulk
from pymongo.synchronous.client_session import ClientSession
from pymongo.synchronous.collection import Collection as DriverCollection
from pymongo.synchronous.mongo_client import MongoClient as DriverMongoClient
from pymongo.synchronous.pool import Connection

from saferetry import AsyncMongoClient, MongoClient, Settings, _driver, _seam, wrap
from saferetry._addresses import LONGEST_IDLE, Address, AddressPool
from saferetry._driver import check_driver
from saferetry._limits import Limits
from saferetry._seam import (
    SCOPE,
    Anchor,
    DriverCall,
    Guard,
    PinnedServerSession,
    bound_session,
    cancel,
    cancel_async,
    csot_remaining,
    guard_of,
    in_driver_call,
    inserted_document,
    longest_idle,
    request_values,
)
from saferetry.errors import ConfigurationError, DriverMismatchError, UnprotectedWriteError
from tests.support.older import needs_bound_sessions

# --- the self-check --------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let a test change the driver, and the self-check look at it anew."""
    check_driver.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    check_driver.cache_clear()


def owner_of(cls: type[Any], name: str) -> type[Any]:
    return next(base for base in cls.__mro__ if name in vars(base))


def without(cls: type[Any], name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.delattr(owner_of(cls, name), name)


def instead(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def renamed(self: Any, command: Any, retryable: Any, read_preference: Any, conn: Any) -> None: ...


def turned_round(self: Any, command: Any, read_preference: Any, is_retryable: Any, conn: Any) -> None: ...


def without_names(self: Any, client: Any, server_session: Any, options: Any, implicit: Any) -> None: ...


def bulk_without_ops(self: Any, collection: Any, ordered: Any, bypass_document_validation: Any) -> None: ...


def turned_bulk(self: Any, collection: Any, bypass_document_validation: Any, ordered: Any) -> None:
    self.ops = []


APPLY = "ClientSession._apply_to(self, command, is_retryable, read_preference, conn)"
DIFFERENT: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "older": (instead(pymongo, "version_tuple", (4, 8, 0)), "version 4.9 or newer"),
    "no _ensure_session": (without(DriverMongoClient, "_ensure_session"), "MongoClient._ensure_session(self, session)"),
    "no _ensure_session (async)": (
        without(DriverAsyncMongoClient, "_ensure_session"),
        "AsyncMongoClient._ensure_session(self, session)",
    ),
    "no _apply_to": (without(ClientSession, "_apply_to"), APPLY),
    "an argument of _apply_to renamed": (instead(ClientSession, "_apply_to", renamed), APPLY),
    "arguments of _apply_to turned round": (instead(ClientSession, "_apply_to", turned_round), APPLY),
    "_apply_to is no function": (instead(ClientSession, "_apply_to", 7), APPLY),
    "_apply_to of asyncio renamed": (instead(AsyncClientSession, "_apply_to", renamed), f"Async{APPLY}"),
    "no _implicit": (instead(ClientSession, "__init__", without_names), "ClientSession._implicit"),
    "no _server_session": (instead(AsyncClientSession, "__init__", without_names), "AsyncClientSession._server_session"),
    "no end_session": (without(ClientSession, "end_session"), "ClientSession.end_session(self)"),
    "no _database": (instead(DriverCollection, "__init__", without_names), "Collection._database"),
    "no _client": (instead(DriverAsyncDatabase, "__init__", without_names), "AsyncDatabase._client"),
    "no ops": (instead(_Bulk, "__init__", bulk_without_ops), "_Bulk.ops"),
    "another bulk": (
        instead(_AsyncBulk, "__init__", turned_bulk),
        "_AsyncBulk.__init__(self, collection, ordered, bypass_document_validation)",
    ),
    "no _add_to_bulk": (without(InsertOne, "_add_to_bulk"), "InsertOne._add_to_bulk"),
    "no _csot.get_timeout": (lambda patch: patch.delattr(_csot, "get_timeout"), "_csot.get_timeout"),
    "no InsertOne._doc": (without(InsertOne, "_doc"), "InsertOne._doc"),
}


def test_this_driver_passes(driver: pytest.MonkeyPatch) -> None:
    check_driver()


def test_the_check_is_made_once(driver: pytest.MonkeyPatch) -> None:
    check_driver()
    driver.setattr(_driver, "_lacks", None)
    check_driver()
    assert check_driver.cache_info().hits == 1


def test_a_driver_that_did_not_pass_is_looked_at_again(driver: pytest.MonkeyPatch) -> None:
    with driver.context() as patch:
        patch.setattr(pymongo, "version_tuple", (4, 8, 0))
        with pytest.raises(DriverMismatchError):
            check_driver()
    check_driver()


@pytest.mark.parametrize(("change", "missing"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_another_driver_is_refused_by_version_and_missing_name(
    change: Callable[[pytest.MonkeyPatch], None], missing: str, driver: pytest.MonkeyPatch
) -> None:
    change(driver)
    with pytest.raises(DriverMismatchError) as caught:
        check_driver()
    message = str(caught.value)
    assert message.startswith(f"PyMongo {pymongo.version} lacks what saferetry builds on: ")
    assert missing in message
    assert "nothing was sent" in message
    assert "SAFERETRY_DISABLED=1" in message


def test_all_that_is_missing_is_named_at_once(driver: pytest.MonkeyPatch) -> None:
    driver.setattr(ClientSession, "_apply_to", renamed)
    driver.delattr(_csot, "get_timeout")
    with pytest.raises(DriverMismatchError, match=r"ClientSession\._apply_to.*, .*_csot\.get_timeout"):
        check_driver()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        yield server


@pytest.mark.parametrize("make", [MongoClient, AsyncMongoClient])
def test_with_another_driver_no_client_is_made_and_nothing_is_sent(
    make: Any, driver: pytest.MonkeyPatch, listening: socket.socket
) -> None:
    driver.setattr(ClientSession, "_apply_to", renamed)
    with pytest.raises(DriverMismatchError):
        make("127.0.0.1", listening.getsockname()[1])
    with pytest.raises(TimeoutError):
        listening.accept()


def test_with_another_driver_no_client_is_wrapped(driver: pytest.MonkeyPatch) -> None:
    with DriverMongoClient[dict[str, Any]](connect=False) as client:
        driver.setattr(ClientSession, "_apply_to", renamed)
        with pytest.raises(DriverMismatchError):
            wrap(client)
        assert type(client) is DriverMongoClient


def test_disabled_goes_on_with_another_driver(driver: pytest.MonkeyPatch) -> None:
    driver.delattr(_csot, "get_timeout")
    MongoClient[dict[str, Any]](connect=False, saferetry=Settings(disabled=True)).close()


# --- the driver's private names, one contract each -------------------------------------------------------------------------


@dataclass
class FakeConnection:
    """What a session asks a connection."""

    supports_sessions: bool = True
    logical_session_timeout_minutes: int = 30
    is_repl: bool = True
    is_mongos: bool = False
    max_wire_version: int = 17


@dataclass
class FakeScope:
    """What the seam asks a record."""

    ended: bool = False
    tag: Mapping[str, Any] | None = None
    transaction: Any = None
    seconds: float = 60.0
    unannounced: list[str] = field(default_factory=list)

    def label(self) -> str:
        return "a record"

    def remaining(self) -> float:
        return self.seconds

    def note_unannounced(self, command_name: str, *, strict: bool) -> None:
        self.unannounced.append(command_name)

    def refuse_unannounced_read(self, command_name: str) -> NoReturn:
        raise LookupError(command_name)


@pytest.fixture(params=[DriverMongoClient, DriverAsyncMongoClient], ids=["sync", "async"])
async def raw(request: pytest.FixtureRequest) -> Any:
    return request.param(connect=False)


@pytest.fixture(params=[MongoClient, AsyncMongoClient], ids=["sync", "async"])
async def make(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def client(make: Any) -> Any:
    return make(connect=False, socketTimeoutMS=9_000)


@pytest.fixture
def address() -> Address:
    return AddressPool().acquire()


@pytest.fixture
def scope() -> Iterator[FakeScope]:
    token = SCOPE.set(Anchor(found := FakeScope()))
    yield found
    SCOPE.reset(token)


def apply(session: Any, command: dict[str, Any], *, is_retryable: bool = True, conn: Any = None) -> dict[str, Any]:
    """Let a session prepare a command as the driver does before each send."""
    session._apply_to(command, is_retryable, ReadPreference.PRIMARY, conn or FakeConnection())
    return command


async def test_ensure_session_lends_an_implicit_session_without_asking_anybody(raw: Any) -> None:
    session = raw._ensure_session()
    assert type(session) in (ClientSession, AsyncClientSession)
    assert session._implicit


async def test_ensure_session_gives_a_users_session_back(raw: Any) -> None:
    session = raw.start_session()
    assert raw._ensure_session(session) is session
    assert not session._implicit


async def test_a_lent_session_knows_its_client_and_server_session(raw: Any) -> None:
    session = raw._ensure_session()
    assert session._client is raw
    assert session._server_session is not None


async def test_apply_to_puts_session_and_number_on_a_retryable_command_and_the_session_on_others(raw: Any) -> None:
    session = raw._ensure_session()
    session._start_retryable_write()
    command = apply(session, {"insert": "c"})
    assert (set(command), command["txnNumber"]) == ({"insert", "lsid", "txnNumber"}, 1)
    assert set(apply(session, {"find": "c"}, is_retryable=False)) == {"find", "lsid"}


async def test_start_retryable_write_takes_the_next_number(raw: Any) -> None:
    session = raw._ensure_session()
    numbers = []
    for _ in range(3):
        session._start_retryable_write()
        numbers.append(apply(session, {"insert": "c"})["txnNumber"])
    assert numbers == [1, 2, 3]


async def test_return_server_session_puts_an_ordinary_session_back_for_the_next(raw: Any) -> None:
    session = raw._ensure_session()
    used = apply(session, {"insert": "c"})["lsid"]
    raw._return_server_session(session._server_session)
    assert apply(raw._ensure_session(), {"insert": "c"})["lsid"] == used


async def test_return_server_session_never_puts_a_pinned_one_back(raw: Any, address: Address) -> None:
    raw._return_server_session(PinnedServerSession(address))
    assert apply(raw._ensure_session(), {"insert": "c"})["lsid"] != address.session_id


def names_asked_of_a_server_session() -> set[str]:
    """Return every attribute of a server session that the driver's source asks for."""
    found = set()
    for info in pkgutil.walk_packages(pymongo.__path__, "pymongo."):
        if "session" not in info.name and "mongo_client" not in info.name and "topology" not in info.name:
            continue
        source = inspect.getsource(importlib.import_module(info.name))
        found |= set(re.findall(r"\bserver_session\.(\w+)", source)) | set(re.findall(r"\._server_session\.(\w+)", source))
    return found


def test_a_pinned_session_has_all_that_the_driver_asks_of_one(address: Address) -> None:
    asked = names_asked_of_a_server_session()
    assert {"session_id", "transaction_id", "last_use", "dirty", "generation"} <= asked
    assert {name for name in asked if not hasattr(PinnedServerSession(address), name)} <= {"started_retryable_write"}


def test_a_pinned_session_keeps_its_number_whatever_the_driver_does(address: Address) -> None:
    pinned = PinnedServerSession(address)
    pinned.inc_transaction_id()
    pinned.mark_dirty()
    assert pinned.transaction_id == address.number
    assert isinstance(pinned.transaction_id, Int64)
    assert pinned.session_id is address.session_id
    assert pinned.dirty
    assert pinned.generation == -1
    assert pinned.timed_out(30)
    assert pinned.timed_out(None)


def test_the_last_use_of_a_pinned_session_can_be_set(address: Address) -> None:
    pinned = PinnedServerSession(address)
    pinned.last_use = 7.0
    assert pinned.last_use == 7.0


@pytest.mark.parametrize("bulk_class", [_Bulk, _AsyncBulk])
async def test_a_bulk_collects_statements_in_ops(bulk_class: Any, raw: Any) -> None:
    bulk = bulk_class(raw["d"]["c"], True, None)
    InsertOne({"_id": 1})._add_to_bulk(bulk)
    UpdateMany({"a": 1}, {"$set": {"b": 1}})._add_to_bulk(bulk)
    DeleteMany({})._add_to_bulk(bulk)
    assert [kind for kind, _ in bulk.ops] == [0, 1, 2]
    assert bulk.ops[0][1] == {"_id": 1}
    assert bulk.ops[1][1]["multi"] is True
    assert bulk.ops[2][1]["limit"] == 0


@pytest.mark.parametrize("connection", [Connection, AsyncConnection])
def test_a_connection_tells_what_it_leads_to(connection: Any) -> None:
    asked = {field.name for field in fields(FakeConnection)} - {"logical_session_timeout_minutes"}
    stored = {
        name for function in vars(connection).values() if inspect.isfunction(function) for name in function.__code__.co_names
    }
    assert asked <= stored | set(dir(connection))


def test_csot_tells_whether_a_timeout_is_in_force() -> None:
    assert csot_remaining() == float("inf")
    with pymongo.timeout(5):
        assert 4 < csot_remaining() <= 5
    with pymongo.timeout(0):  # "no limit" is a limit of the user's, too
        assert csot_remaining() == float("inf")
    assert csot_remaining() == float("inf")


@needs_bound_sessions
async def test_a_bound_session_is_found(raw: Any) -> None:
    session = raw.start_session()
    assert bound_session(raw) is None
    binding = session.bind(end_session=False)
    if isinstance(raw, DriverMongoClient):
        with binding:
            assert bound_session(raw) is session
    else:
        async with binding:
            assert bound_session(raw) is session
    assert bound_session(raw) is None


async def test_a_client_has_a_place_for_its_encrypter(raw: Any) -> None:
    assert vars(raw)["_encrypter"] is None
    raw._encrypter = object()
    assert guard_of(wrap(raw)).is_encrypted
    raw._encrypter = None


def test_a_request_holds_its_arguments() -> None:
    document = {"a": 1}
    assert inserted_document(InsertOne(document)) is document
    assert request_values(InsertOne(document))["_doc"] is document


@pytest.mark.parametrize("kind", [UpdateOne, UpdateMany, ReplaceOne, DeleteOne, DeleteMany])
def test_the_values_of_a_request_are_all_that_it_was_given(kind: Any) -> None:
    parameters = [name for name in inspect.signature(kind).parameters if name != "namespace"]
    values = request_values(kind({}, {"$set": {"a": 1}}) if "Update" in kind.__name__ else _simple(kind))
    # `update` and `replacement` are both `_doc`; the others have their own names.
    named = {"_doc" if name in ("update", "replacement") else f"_{name}" for name in parameters}
    assert named <= set(values)


def _simple(kind: Any) -> Any:
    return kind({}, {"a": 1}) if kind is ReplaceOne else kind({})


# --- sessions lent in a driver call ----------------------------------------------------------------------------------------


async def test_a_session_lent_in_a_driver_call_has_its_address(client: Any, address: Address) -> None:
    with DriverCall(client, address=address) as call:
        session = client._ensure_session()
        session._start_retryable_write()
        command = apply(session, {"insert": "c"})
    assert (command["lsid"], command["txnNumber"]) == (address.session_id, address.number)
    assert call.lent
    assert call.sends == 1


async def test_a_resend_has_the_same_address(client: Any, address: Address) -> None:
    with DriverCall(client, address=address) as call:
        session = client._ensure_session()
        session._start_retryable_write()
        sends = [dict(apply(session, {"insert": "c"})) for _ in range(3)]
    assert sends[0] == sends[1] == sends[2]
    assert call.sends == 3


async def test_only_the_first_session_of_a_driver_call_has_the_address(client: Any, address: Address) -> None:
    with DriverCall(client, address=address) as call:
        client._ensure_session()
        other = client._ensure_session()
        assert apply(other, {"insert": "c"})["lsid"] != address.session_id
    assert call.sends == 0


async def test_after_the_driver_call_no_session_has_the_address(client: Any, address: Address) -> None:
    with DriverCall(client, address=address):
        later = contextvars.copy_context()  # as a background task of the driver's holds it
    session = later.run(client._ensure_session)
    assert apply(session, {"insert": "c"})["lsid"] != address.session_id


async def test_a_session_of_another_client_has_not_the_address(make: Any, client: Any, address: Address) -> None:
    other = make(connect=False)
    with DriverCall(client, address=address):
        assert apply(other._ensure_session(), {"insert": "c"})["lsid"] != address.session_id


async def test_a_session_of_the_users_is_left_alone(client: Any, address: Address) -> None:
    own = client.start_session()
    with DriverCall(client, address=address) as call:
        assert client._ensure_session(own) is own
        assert type(own) in (ClientSession, AsyncClientSession)
        command = apply(own, {"insert": "c"})
    assert "maxTimeMS" not in command
    assert not call.lent


async def test_without_an_address_a_pooled_session_is_used(client: Any) -> None:
    with DriverCall(client):
        session = client._ensure_session()
    assert not isinstance(session._server_session, PinnedServerSession)


def test_a_driver_call_is_known_while_it_lasts() -> None:
    assert not in_driver_call()
    with DriverCall(None):
        assert in_driver_call()
        later = contextvars.copy_context()
    assert not in_driver_call()
    assert not later.run(in_driver_call)


def test_a_driver_call_ends_with_an_error() -> None:
    with pytest.raises(KeyError), DriverCall(None) as call:
        raise KeyError
    assert call.done
    assert not in_driver_call()


# --- what is done to a command ---------------------------------------------------------------------------------------------


def lend(client: Any, **announced: Any) -> tuple[DriverCall, Any]:
    call = DriverCall(client)
    for name, value in announced.items():
        assert hasattr(call, name)
        setattr(call, name, value)
    with call:
        return call, client._ensure_session()


async def test_sends_of_writes_are_counted_and_those_of_reads_are_not(client: Any, scope: FakeScope) -> None:
    call, session = lend(client)
    for name in ("update", "find", "getMore", "listCollections", "aggregate"):
        apply(session, {name: "c"}, is_retryable=False)
    assert call.sends == 2  # an announced aggregate ends in $out or $merge


async def test_in_a_read_nothing_is_counted(client: Any, scope: FakeScope) -> None:
    call, session = lend(client, is_write=False)
    apply(session, {"aggregate": "c", "pipeline": []}, is_retryable=False)
    assert call.sends == 0
    assert scope.unannounced == []


@pytest.mark.parametrize(
    ("sends", "numbered"),
    [([True], True), ([True, True], True), ([False], False), ([True, False], False), ([False, True], False)],
)
async def test_a_call_is_numbered_if_all_its_sends_are(sends: list[bool], numbered: bool, client: Any) -> None:
    call, session = lend(client)
    for is_retryable in sends:
        apply(session, {"insert": "c"}, is_retryable=is_retryable)
    assert call.numbered is numbered


@pytest.mark.parametrize("conn", [FakeConnection(), FakeConnection(is_repl=False, is_mongos=True)], ids=["mongod", "mongos"])
async def test_a_number_that_the_driver_forgets_is_put_on_the_wire(conn: FakeConnection, client: Any, address: Address) -> None:
    # It does so while an error of another thread has the server marked as unknown.
    call, session = lend(client, address=address, is_numberable=True, wants_number=True, statement_id=2)
    command = apply(session, dict(INSERT), is_retryable=False, conn=conn)
    assert (command["lsid"], command["txnNumber"], command["stmtId"]) == (address.session_id, address.number, 2)
    assert call.numbered


@pytest.mark.parametrize(
    ("announced", "conn", "options"),
    [
        ({"is_numberable": False}, FakeConnection(), {}),
        ({"address": None}, FakeConnection(), {}),
        ({}, FakeConnection(is_repl=False), {}),
        ({}, FakeConnection(supports_sessions=False), {}),
        ({}, FakeConnection(), {"retryWrites": False}),
    ],
    ids=["many documents", "no address", "standalone", "no sessions", "retryWrites=false"],
)
async def test_no_number_is_put_where_none_belongs(
    announced: dict[str, Any], conn: FakeConnection, options: dict[str, Any], make: Any, address: Address
) -> None:
    call, session = lend(make(connect=False, **options), **{"address": address, "is_numberable": True, **announced})
    assert "txnNumber" not in apply(session, dict(INSERT), is_retryable=False, conn=conn)
    assert not call.numbered


async def test_what_was_sent_with_a_number_is_never_sent_again_without_one(client: Any, address: Address) -> None:
    call, session = lend(client, address=address, is_numberable=True, was_numbered=True)
    with pytest.raises(UnprotectedWriteError, match="insert was not sent again: this server takes no transaction number"):
        apply(session, dict(INSERT), is_retryable=False, conn=FakeConnection(is_repl=False))
    assert call.sends == 0


async def test_the_kind_of_server_is_noted(client: Any) -> None:
    call, session = lend(client)
    apply(session, {"insert": "c"}, conn=FakeConnection(is_mongos=True, max_wire_version=9))
    assert (call.mongos, call.wire_version) == (True, 9)


@pytest.mark.parametrize(("statement", "is_retryable", "sent"), [(3, True, 3), (0, True, None), (3, False, None)])
async def test_a_statement_id_goes_with_a_number_only(
    statement: int, is_retryable: bool, sent: int | None, client: Any
) -> None:
    _, session = lend(client, statement_id=statement)
    assert apply(session, {"insert": "c"}, is_retryable=is_retryable).get("stmtId") == sent


async def test_a_write_that_nobody_announced_is_noted_in_the_record(client: Any, scope: FakeScope) -> None:
    session = client._ensure_session()
    apply(session, {"collMod": "c"}, is_retryable=False)
    apply(session, {"find": "c"}, is_retryable=False)
    assert scope.unannounced == ["collMod"]


async def test_in_a_record_that_has_ended_nothing_is_noted(client: Any, scope: FakeScope) -> None:
    scope.ended = True
    apply(client._ensure_session(), {"collMod": "c"}, is_retryable=False)
    assert scope.unannounced == []


TAG = {"saferetry": {"record": "a" * 32, "execution": 1}}


@pytest.mark.parametrize(
    ("name", "wire_version", "is_tagged"),
    [
        ("insert", 9, True),
        ("update", 17, True),
        ("delete", 17, True),
        ("findAndModify", 17, True),
        ("aggregate", 17, True),
        ("insert", 8, False),  # a server before 4.4 refuses it
        ("create", 17, False),
        ("find", 17, False),
    ],
)
async def test_a_write_in_a_record_is_tagged(
    name: str, wire_version: int, is_tagged: bool, client: Any, scope: FakeScope
) -> None:
    scope.tag = TAG
    _, session = lend(client)
    command = apply(session, {name: "c"}, is_retryable=False, conn=FakeConnection(max_wire_version=wire_version))
    assert command.get("comment") == (TAG if is_tagged else None)


async def test_a_comment_of_the_users_is_kept(client: Any, scope: FakeScope) -> None:
    scope.tag = TAG
    _, session = lend(client)
    assert apply(session, {"insert": "c", "comment": "mine"})["comment"] == "mine"


async def test_outside_a_record_nothing_is_tagged(client: Any) -> None:
    assert "comment" not in apply(client._ensure_session(), {"insert": "c"})


INSERT: dict[str, Any] = {"insert": "c", "documents": [{}]}


async def test_a_command_gets_its_limit_inside_and_outside_a_record(client: Any, scope: FakeScope) -> None:
    assert apply(client._ensure_session(), dict(INSERT))["maxTimeMS"] == 6_000
    scope.ended = True
    assert apply(client._ensure_session(), dict(INSERT))["maxTimeMS"] == 8_550


async def test_our_own_limit_is_not_taken_for_the_users_when_the_driver_sends_again(client: Any, scope: FakeScope) -> None:
    session = client._ensure_session()
    command = dict(INSERT)
    limits = []
    for scope.seconds in (60.0, 3.0, 60.0):
        limits.append(apply(session, command)["maxTimeMS"])
    assert limits == [6_000, 3_000, 6_000]


async def test_the_users_limit_is_not_forgotten_when_the_driver_sends_again(client: Any, scope: FakeScope) -> None:
    session = client._ensure_session()
    command = {**INSERT, "maxTimeMS": 4_000}
    limits = []
    for scope.seconds in (60.0, 3.0, 60.0):
        limits.append(apply(session, command)["maxTimeMS"])
    assert limits == [4_000, 3_000, 4_000]


async def test_under_a_timeout_of_the_drivers_no_limit_is_set(client: Any, scope: FakeScope) -> None:
    with pymongo.timeout(5):
        assert "maxTimeMS" not in apply(client._ensure_session(), dict(INSERT))
        assert apply(client._ensure_session(), {**INSERT, "maxTimeMS": 90_000})["maxTimeMS"] == 90_000


async def test_a_limit_that_cannot_strike_is_lowered_with_one_warning(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert apply(client._ensure_session(), {**INSERT, "maxTimeMS": 9_000})["maxTimeMS"] == 8_550
    (message,) = [entry.getMessage() for entry in caplog.records]
    assert "maxTimeMS 9000 is not below socketTimeoutMS 9000" in message
    assert "8550 is used; give a lower maxTimeMS or a higher socketTimeoutMS" in message


async def test_under_strict_a_limit_that_cannot_strike_is_an_error_before_it_is_sent(make: Any) -> None:
    strict = make(connect=False, socketTimeoutMS=9_000, saferetry=Settings(strict=True))
    call, session = lend(strict)
    with pytest.raises(ConfigurationError, match="maxTimeMS 9000 is not below socketTimeoutMS 9000"):
        apply(session, {**INSERT, "maxTimeMS": 9_000})
    assert call.sends == 0


async def test_without_a_socket_timeout_a_record_is_warned_about_once(
    make: Any, scope: FakeScope, caplog: pytest.LogCaptureFixture
) -> None:
    endless = make(connect=False)
    for _ in range(3):
        assert apply(endless._ensure_session(), dict(INSERT))["maxTimeMS"] == 20_000
    (message, _) = [entry.getMessage() for entry in caplog.records]  # the other one: nobody announced these writes
    assert "no socketTimeoutMS is set" in message
    assert "SAFERETRY_SOCKET_TIMEOUT_MS" in message


async def test_without_a_socket_timeout_nothing_is_said_outside_records(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert "maxTimeMS" not in apply(make(connect=False)._ensure_session(), dict(INSERT))
    assert not caplog.records


async def test_a_write_without_number_is_warned_about_once(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        call, session = lend(client, wants_number=True)
        apply(session, dict(INSERT), is_retryable=False)
        assert call.sends == 1
    (message,) = [entry.getMessage() for entry in caplog.records]
    assert "insert is sent without a transaction number (a standalone server, or retryWrites=false)" in message
    assert "mongod --replSet rs0" in message


async def test_under_strict_a_write_without_number_is_not_sent(make: Any) -> None:
    strict = make(connect=False, saferetry=Settings(strict=True))
    call, session = lend(strict, wants_number=True)
    with pytest.raises(UnprotectedWriteError, match="mongod --replSet rs0"):
        apply(session, dict(INSERT), is_retryable=False)
    assert call.sends == 0


@pytest.mark.parametrize(("is_retryable", "wants_number"), [(True, True), (False, False)])
async def test_under_strict_other_writes_are_sent(is_retryable: bool, wants_number: bool, make: Any) -> None:
    call, session = lend(make(connect=False, saferetry=Settings(strict=True)), wants_number=wants_number)
    apply(session, dict(INSERT), is_retryable=is_retryable)
    assert call.sends == 1


async def test_disabled_sessions_are_the_drivers_own(make: Any) -> None:
    disabled = make(connect=False, socketTimeoutMS=9_000, saferetry=Settings(disabled=True))
    assert type(disabled._ensure_session()) in (ClientSession, AsyncClientSession)


# --- guards ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "seconds"), [(30, 900.0), (1, 30.0), (None, LONGEST_IDLE), (0, LONGEST_IDLE)])
def test_idle_sessions_live_half_as_long_as_the_server_remembers(minutes: int | None, seconds: float) -> None:
    class Client:
        class topology_description:  # noqa: N801 - the driver's attribute
            logical_session_timeout_minutes = minutes

    now = 0.0
    guard = Guard(Settings(), Limits.of(None, None, None), rng=guard_rng(), pool=AddressPool(lambda: now))
    first = guard.pool.acquire(longest_idle, Client)
    guard.pool.release(first)
    now = seconds
    second = guard.pool.acquire(longest_idle, Client)
    assert second.session_id == first.session_id
    guard.pool.release(second)
    now = 2 * seconds + 0.1
    assert guard.pool.acquire(longest_idle, Client).session_id != first.session_id


def guard_rng() -> Any:
    import random  # noqa: PLC0415 - only here

    return random.Random(1)


def test_a_thousand_sessions_thrown_away_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(Settings(), Limits.of(None, None, None), rng=guard_rng())
    for _ in range(2_000):
        guard.discard(guard.pool.acquire())
    assert [entry.getMessage() for entry in caplog.records] == [
        "1000 sessions were thrown away after writes of unknown outcome",
        "2000 sessions were thrown away after writes of unknown outcome",
    ]


async def test_a_guard_belongs_to_one_client(make: Any) -> None:
    one, other = make(connect=False), make(connect=False)
    assert guard_of(one) is not guard_of(other)
    assert guard_of(one).pool is not guard_of(other).pool


# --- cancelling ------------------------------------------------------------------------------------------------------------


class FakeDatabase:
    """A database that remembers commands and may fail."""

    seen: list[tuple[Any, ...]]
    error: BaseException | None

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name

    def command(self, *arguments: Any) -> None:
        self.seen.append((self.client, self.name, *arguments, SCOPE.get(), _csot.get_timeout()))
        if self.error is not None:
            raise self.error


class FakeAsyncDatabase(FakeDatabase):
    async def command(self, *arguments: Any) -> None:  # type: ignore[override]  # its twin in asyncio
        super().command(*arguments)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> type[FakeDatabase]:
    FakeDatabase.seen, FakeDatabase.error = [], None
    monkeypatch.setattr(_seam, "Database", FakeDatabase)
    monkeypatch.setattr(_seam, "AsyncDatabase", FakeAsyncDatabase)
    return FakeDatabase


def test_cancelling_kills_the_one_session_outside_the_record_within_a_second(
    database: type[FakeDatabase], address: Address, scope: FakeScope
) -> None:
    cancel("client", address)
    assert database.seen == [("client", "admin", "killSessions", [address.session_id], None, 1)]
    assert _csot.get_timeout() is None


async def test_cancelling_in_asyncio_kills_the_one_session_within_a_second(
    database: type[FakeDatabase], address: Address
) -> None:
    await cancel_async("client", address)
    assert database.seen == [("client", "admin", "killSessions", [address.session_id], None, 1)]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_failure_to_cancel_is_logged_without_its_text(
    is_async: bool, database: type[FakeDatabase], address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    database.error = KeyError("mongodb://user:secret@host")
    with caplog.at_level(logging.DEBUG, "saferetry"):
        if is_async:
            await cancel_async("client", address)
        else:
            cancel("client", address)
    assert [entry.getMessage() for entry in caplog.records] == [
        "a write of unknown outcome could not be stopped on the server: KeyError"
    ]


def test_an_interruption_while_cancelling_passes_through(database: type[FakeDatabase], address: Address) -> None:
    database.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        cancel("client", address)
