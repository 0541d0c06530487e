"""A database user who may read and write one database and nothing else."""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from saferetry import Failure, Outcome, RecordKey, prepare_gridfs, record
from saferetry.errors import ConfigurationError, TakenOverError
from tests.deployments.conftest import Deployment, on
from tests.support.driving import done

KEY = RecordKey("orders", 0, 7, group="g", digest=b"content")
only_read_write = on("user with readWrite")


def second_user(deployment: Deployment) -> dict[str, Any]:
    """Make another user of the same rights; return what logs in."""
    deployment.there[deployment.database].command("createUser", "other", pwd="pwd", roles=["readWrite"])
    return {"username": "other", "password": "pwd", "authSource": deployment.database}


@only_read_write
async def test_what_ends_unknown_is_cancelled_on_the_server(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    """Sessions of one's own may be killed without any privilege."""
    collection = deployment.collection()
    deployment.proxy.arm(command="update", times=100)
    with caplog.at_level(logging.INFO, "saferetry"), record(KEY) as current, pytest.raises(AutoReconnect):
        await done(collection.update_one({"n": 2}, {"$inc": {"n": 1}}))
    assert [view.outcome for view in current.writes] == [Outcome.UNKNOWN]
    assert deployment.log.sends("killSessions") == 1
    assert not any("could not be stopped" in message for message in caplog.messages)
    assert deployment.documents() == [{"n": 1}, {"n": 3}]


@only_read_write
async def test_gridfs_needs_no_further_rights(deployment: Deployment) -> None:
    await done(prepare_gridfs(deployment.client()[deployment.database]))
    indexes = deployment.there[deployment.database].fs.chunks.index_information()
    assert [("files_id", 1), ("n", 1)] in [index["key"] for index in indexes.values()]


@pytest.mark.parametrize("command", ["insert", "update"])
@only_read_write
async def test_a_write_to_another_database_is_the_servers_refusal_and_no_effect(deployment: Deployment, command: str) -> None:
    other = deployment.client()[deployment.database + "_other"].c
    with record(KEY) as current, pytest.raises(OperationFailure, match="not authorized") as caught:
        await done(other.insert_one({}) if command == "insert" else other.update_many({}, {"$inc": {"n": 1}}))
    assert caught.value.code == 13
    assert [(view.outcome, view.sends) for view in current.writes] == [(Outcome.NOT_APPLIED, 1)]
    assert current.effect() == ""


@only_read_write
async def test_markers_in_a_database_without_rights_are_refused_with_the_rights_that_are_missing(
    deployment: Deployment,
) -> None:
    settings = deployment.with_markers()
    client = deployment.client(type(settings)(marker_database=deployment.database + "_other"))

    @deployment.api.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
    async def on_order(order: int) -> None:
        raise AssertionError("it must not run")

    with pytest.raises(ConfigurationError, match="may not make the TTL index"):
        await done(on_order(7))
    assert deployment.documents() == [{"n": 1}, {"n": 2}]


@only_read_write
async def test_a_record_delivered_again_to_another_user_is_done_once(deployment: Deployment) -> None:
    logins: list[dict[str, Any]] = [{}, second_user(deployment)]
    for login in logins:
        options = {**deployment.options, **login}
        client = deployment.api.client(deployment.proxy.uri(), settings=deployment.with_markers(), **options)

        @deployment.api.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
        async def on_order(order: int, client: Any = client) -> None:
            await done(deployment.of(client).update_many({}, {"$inc": {"n": 1}}))

        await done(on_order(7))
    assert deployment.documents() == [{"n": 2}, {"n": 3}]


@only_read_write
async def test_a_record_that_another_user_is_at_cannot_be_taken_over_but_is_not_done_twice(deployment: Deployment) -> None:
    """The server's sessions belong to a user: docs/limits.md asks for one user for each consumer group."""
    other = second_user(deployment)
    ends: list[str] = []
    recovered: list[Failure] = []

    def handler(client: Any, budget: float, meanwhile: Any = None) -> Any:
        @deployment.api.handler(
            key=KEY, guarantee="transaction", client=client, name="on_order", budget=budget, recoverer=recovered.append
        )
        async def on_order(order: int) -> None:
            await done(deployment.of(client).update_many({}, {"$inc": {"n": 1}}))
            if meanwhile is not None:
                await done(meanwhile())

        return on_order

    options = {**deployment.options, **other}
    rival = handler(deployment.api.client(deployment.proxy.uri(), settings=deployment.with_markers(), **options), 0.5)

    def from_elsewhere() -> Any:
        if deployment.api.is_async:
            return asyncio.create_task(noted_async(), context=Context())
        return Context().run(noted)

    def noted() -> None:
        try:
            rival(7)
        except TakenOverError as exc:
            ends.append(type(exc).__name__)

    async def noted_async() -> None:
        try:
            await rival(7)
        except TakenOverError as exc:
            ends.append(type(exc).__name__)

    client = deployment.client(deployment.with_markers())
    await done(handler(client, 20.0, from_elsewhere)(7))
    assert (ends, recovered) == (["TakenOverError"], [])
    assert deployment.documents() == [{"n": 2}, {"n": 3}]
    await done(rival(7))
    assert deployment.documents() == [{"n": 2}, {"n": 3}]
