"""What cannot join a record's transaction is refused before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pymongo import InsertOne, WriteConcern
from pymongo.encryption_options import AutoEncryptionOpts
from pymongo.operations import IndexModel, SearchIndexModel

import saferetry
from saferetry import Failure, RecordKey, current_record
from saferetry.errors import ConfigurationError
from tests.support import CommandLog, Mongod
from tests.support.driving import QUICK, Api, done, quick
from tests.support.older import needs_bound_sessions
from tests.transaction.scene import KEY, Scene, listed, names

DDL: dict[str, Callable[[Any], Any]] = {
    "create_collection": lambda c: c.database.create_collection("other"),
    "create_index": lambda c: c.create_index("n"),
    "create_indexes": lambda c: c.create_indexes([IndexModel("n")]),
    "create_search_index": lambda c: c.create_search_index(SearchIndexModel({"mappings": {}})),
    "create_search_indexes": lambda c: c.create_search_indexes([SearchIndexModel({"mappings": {}})]),
    "drop": lambda c: c.drop(),
    "drop_collection": lambda c: c.database.drop_collection("c"),
    "drop_database": lambda c: c.database.client.drop_database(c.database),
    "drop_index": lambda c: c.drop_index("n_1"),
    "drop_indexes": lambda c: c.drop_indexes(),
    "drop_search_index": lambda c: c.drop_search_index("s"),
    "rename": lambda c: c.rename("other"),
    "update_search_index": lambda c: c.update_search_index("s", {}),
}
COMMANDS: dict[str, Callable[[Any], Any]] = {
    "command, a read": lambda c: c.database.command("ping"),
    "command, a write": lambda c: c.database.command("insert", "c", documents=[{}]),
    "command, on admin": lambda c: c.database.client.admin.command("listDatabases"),
    "cursor_command": lambda c: c.database.cursor_command("find", "c"),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "$out": lambda c: c.aggregate([{"$out": "other"}]),
    "$merge": lambda c: c.aggregate([{"$match": {}}, {"$merge": "other"}]),
    "$merge, raw batches": lambda c: c.aggregate_raw_batches([{"$merge": "other"}]),
    "$out, on the database": lambda c: c.database.aggregate([{"$listLocalSessions": {}}, {"$out": "other"}]),
    "client.bulk_write": lambda c: c.database.client.bulk_write([InsertOne({}, namespace=c.full_name)]),
    "estimated_document_count": lambda c: c.estimated_document_count(),
    "validate_collection": lambda c: c.database.validate_collection("c"),
    "insert_one, w:0": lambda c: c.with_options(write_concern=WriteConcern(w=0)).insert_one({}),
    "update_many, w:0": lambda c: c.with_options(write_concern=WriteConcern(w=0)).update_many({}, {"$set": {"n": 1}}),
    "bulk_write, w:0": lambda c: c.with_options(write_concern=WriteConcern(w=0)).bulk_write([InsertOne({})]),
    "find_one_and_update, w:0": lambda c: c.with_options(write_concern=WriteConcern(w=0)).find_one_and_update(
        {}, [{"$set": {}}]
    ),
}
REFUSED = {**DDL, **COMMANDS, **OTHERS}
METADATA: dict[str, Callable[[Any], Any]] = {
    "list_indexes": lambda c: c.list_indexes(),
    "index_information": lambda c: c.index_information(),
    "options": lambda c: c.options(),
    "list_collections": lambda c: c.database.list_collections(),
    "list_collection_names": lambda c: c.database.list_collection_names(),
    "list_databases": lambda c: c.database.client.list_databases(),
    "list_database_names": lambda c: c.database.client.list_database_names(),
    "server_info": lambda c: c.database.client.server_info(),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_join_is_refused_before_it_is_sent(scene: Scene, log: CommandLog, name: str) -> None:
    sent = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))
        log.clear()
        try:
            await done(REFUSED[name](database.c))
        finally:
            sent.extend(log.names())

    with pytest.raises(ConfigurationError, match="cannot join the record's transaction.*call it before or after the handler"):
        await scene.deliver(on_order, scene.client(log=log))
    assert sent == []
    assert scene.documents() == scene.markers() == []


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_join_does_not_begin_a_transaction(scene: Scene, log: CommandLog, name: str) -> None:
    async def on_order(database: Any) -> None:
        await done(REFUSED[name](database.c))

    with pytest.raises(ConfigurationError, match="cannot join"):
        await scene.deliver(on_order, scene.client(log=log), lazily=True)
    assert log.names() == []


async def test_a_client_with_a_short_socket_timeout_does_not_begin_a_transaction(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    with pytest.raises(ConfigurationError, match="socketTimeoutMS is 149: give 150 or more"):
        await scene.deliver(on_order, scene.client(log=log, socketTimeoutMS=149), lazily=True)
    assert log.names() == []


async def test_a_refusal_is_not_handed_to_the_recoverer(scene: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.drop())

    with pytest.raises(ConfigurationError):
        await scene.deliver(on_order, recoverer=recovered.append)
    assert recovered == []


async def test_a_refusal_that_the_handler_catches_leaves_the_rest_whole(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 1}))
        with pytest.raises(ConfigurationError):
            await done(database.c.create_index("n"))
        await done(database.c.insert_one({"_id": 2}))

    await scene.deliver(on_order)
    assert scene.documents() == [{"_id": 1}, {"_id": 2}]


@pytest.mark.parametrize("operation", ["insert_one", "find_one", "find"])
async def test_a_second_client_is_refused_before_anything_is_sent_on_it(scene: Scene, log: CommandLog, operation: str) -> None:
    second = scene.client(log=log)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))
        answer = getattr(second[scene.name].c, operation)({})
        await (listed(answer) if operation == "find" else done(answer))

    with pytest.raises(ConfigurationError, match="second client.*use one client"):
        await scene.deliver(on_order)
    assert log.names() == []
    assert scene.documents() == []


async def test_a_second_client_is_refused_where_the_first_operation_chose_the_client(scene: Scene, log: CommandLog) -> None:
    second = scene.client(log=log)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))
        await done(second[scene.name].c.insert_one({}))

    with pytest.raises(ConfigurationError, match="second client"):
        await scene.deliver(on_order, lazily=True)
    assert log.names() == []


@pytest.mark.parametrize("operation", ["insert_one", "find_one", "find", "delete_many"])
async def test_a_session_of_the_users_is_refused(scene: Scene, log: CommandLog, operation: str) -> None:
    client = scene.client(log=log)

    async def on_order(database: Any) -> None:
        session = await done(client.start_session()) if not scene.api.is_async else client.start_session()
        log.clear()
        try:
            answer = getattr(database.c, operation)({}, session=session)
            await (listed(answer) if operation == "find" else done(answer))
        finally:
            assert log.names() == []
            await done(session.end_session())

    with pytest.raises(ConfigurationError, match="a session of its own"):
        await scene.deliver(on_order, client)


async def test_a_transaction_of_the_users_is_refused(scene: Scene) -> None:
    client = scene.client()

    async def on_order(database: Any) -> None:
        async def insert(session: Any) -> None:
            await done(database.c.insert_one({}, session=session))

        if scene.api.is_async:
            async with client.start_session() as session:
                await session.with_transaction(insert)
        else:
            with client.start_session() as session, session.start_transaction():
                await insert(session)

    with pytest.raises(ConfigurationError, match="a session of its own"):
        await scene.deliver(on_order, client)
    assert scene.documents() == scene.markers() == []


@needs_bound_sessions
async def test_a_session_that_the_user_bound_is_refused(scene: Scene) -> None:
    client = scene.client()

    async def on_order(database: Any) -> None:
        if scene.api.is_async:
            async with client.start_session() as session, session.bind():
                await database.c.insert_one({})
        else:
            with client.start_session() as session, session.bind():
                database.c.insert_one({})

    with pytest.raises(ConfigurationError, match="a session of its own"):
        await scene.deliver(on_order, client)
    assert scene.documents() == scene.markers() == []


async def test_an_encrypted_client_is_refused_before_anything_is_sent(scene: Scene, log: CommandLog) -> None:
    encryption = AutoEncryptionOpts(
        {"local": {"key": os.urandom(96)}}, "keys.data", mongocryptd_bypass_spawn=True, bypass_query_analysis=True
    )
    client = scene.client(log=log, auto_encryption_opts=encryption)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    for lazily in (True, False):
        with pytest.raises(ConfigurationError, match="auto_encryption_opts"):
            await scene.deliver(on_order, client, lazily=lazily)
    assert log.names() == []


@pytest.mark.parametrize("name", METADATA)
async def test_metadata_is_read_beside_the_transaction(scene: Scene, log: CommandLog, name: str) -> None:
    scene.there.c.insert_one({"_id": 1})

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 2}))
        log.clear()
        answer = await done(METADATA[name](database.c))
        if name in ("list_indexes", "list_collections", "list_databases"):
            assert await listed(answer)
        assert answer is not None
        assert log.names()
        assert not any("autocommit" in command for command in log.commands())

    await scene.deliver(on_order, scene.client(log=log))
    assert len(scene.documents()) == 2


# servers and settings


@pytest.mark.parametrize("lazily", [False, True], ids=["with_client", "without_client"])
async def test_a_standalone_server_is_refused(api: Api, standalone: Mongod, lazily: bool) -> None:
    client = api.client(standalone.uri, settings=quick(marker_database="m"))

    @api.handler(key=KEY, guarantee="transaction", client=None if lazily else client)
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 1}))

    with pytest.raises(ConfigurationError, match="needs a replica set.*rs.initiate"):
        await done(on_order(client.standing))
    assert await done(client.standing.c.count_documents({})) == 0
    assert await done(client.m.saferetry_records.count_documents({})) == 0


async def test_a_standalone_server_is_refused_to_a_handler_that_catches_everything(api: Api, standalone: Mongod) -> None:
    client = api.client(standalone.uri, settings=quick(marker_database="m"))

    @api.handler(key=KEY, guarantee="transaction")
    async def on_order(database: Any) -> None:
        try:
            await done(database.c.insert_one({"_id": 1}))
        except Exception:  # noqa: BLE001 - that is the test
            return

    with pytest.raises(ConfigurationError, match="needs a replica set"):
        await done(on_order(client.standing))


async def test_without_a_database_for_markers_nothing_is_sent(scene: Scene, log: CommandLog) -> None:
    client = scene.api.client(scene.mongod.uri, log=log)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    for lazily in (True, False):
        with pytest.raises(
            ConfigurationError, match="set marker_database .SAFERETRY_MARKER_DATABASE.*default database in the URI"
        ):
            await scene.deliver(on_order, client, lazily=lazily)
    assert log.names() == []


async def test_the_default_database_of_the_uri_holds_the_markers(scene: Scene) -> None:
    client = scene.api.client(scene.mongod.uri.replace("/?", f"/{scene.name}?"))

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    await scene.deliver(on_order, client)
    assert len(scene.markers()) == 1


async def test_marker_database_and_collection_hold_the_markers(scene: Scene) -> None:
    settings = replace(QUICK, marker_database=scene.name + "_m", marker_collection="done")

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    client = scene.api.client(scene.mongod.uri.replace("/?", f"/{scene.name}?"), settings=settings)
    await scene.deliver(on_order, client)
    assert scene.markers() == []
    assert scene.admin[scene.name + "_m"].done.count_documents({}) == 1


def on_plain_order(database: Any) -> None:
    database.c.insert_one({})


async def on_async_order(database: Any) -> None:
    await database.c.insert_one({})


async def test_without_group_and_name_nothing_is_sent(scene: Scene, log: CommandLog) -> None:
    work: Any = on_async_order if scene.api.is_async else on_plain_order
    client = scene.client(log=log)
    handle = saferetry.handler(key=RecordKey("orders", 0, 7), guarantee="transaction", client=client)(work)
    with pytest.raises(ConfigurationError, match="needs a group .*or name=, so that two services never answer for each other"):
        await done(handle(client[scene.name]))
    assert names(log) == []


@pytest.mark.parametrize("given", ["group in the key", "group in the settings", "name"])
async def test_a_group_or_a_name_will_do(scene: Scene, given: str) -> None:
    work: Any = on_async_order if scene.api.is_async else on_plain_order
    key = RecordKey("orders", 0, 7, group="g" if given == "group in the key" else "", digest=b"x")
    client = scene.client(settings=quick(group="s" if given == "group in the settings" else ""))
    name = "orders" if given == "name" else None
    handle = saferetry.handler(key=key, guarantee="transaction", client=client, name=name)(work)
    await done(handle(client[scene.name]))
    (marker,) = scene.markers()
    assert marker["_id"]["group"] == {"group in the key": "g", "group in the settings": "s", "name": ""}[given]
    assert marker["_id"]["name"] == name or marker["_id"]["name"].endswith(f"test_refusals.{work.__name__}")


def test_a_handler_without_key_is_refused_where_it_is_made() -> None:
    with pytest.raises(ConfigurationError, match='guarantee "transaction" needs key='):
        saferetry.handler(guarantee="transaction")(on_plain_order)


def test_derived_ids_are_not_for_transactions() -> None:
    with pytest.raises(ConfigurationError, match="a transaction needs none"):
        saferetry.handler(key=KEY, guarantee="transaction", derive_ids=True)(on_plain_order)


@pytest.mark.parametrize("option", [{"digest": lambda _: b""}, {"store_result": True}])
def test_digest_and_store_result_are_for_transactions(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match='need guarantee="transaction"'):
        saferetry.handler(key=KEY, **option)(on_plain_order)


async def test_the_budget_is_cut_to_the_lifetime_of_a_transaction(scene: Scene) -> None:
    async def on_order(database: Any) -> float:
        record = current_record()
        assert record is not None
        return record.remaining()

    assert 50 < await scene.deliver(on_order, budget=3_600.0, client=scene.client(settings=quick(budget_ms=3_600_000))) <= 60


async def test_a_shorter_budget_stays(scene: Scene) -> None:
    async def on_order(database: Any) -> float:
        record = current_record()
        assert record is not None
        return record.remaining()

    assert 0 < await scene.deliver(on_order, budget=5.0) <= 5


async def test_disabled_is_plain_pymongo(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    client = scene.client(log=log, settings=quick(disabled=True))
    await scene.deliver(on_order, client)
    await scene.deliver(on_order, client)
    assert names(log) == ["insert", "insert"]
    assert len(scene.documents()) == 2
    assert scene.markers() == []
