"""Another user's sessions: knowing their ids is of no use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure

import saferetry
from saferetry import RecordKey
from tests.security.conftest import Place
from tests.support import CommandLog, Mongod, Proxy
from tests.support.driving import QUICK, RawClient, quick

INC = {"$inc": {"n": 1}}
KEY = RecordKey("orders", 0, 7, group="g", digest=b"content")


@pytest.fixture
def other(locked: Mongod, place: Place) -> Iterator[RawClient]:
    """A plain client of another user with the same rights."""
    with MongoClient[dict[str, Any]](locked.uri, **place.user("other", "pwd")) as client:
        yield client


@contextmanager
def pinned(client: RawClient, session_id: Any, number: int) -> Iterator[ClientSession]:
    """Give a session of a plain client with somebody else's id; the driver counts up before it sends."""
    with client.start_session() as session:
        session._materialize()
        server_session: Any = session._server_session
        server_session.session_id, server_session._transaction_id = session_id, Int64(number - 1)
        server_session.mark_dirty()
        yield session


def test_a_write_of_another_user_at_the_same_address_is_another_write(
    locked: Mongod, place: Place, other: RawClient, log: CommandLog
) -> None:
    """It neither swallows ours nor is swallowed by it, before our send and between our send and its resend."""

    def intrude() -> None:
        (command, *_) = log.commands("update")
        with pinned(other, command["lsid"], command["txnNumber"]) as session:
            assert other[place.name].c.update_one({"_id": 1}, INC, session=session).modified_count == 1

    with (
        Proxy(locked.port, command="update", mode="close", times=1, on_hit=intrude) as proxy,
        saferetry.MongoClient[dict[str, Any]](
            proxy.uri(), saferetry=QUICK, event_listeners=[log], **place.user("own", "pwd")
        ) as client,
        saferetry.record(KEY),
    ):
        assert client[place.name].c.update_one({"_id": 1}, INC).modified_count == 1
    assert proxy.hits == 1
    assert log.sends("update") == 2
    assert place.documents() == [{"_id": 1, "n": 2}]


def test_a_transaction_of_another_user_in_the_same_slot_does_not_end_ours(
    locked: Mongod, place: Place, other: RawClient, log: CommandLog
) -> None:
    executions = []
    place.root[place.name].d.insert_one({"_id": 1})
    with saferetry.MongoClient[dict[str, Any]](
        locked.uri, saferetry=quick(marker_database=place.name), event_listeners=[log], **place.user("own", "pwd")
    ) as client:

        @saferetry.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
        def on_order() -> None:
            executions.append(1)
            client[place.name].c.update_one({"_id": 1}, INC)
            (command, *_) = log.commands("update")
            with pinned(other, command["lsid"], command["txnNumber"] + 1_000_000) as session, session.start_transaction():
                other[place.name].d.update_one({"_id": 1}, INC, session=session)
            client[place.name].c.update_one({"_id": 1}, INC)

        on_order()
    assert len(executions) == 1
    assert (place.documents(), place.documents("d")) == ([{"_id": 1, "n": 2}], [{"_id": 1, "n": 1}])


def test_sessions_of_another_user_cannot_be_killed(locked: Mongod, place: Place, other: RawClient, log: CommandLog) -> None:
    executions = []
    with saferetry.MongoClient[dict[str, Any]](
        locked.uri, saferetry=quick(marker_database=place.name), event_listeners=[log], **place.user("own", "pwd")
    ) as client:

        @saferetry.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
        def on_order() -> None:
            executions.append(1)
            client[place.name].c.update_one({"_id": 1}, INC)
            (command, *_) = log.commands("update")
            other.admin.command("killSessions", [command["lsid"]])
            with pytest.raises(OperationFailure, match="not authorized"):
                other.admin.command("killAllSessions", [{"user": "own", "db": place.name}])
            client[place.name].c.update_one({"_id": 1}, INC)

        on_order()
    assert len(executions) == 1
    assert place.documents() == [{"_id": 1, "n": 2}]
