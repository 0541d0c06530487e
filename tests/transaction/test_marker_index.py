"""The index that lets markers expire: looked for at start, made where it is missing, never at the expense of records."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from saferetry import Failure, _marker
from saferetry.errors import ConfigurationError
from tests.support import CommandLog, Mongod, app_name, fail_command, random_name
from tests.support.driving import QUICK, Api, RawClient, done, quick
from tests.transaction.scene import KEY, MARKERS, Scene, only_async

RIGHTS = ("find", "insert", "update")


@pytest.fixture(autouse=True)
def time_for_indexes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine make an index at the first attempt."""
    if "not_made_for_ever" not in request.node.name:
        monkeypatch.setattr(_marker, "INDEX_MAX_TIME_MS", 5_000)


async def on_order(database: Any) -> None:
    await done(database.c.insert_one({}))


def life(scene: Scene) -> list[Any]:
    """Return after how many seconds markers expire, by each index that says so."""
    indexes = scene.there[MARKERS].index_information().values()
    return [index["expireAfterSeconds"] for index in indexes if "expireAfterSeconds" in index]


async def test_the_index_is_made_once_with_the_life_of_the_settings(scene: Scene, log: CommandLog) -> None:
    client = scene.client(log=log, settings=quick(marker_ttl_s=1_234))
    for position in range(3):
        await scene.deliver(on_order, client, key=replace(KEY, position=position))
    assert life(scene) == [1_234]
    assert scene.there[MARKERS].index_information()["saferetry_ttl"]["key"] == [("at", 1)]
    assert (log.sends("listIndexes"), log.sends("createIndexes")) == (1, 1)
    assert log.names()[:2] == ["listIndexes", "createIndexes"]


async def test_the_index_is_not_made_for_ever(scene: Scene, log: CommandLog) -> None:
    await scene.deliver(on_order, scene.client(log=log))
    assert [0 < command["maxTimeMS"] <= 500 for command in log.commands("createIndexes")] == [True]


async def test_a_handler_without_client_makes_the_index_too(scene: Scene) -> None:
    await scene.deliver(on_order, lazily=True)
    assert life(scene) == [QUICK.marker_ttl_s]


@pytest.mark.parametrize("name", ["saferetry_ttl", "another"])
async def test_an_index_with_the_same_life_is_not_touched(
    scene: Scene, log: CommandLog, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    scene.there[MARKERS].create_index("at", expireAfterSeconds=QUICK.marker_ttl_s, name=name)
    with caplog.at_level(logging.WARNING, "saferetry"):
        await scene.deliver(on_order, scene.client(log=log))
    assert log.sends("createIndexes", "collMod") == 0
    assert caplog.messages == []


@pytest.mark.parametrize(("options", "says"), [({"expireAfterSeconds": 77}, "77 s"), ({}, "for ever")])
async def test_an_index_with_another_life_is_kept_with_one_warning(
    scene: Scene, log: CommandLog, caplog: pytest.LogCaptureFixture, options: dict[str, Any], says: str
) -> None:
    scene.there[MARKERS].create_index("at", name="of_the_admin", **options)
    client = scene.client(log=log)
    with caplog.at_level(logging.WARNING, "saferetry"):
        for position in range(3):
            await scene.deliver(on_order, client, key=replace(KEY, position=position))
    assert life(scene) == [*options.values()]
    assert log.sends("createIndexes", "collMod") == 0
    assert [message.startswith(f"the markers live {says}, as") for message in caplog.messages] == [True]


@pytest.mark.parametrize("code", [24, 50])
async def test_an_index_that_cannot_be_made_now_is_made_with_a_later_record(scene: Scene, log: CommandLog, code: int) -> None:
    name = app_name()
    client = scene.client(log=log, appName=name)
    with fail_command(scene.admin, app_name=name, commands=["createIndexes"], times=1, errorCode=code):
        await scene.deliver(on_order, client)
    assert len(scene.documents()) == len(scene.markers()) == 1
    assert life(scene) == []
    for position in (1, 2):
        await scene.deliver(on_order, client, key=replace(KEY, position=position))
    assert life(scene) == [QUICK.marker_ttl_s]
    assert log.sends("createIndexes") == 2


async def test_an_index_that_cannot_be_looked_for_now_is_made_with_a_later_record(scene: Scene) -> None:
    name = app_name()
    client = scene.client(appName=name)
    with fail_command(scene.admin, app_name=name, commands=["listIndexes"], times=2, closeConnection=True):
        await scene.deliver(on_order, client)
    await scene.deliver(on_order, client, key=replace(KEY, position=1))
    assert len(scene.documents()) == 2
    assert life(scene) == [QUICK.marker_ttl_s]


async def test_the_index_is_not_made_while_a_record_is_at_work(scene: Scene, log: CommandLog) -> None:
    name = app_name()
    client = scene.client(log=log, appName=name)

    async def at_work(database: Any) -> None:
        await done(database.c.insert_one({"_id": "at work"}))
        await scene.until(lambda: scene.documents(_id="beside it"))

    async def beside_it(database: Any) -> None:
        await done(database.c.insert_one({"_id": "beside it"}))

    async def second() -> None:
        await scene.until(lambda: scene.runs == 2)
        await scene.deliver(beside_it, client, key=replace(KEY, position=2))

    scene.there.c.insert_one({})
    with fail_command(scene.admin, app_name=name, commands=["createIndexes"], times=1, errorCode=24):
        await scene.deliver(on_order, client)
        answers = await scene.together(lambda: scene.deliver(at_work, client, key=replace(KEY, position=1)), second)
    assert answers == [None, None]
    assert life(scene) == [QUICK.marker_ttl_s]  # made by the record that found none at work
    assert log.sends("createIndexes") == 2


@pytest.mark.parametrize("positions", [range(24), range(0, 6 * 256, 256)], ids=["many slots", "one slot"])
async def test_records_that_begin_at_once_wait_until_the_index_is_made_and_are_executed_once_each(
    scene: Scene, log: CommandLog, positions: range
) -> None:
    client = scene.client(log=log)
    scene.there.create_collection("c")
    deliveries = [replace(KEY, position=position) for position in positions]
    answers = await scene.together(*((lambda key=key: scene.deliver(on_order, client, key=key)) for key in deliveries))
    assert answers == [None] * len(positions)
    assert scene.runs == len(scene.documents()) == len(scene.markers()) == len(positions)
    assert life(scene) == [QUICK.marker_ttl_s]
    assert log.names()[:2] == ["listIndexes", "createIndexes"]


@only_async
async def test_a_record_cancelled_as_it_looks_for_the_index_holds_up_no_other(scene: Scene) -> None:
    name = app_name()
    client = scene.client(appName=name)
    await scene.cancel_held(name, "listIndexes", scene.deliver(on_order, client))
    await scene.deliver(on_order, client, key=replace(KEY, position=1))
    assert len(scene.documents()) == len(scene.markers()) == 1
    assert life(scene) == [QUICK.marker_ttl_s]


async def test_an_index_without_expiry_is_no_reason_to_stop(scene: Scene) -> None:
    scene.there[MARKERS].create_index("at")
    await scene.deliver(on_order)
    await scene.deliver(on_order)
    assert len(scene.documents()) == len(scene.markers()) == 1


# users with few rights


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    """A replica set that asks for a password; its root is root:root."""
    key_file = Path(tmp_path_factory.mktemp("auth")) / "key"
    key_file.write_text(secrets.token_hex(32))
    key_file.chmod(0o600)
    with Mongod(extra_args=["--auth", "--keyFile", str(key_file)]) as server:
        with MongoClient[dict[str, Any]](server.uri) as client:
            client.admin.command("createUser", "root", pwd="root", roles=["root"])
        yield server


@pytest.fixture
def root(guarded_server: Mongod) -> Iterator[RawClient]:
    with MongoClient[dict[str, Any]](guarded_server.uri, username="root", password="root") as client:
        yield client


def user_with(root: RawClient, database: str, *rights: str) -> dict[str, str]:
    """Make a user with some rights on all collections of a database; return what logs in."""
    name = random_name("user")
    privilege = {"resource": {"db": database, "collection": ""}, "actions": list(rights)}
    root[database].command("createRole", name, privileges=[privilege], roles=[])
    root[database].command("createUser", name, pwd="pwd", roles=[name])
    return {"username": name, "password": "pwd", "authSource": database}


@pytest.mark.parametrize("more", [(), ("listIndexes",)], ids=["", "listIndexes"])
async def test_a_user_who_may_not_make_the_index_is_told_what_to_do_until_an_admin_has_made_it(
    api: Api, guarded_server: Mongod, root: RawClient, more: tuple[str, ...]
) -> None:
    name = random_name("test")
    root[name].create_collection("c")
    recovered: list[Failure] = []
    login: dict[str, Any] = user_with(root, name, *RIGHTS, *more)
    client = api.client(guarded_server.uri, settings=quick(marker_database=name), **login)
    handle = api.handler(key=KEY, guarantee="transaction", client=client, recoverer=recovered.append)(on_order)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="may not make the TTL index of .*saferetry_records: grant createIndex"):
            await done(handle(client[name]))
    assert root[name].c.count_documents({}) == root[name][MARKERS].count_documents({}) == len(recovered) == 0
    root[name][MARKERS].create_index("at", expireAfterSeconds=604_800, name="saferetry_ttl")
    for _ in range(2):
        await done(handle(client[name]))
    assert root[name].c.count_documents({}) == root[name][MARKERS].count_documents({}) == 1


async def test_a_user_with_the_right_to_make_indexes_needs_no_admin(api: Api, guarded_server: Mongod, root: RawClient) -> None:
    name = random_name("test")
    root[name].create_collection("c")
    login: dict[str, Any] = user_with(root, name, *RIGHTS, "listIndexes", "createIndex")
    client = api.client(guarded_server.uri, settings=quick(marker_database=name), **login)
    handle = api.handler(key=KEY, guarantee="transaction", client=client)(on_order)
    for _ in range(2):
        await done(handle(client[name]))
    assert root[name].c.count_documents({}) == 1


async def test_a_user_of_the_built_in_role_needs_no_admin(api: Api, guarded_server: Mongod, root: RawClient) -> None:
    name = random_name("test")
    root[name].command("createUser", "app", pwd="pwd", roles=["readWrite"])
    client = api.client(
        guarded_server.uri, settings=quick(marker_database=name), username="app", password="pwd", authSource=name
    )
    handle = api.handler(key=KEY, guarantee="transaction", client=client)(on_order)
    for _ in range(2):
        await done(handle(client[name]))
    assert root[name].c.count_documents({}) == 1


async def test_a_user_who_may_not_write_is_told_by_the_server_and_the_record_fails(
    api: Api, guarded_server: Mongod, root: RawClient
) -> None:
    name = random_name("test")
    root[name].create_collection("c")
    root[name][MARKERS].create_index("at", expireAfterSeconds=604_800)
    recovered: list[Failure] = []
    login: dict[str, Any] = user_with(root, name, "find", "listIndexes")
    client = api.client(guarded_server.uri, settings=quick(marker_database=name), **login)
    handle = api.handler(key=KEY, guarantee="transaction", client=client, recoverer=recovered.append)(on_order)
    await done(handle(client[name]))
    assert [getattr(failure.exception, "code", None) for failure in recovered] == [13]
    assert [failure.execution for failure in recovered] == [1]
