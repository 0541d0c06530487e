"""Calls that cannot be protected, cannot be made here, or ask for the impossible: said clearly, before anything is sent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pymongo import InsertOne, UpdateMany, UpdateOne
from pymongo.encryption_options import AutoEncryptionOpts
from pymongo.errors import AutoReconnect, ExecutionTimeout, InvalidOperation, NetworkTimeout, OperationFailure, PyMongoError
from pymongo.write_concern import WriteConcern

from saferetry import Outcome, propagate, record, repeatable
from saferetry.errors import ConfigurationError, RetryRefusedError, UnprotectedWriteError
from saferetry.lab.commands import CommandLog
from saferetry.lab.mongod import Mongod
from tests.conftest import RawClient
from tests.input.conftest import CANARY, refused
from tests.support import app_name, fail_command
from tests.support.driving import Api, done, quick

NOWHERE = f"mongodb://user:{CANARY}@127.0.0.1:1/?serverSelectionTimeoutMS=50&connect=false"
DOCUMENT: Mapping[str, Any] = {"card": CANARY}
FILTER: Mapping[str, Any] = {"card": CANARY}
UPDATE: Mapping[str, Any] = {"$set": {"card": CANARY + "0"}}

Write = Callable[[Any], Any]  # from a collection

PROTECTED: Mapping[str, Write] = {
    "insert_one": lambda c: c.insert_one(dict(DOCUMENT)),
    "insert_many": lambda c: c.insert_many([dict(DOCUMENT)]),
    "update_one": lambda c: c.update_one(FILTER, UPDATE),
    "replace_one": lambda c: c.replace_one(FILTER, dict(DOCUMENT)),
    "delete_one": lambda c: c.delete_one(FILTER),
    "find_one_and_update": lambda c: c.find_one_and_update(FILTER, UPDATE),
    "find_one_and_replace": lambda c: c.find_one_and_replace(FILTER, dict(DOCUMENT)),
    "find_one_and_delete": lambda c: c.find_one_and_delete(FILTER),
    "bulk_write": lambda c: c.bulk_write([InsertOne(dict(DOCUMENT)), UpdateOne(FILTER, UPDATE)]),
}
UNPROTECTED: Mapping[str, Write] = {
    "update_many": lambda c: c.update_many(FILTER, UPDATE),
    "delete_many": lambda c: c.delete_many(FILTER),
    "aggregate": lambda c: c.aggregate([{"$match": FILTER}, {"$out": "copy"}]),
    "drop": lambda c: c.drop(),
    "create_index": lambda c: c.create_index("card"),
    "command": lambda c: c.database.command({"update": c.name, "updates": [{"q": FILTER, "u": UPDATE}]}),
    "drop_collection": lambda c: c.database.drop_collection(c.name),
    "drop_database": lambda c: c.database.client.drop_database(c.database.name),
}
# A bulk that holds one of these is refused whole: half of it would be there, and the rest refused.
MIXED: Mapping[str, Write] = {
    "bulk_write": lambda c: c.bulk_write([InsertOne(dict(DOCUMENT)), UpdateMany(FILTER, UPDATE)]),
}


def rows(*tables: Mapping[str, Write]) -> pytest.MarkDecorator:
    found = [pytest.param(name, write, id=name) for table in tables for name, write in table.items()]
    return pytest.mark.parametrize(("name", "write"), found)


# --- without a server: refused before one is looked for --------------------------------------------------------------------


async def test_client_bulk_write_in_a_record(api: Api) -> None:
    client = api.client(NOWHERE)
    with record("r") as current:
        with refused(ConfigurationError, "MongoClient.bulk_write cannot be protected", "use the collections' bulk_write, or"):
            await done(client.bulk_write([InsertOne(dict(DOCUMENT), namespace="d.c")]))
        assert current.writes == ()


@rows(PROTECTED, UNPROTECTED)
async def test_a_write_outside_any_record_under_strict(name: str, write: Write, api: Api) -> None:
    collection = api.client(NOWHERE, settings=quick(strict=True))["d"]["c"]
    remedy = "decorate the handler with saferetry.handler, use 'with record(...)', or bind a thread's function with propagate()"
    with refused(UnprotectedWriteError, f"{name} was called outside any record, which strict refuses", remedy):
        await done(write(collection))


async def test_client_bulk_write_outside_any_record_under_strict(api: Api) -> None:
    client = api.client(NOWHERE, settings=quick(strict=True))
    with refused(UnprotectedWriteError, "bulk_write was called outside any record, which strict refuses"):
        await done(client.bulk_write([InsertOne(dict(DOCUMENT), namespace="d.c")]))


@rows(UNPROTECTED, MIXED)
async def test_a_write_that_cannot_be_protected_under_strict(name: str, write: Write, api: Api) -> None:
    collection = api.client(NOWHERE, settings=quick(strict=True))["d"]["c"]
    with record("r"), refused(UnprotectedWriteError, f"{name} on ", "which strict refuses", "wrap it in repeatable() if"):
        await done(write(collection))


@rows(PROTECTED)
async def test_write_concern_0_under_strict(name: str, write: Write, api: Api) -> None:
    collection = api.client(NOWHERE, settings=quick(strict=True), w=0)["d"]["c"]
    with record("r"), refused(UnprotectedWriteError, f"{name} on d.c cannot be protected (write concern 0 asks nobody"):
        await done(write(collection))


async def test_a_session_of_the_users_under_strict(api: Api) -> None:
    client = api.client(NOWHERE, settings=quick(strict=True))
    with record("r"), refused(UnprotectedWriteError, "insert_one on d.c cannot be protected (it runs on a session of yours)"):
        await done(client["d"]["c"].insert_one(dict(DOCUMENT), session=client.start_session()))


@rows(PROTECTED, UNPROTECTED)
async def test_a_write_in_a_record_that_has_ended(name: str, write: Write, api: Api) -> None:
    collection = api.client(NOWHERE)["d"]["c"]
    ended = asyncio.Event()

    async def outlive() -> None:
        await ended.wait()
        with refused(
            ConfigurationError, f"{name} was called in the record on_order (orders/0/17), which has ended", "wait for it"
        ):
            await done(write(collection))

    with record(("orders", 0, 17), name="on_order"):
        task = asyncio.create_task(outlive())
    ended.set()
    await task


def test_a_thread_that_outlives_its_record(mongod: Mongod) -> None:
    ended = threading.Event()

    def outlive(collection: Any) -> None:
        ended.wait(5)
        collection.insert_one(dict(DOCUMENT))

    half = Api("sync")
    collection = half.client(mongod.uri)["d"]["c"]
    with ThreadPoolExecutor(1) as pool:
        with record("r"):
            running = pool.submit(propagate(outlive), collection)
        ended.set()
        with refused(ConfigurationError, "insert_one was called in the record", "a thread or task outlived its handler"):
            running.result()
    collection.database.client.close()


async def test_a_read_in_a_record_that_has_ended_is_the_drivers(api: Api, mongod: Mongod, database_name: str) -> None:
    collection = api.client(mongod.uri)[database_name]["c"]
    ended = asyncio.Event()

    async def outlive() -> Any:
        await ended.wait()
        return await done(collection.find_one(FILTER))

    with record("r"):
        task = asyncio.create_task(outlive())
    ended.set()
    assert await task is None


# --- encrypted clients -----------------------------------------------------------------------------------------------------


def encryption() -> AutoEncryptionOpts:
    """Return options that look for neither mongocryptd nor its library."""
    return AutoEncryptionOpts(
        {"local": {"key": os.urandom(96)}}, "keys.data", mongocryptd_bypass_spawn=True, bypass_query_analysis=True
    )


@rows(PROTECTED, UNPROTECTED)
async def test_an_encrypted_client_in_a_record(name: str, write: Write, api: Api) -> None:
    collection = api.client(NOWHERE, auto_encryption_opts=encryption())["d"]["c"]
    told = f"{name} on a client with auto_encryption_opts is not supported inside a record"
    with record("r") as current:
        with refused(ConfigurationError, told, "encrypt explicitly (ClientEncryption), or write outside the record"):
            await done(write(collection))
        assert current.writes == ()


@rows(PROTECTED, UNPROTECTED)
async def test_a_client_with_a_short_socket_timeout_in_a_record(name: str, write: Write, api: Api) -> None:
    collection = api.client(NOWHERE, socketTimeoutMS=149)["d"]["c"]
    with record("r") as current:
        with refused(ConfigurationError, "socketTimeoutMS is 149: give 150 or more", "writes inside records are refused"):
            await done(write(collection))
        assert current.writes == ()


async def test_a_client_with_a_short_socket_timeout_outside_a_record_works_without_limits(
    api: Api, mongod: Mongod, database_name: str, log: CommandLog
) -> None:
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=149)[database_name]["c"]
    with contextlib.suppress(NetworkTimeout):  # on a busy machine; what is looked at are the commands
        await done(collection.insert_one(dict(DOCUMENT)))
    sent = log.commands("insert")
    assert sent
    assert not any("maxTimeMS" in command for command in sent)


async def test_an_encrypted_client_outside_a_record_works(api: Api, mongod: Mongod, database_name: str) -> None:
    collection = api.client(mongod.uri, auto_encryption_opts=encryption())[database_name]["c"]
    await done(collection.insert_one(dict(DOCUMENT)))
    assert await done(collection.count_documents({})) == 1


# --- what passes through to the driver -------------------------------------------------------------------------------------


async def test_client_bulk_write_outside_a_record_is_the_drivers(api: Api, mongod: Mongod) -> None:
    with pytest.raises((InvalidOperation, OperationFailure)) as caught:
        await done(api.client(mongod.uri).bulk_write([InsertOne(dict(DOCUMENT), namespace="d.c")]))
    assert "saferetry" not in vars(caught.value)


async def test_wrong_arguments_are_the_drivers_own_error(api: Api) -> None:
    collection = api.client(NOWHERE)["d"]["c"]
    with record("r") as current:
        calls: list[Callable[[], Any]] = [
            lambda: collection.insert_one(7),
            lambda: collection.insert_one(dict(DOCUMENT), colour="red"),
            lambda: collection.insert_many([]),
            lambda: collection.insert_many([dict(DOCUMENT), 7]),
            lambda: collection.bulk_write([]),
            lambda: collection.bulk_write([7]),
            lambda: collection.update_one(FILTER, {"card": 1}),
            lambda: collection.replace_one(FILTER, UPDATE),
            lambda: collection.find_one_and_update(FILTER, {}),
        ]
        for wrong in calls:
            with pytest.raises((TypeError, ValueError, InvalidOperation)):
                await done(wrong())
        assert current.effect() == ""


# --- write concern 0 -------------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.name == "saferetry" and entry.levelname == "WARNING"]


async def test_write_concern_0_is_warned_about_once_sent_once_and_never_counted_as_done(
    api: Api, mongod: Mongod, database_name: str, log: CommandLog, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(mongod.uri, log=log)
    collection = client[database_name].get_collection("c", write_concern=WriteConcern(w=0))
    with record("r") as current:
        for _ in range(2):
            await done(collection.insert_one(dict(DOCUMENT)))
        assert [write.outcome for write in current.writes] == [Outcome.UNVERIFIABLE] * 2
        assert current.effect() == "insert_one on " + f"{database_name}.c is unverifiable"
    assert log.sends("insert") == 2
    assert warnings_of(caplog) == [
        f"insert_one on {database_name}.c is sent once and never again: write concern 0 asks nobody whether it was applied"
    ]


async def test_write_concern_0_is_not_sent_again_when_nobody_answers(api: Api) -> None:
    collection = api.client(NOWHERE, w=0)["d"]["c"]
    with record("r", budget=0.05) as current:
        with pytest.raises(PyMongoError):
            await done(collection.insert_one(dict(DOCUMENT)))
        assert current.writes[0].outcome is Outcome.NOT_SENT


# --- what the server does not number ---------------------------------------------------------------------------------------

UNNUMBERED_REASON = "is sent without a transaction number (a standalone server, or retryWrites=false)"


@rows(PROTECTED)
async def test_a_standalone_under_strict(name: str, write: Write, api: Api, standalone: Mongod, log: CommandLog) -> None:
    collection = api.client(standalone.uri, settings=quick(strict=True), log=log)["d"]["c"]
    with record("r") as current:
        with refused(UnprotectedWriteError, UNNUMBERED_REASON, "mongod --replSet rs0", "rs.initiate()"):
            await done(write(collection))
        assert [view.outcome for view in current.writes] == [Outcome.NOT_SENT]
        assert current.effect() == ""
    assert log.sends("insert", "update", "delete", "findAndModify") == 0


@rows(PROTECTED)
async def test_retrywrites_off_under_strict(name: str, write: Write, api: Api, mongod: Mongod, log: CommandLog) -> None:
    collection = api.client(mongod.uri, settings=quick(strict=True), log=log, retryWrites=False)["d"]["c"]
    with record("r"), refused(UnprotectedWriteError, UNNUMBERED_REASON):
        await done(write(collection))
    assert log.sends("insert", "update", "delete", "findAndModify") == 0


@rows(PROTECTED)
async def test_retrywrites_off_otherwise_is_warned_about_and_no_number_is_sent(
    *,
    name: str,
    write: Write,
    api: Api,
    mongod: Mongod,
    database_name: str,
    log: CommandLog,
    caplog: pytest.LogCaptureFixture,
) -> None:
    collection = api.client(mongod.uri, log=log, retryWrites=False)[database_name]["c"]
    with record("r"):
        for _ in range(2):
            await done(write(collection))
    sent = log.commands("insert", "update", "delete", "findAndModify")
    assert sent
    assert not any("txnNumber" in command for command in sent)
    assert [UNNUMBERED_REASON in message for message in warnings_of(caplog)] == [True]


async def test_strict_lets_a_standalone_read_and_write_what_is_repeatable(api: Api, standalone: Mongod) -> None:
    collection = api.client(standalone.uri, settings=quick(strict=True))["d"]["repeatable"]
    with record("r"):
        with repeatable():
            await done(collection.insert_one(dict(DOCUMENT)))
        assert await done(collection.count_documents(dict(FILTER))) >= 1


@rows(UNPROTECTED)
async def test_strict_lets_through_what_is_repeatable(
    name: str, write: Write, api: Api, mongod: Mongod, database_name: str
) -> None:
    collection = api.client(mongod.uri, settings=quick(strict=True))[database_name]["c"]
    with record("r") as current, repeatable():
        await done(collection.insert_one(dict(DOCUMENT)))
        await done(write(collection))
        assert [view.outcome for view in current.writes] == [Outcome.APPLIED] * 2
        assert current.effect() == ""


@rows(PROTECTED)
async def test_strict_lets_through_what_can_be_protected(
    name: str, write: Write, api: Api, mongod: Mongod, database_name: str
) -> None:
    collection = api.client(mongod.uri, settings=quick(strict=True))[database_name]["c"]
    with record("r") as current:
        await done(write(collection))
        assert [(view.method, view.outcome) for view in current.writes] == [(name, Outcome.APPLIED)]


# --- time limits -----------------------------------------------------------------------------------------------------------

LIMITED: Mapping[str, Callable[[Any, int], Any]] = {
    "find_one": lambda c, ms: c.find_one(FILTER, max_time_ms=ms),
    "count_documents": lambda c, ms: c.count_documents(dict(FILTER), maxTimeMS=ms),
    "distinct": lambda c, ms: c.distinct("card", maxTimeMS=ms),
    "find_one_and_update": lambda c, ms: c.find_one_and_update(FILTER, UPDATE, maxTimeMS=ms),
}
IN_AND_OUT = pytest.mark.parametrize(("inside", "limit"), [(True, 2_000), (False, 2_850)], ids=["inside", "outside"])


def limited_rows() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", LIMITED.values(), ids=LIMITED.keys())


async def called(call: Callable[[Any, int], Any], collection: Any, milliseconds: int, *, inside: bool) -> None:
    if not inside:
        await done(call(collection, milliseconds))
        return
    with record("r"):
        await done(call(collection, milliseconds))


@limited_rows()
@IN_AND_OUT
@pytest.mark.parametrize("milliseconds", [3_000, 90_000])
async def test_a_limit_at_or_above_the_socket_timeout_is_lowered_with_one_warning(
    *,
    milliseconds: int,
    inside: bool,
    limit: int,
    call: Callable[[Any, int], Any],
    api: Api,
    mongod: Mongod,
    log: CommandLog,
    caplog: pytest.LogCaptureFixture,
) -> None:
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=3_000)["d"]["c"]
    for _ in range(2):
        await called(call, collection, milliseconds, inside=inside)
    assert [command["maxTimeMS"] for command in log.commands()] == [limit, limit]
    assert warnings_of(caplog) == [
        f"maxTimeMS {milliseconds} is not below socketTimeoutMS 3000, so that the client would give up while the server works "
        f"on: {limit} is used; give a lower maxTimeMS or a higher socketTimeoutMS"
    ]


@limited_rows()
@IN_AND_OUT
async def test_under_strict_it_is_an_error_and_nothing_is_sent(
    *, inside: bool, limit: int, call: Callable[[Any, int], Any], api: Api, mongod: Mongod, log: CommandLog
) -> None:
    collection = api.client(mongod.uri, settings=quick(strict=True), log=log, socketTimeoutMS=3_000)["d"]["c"]
    if not inside and call is LIMITED["find_one_and_update"]:
        return  # refused for another reason: a write outside any record
    with refused(ConfigurationError, "maxTimeMS 3000 is not below socketTimeoutMS 3000", "give a lower maxTimeMS or a higher"):
        await called(call, collection, 3_000, inside=inside)
    assert log.commands() == []


@limited_rows()
@IN_AND_OUT
async def test_a_lower_limit_is_the_users(
    *,
    inside: bool,
    limit: int,
    call: Callable[[Any, int], Any],
    api: Api,
    mongod: Mongod,
    log: CommandLog,
    caplog: pytest.LogCaptureFixture,
) -> None:
    collection = api.client(mongod.uri, log=log, socketTimeoutMS=3_000)["d"]["c"]
    await called(call, collection, 2_999, inside=inside)
    assert [command["maxTimeMS"] for command in log.commands()] == [2_999]
    assert warnings_of(caplog) == []


# --- nothing of the user's in what we say ----------------------------------------------------------------------------------


async def test_a_note_on_the_drivers_error_names_method_and_namespace_alone(
    api: Api, mongod: Mongod, admin: RawClient, database_name: str
) -> None:
    name = app_name()
    collection = api.client(mongod.uri, appname=name)[database_name]["c"]
    with record("r"), fail_command(admin, app_name=name, commands=["update"], closeConnection=True):
        with pytest.raises(AutoReconnect) as caught:
            await done(collection.update_many(FILTER, UPDATE))
        with refused(RetryRefusedError, f"update_many on {database_name}.c was not sent again"):
            await done(collection.update_many(FILTER, UPDATE))
    assert caught.value.__notes__ == [
        f"saferetry: update_many on {database_name}.c: outcome unknown after 1 sends; "
        "not sent again, since it could take effect twice"
    ]


async def test_a_refusal_to_execute_again_tells_what_was_written_without_its_content(
    api: Api, mongod: Mongod, database_name: str
) -> None:
    collection = api.client(mongod.uri)[database_name]["c"]

    @api.handler(retry_on=KeyError, name="on_order")
    async def on_order(message: Any) -> None:
        await done(collection.insert_one(dict(message)))
        raise KeyError(CANARY)

    with refused(RetryRefusedError, f"the handler on_order was not executed again: insert_one on {database_name}.c is applied"):
        await done(on_order(dict(DOCUMENT)))


async def test_a_handler_that_passes_over_an_unknown_write_is_warned_about_without_its_content(
    api: Api, mongod: Mongod, admin: RawClient, database_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = app_name()
    collection = api.client(mongod.uri, appname=name, settings=quick(max_attempts=2))[database_name]["c"]

    @api.handler(name="on_order")
    async def on_order(message: Any) -> None:
        with pytest.raises(AutoReconnect):
            await done(collection.update_one(message, UPDATE))

    with fail_command(admin, app_name=name, commands=["update"], closeConnection=True):
        await done(on_order(dict(DOCUMENT)))
    assert any("1 of its writes may or may not have been applied" in message for message in warnings_of(caplog))
    assert any("sent again in" in entry.getMessage() for entry in caplog.records)  # the fixture looked at DEBUG too


async def test_a_client_that_reaches_nobody_does_not_tell_its_password(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    collection = api.client(NOWHERE, settings=quick(max_attempts=2))["d"]["c"]
    with record("r"), pytest.raises(PyMongoError) as caught:
        await done(collection.insert_one(dict(DOCUMENT)))
    assert CANARY not in "".join(getattr(caught.value, "__notes__", []))
    assert CANARY not in repr(caught.value.saferetry)  # type: ignore[attr-defined]  # an attribute of ours


async def test_the_view_of_a_write_holds_no_content(api: Api, mongod: Mongod, database_name: str) -> None:
    collection = api.client(mongod.uri)[database_name]["c"]
    with record("r") as current:
        for write in PROTECTED.values():
            await done(write(collection))
        assert len(current.writes) == len(PROTECTED)
        assert CANARY not in repr(current.writes)


async def test_a_tag_on_the_wire_holds_the_hash_of_the_key_alone(
    api: Api, mongod: Mongod, database_name: str, log: CommandLog
) -> None:
    collection = api.client(mongod.uri, log=log)[database_name]["c"]
    with record((CANARY, 0, 17)):
        await done(collection.insert_one({"a": 1}))
    (command,) = log.commands("insert")
    assert CANARY not in repr(command["comment"])
    assert set(command["comment"]["saferetry"]) == {"record", "execution"}


async def test_a_server_error_keeps_the_drivers_words_and_ours_add_nothing(
    api: Api, mongod: Mongod, admin: RawClient, database_name: str
) -> None:
    name = app_name()
    collection = api.client(mongod.uri, appname=name, settings=quick(max_attempts=2))[database_name]["c"]
    failing = fail_command(admin, app_name=name, commands=["insert"], errorCode=50, errorMessage=CANARY)
    with record("r"), failing, pytest.raises(ExecutionTimeout) as caught:
        await done(collection.insert_one(dict(DOCUMENT)))
    assert CANARY not in "".join(caught.value.__notes__)
