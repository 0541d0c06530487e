"""What is made of a mould is what the driver's constructor would have made, and a new object each time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pymongo
import pytest
from pymongo.errors import InvalidName
from pymongo.read_preferences import ReadPreference

import saferetry
from saferetry import Settings, wrap
from saferetry._addresses import Address, AddressPool
from saferetry._moulds import Mould
from saferetry._seam import (
    TRANSACTION_OPTIONS,
    DriverCall,
    PinnedServerSession,
    begun_as_before,
    open_session,
    remember_begun,
)
from tests.support.driving import done

URI = "mongodb://127.0.0.1:1/?readPreference=secondary&w=2&retryWrites=false"


@pytest.fixture(params=["MongoClient", "AsyncMongoClient"])
async def client(request: pytest.FixtureRequest) -> Any:
    """A guarded client that is not connected."""
    made = getattr(saferetry, request.param)(URI, connect=False, saferetry=Settings())
    yield made
    await done(made.close())


@pytest.fixture
def address() -> Address:
    """An address for one command."""
    return AddressPool().acquire()


def said(thing: Any) -> dict[str, Any]:
    """Return all that a client, a database or a collection holds but what it belongs to and what we put there."""
    kept = {name: value for name, value in vars(thing).items() if not name.startswith("_saferetry")}
    return {name: value for name, value in kept.items() if name not in ("_client", "_database")}


async def test_a_database_and_a_collection_made_again_are_as_the_drivers_own(client: Any) -> None:
    raw = getattr(pymongo, type(client).__name__)(URI, connect=False)
    for _ in range(3):
        database, collection = client.d, client["d"]["c"]
        assert said(database) == said(raw.d)
        assert said(collection) == said(raw.d.c)
        assert (database.client, collection.database) == (client, database)
        assert (type(database), type(collection)) == (type(client["other"]), type(client["other"]["c"]))
    await done(raw.close())


def test_each_is_a_new_object(client: Any) -> None:
    first, second = client.d.c, client.d.c
    assert first == second
    assert first is not second
    first.own = 1
    assert not isinstance(vars(client.d.c).get("own"), int)
    assert first.database.client is client


def test_a_collection_has_the_options_of_its_database(client: Any) -> None:
    database = client.get_database("d", read_preference=ReadPreference.NEAREST)
    for _ in range(2):
        assert database.c.read_preference == ReadPreference.NEAREST
        assert client.d.c.read_preference == ReadPreference.SECONDARY
        assert client.get_database("d").c.read_preference == ReadPreference.SECONDARY


def test_a_name_with_an_underscore_is_an_item_and_no_attribute(client: Any) -> None:
    for _ in range(2):
        assert client["_d"]["_c"].full_name == "_d._c"
        for owner in (client, client.d):
            with pytest.raises(AttributeError, match="_d"):
                _ = owner._d


def test_a_wrong_name_is_refused_by_the_driver_each_time(client: Any) -> None:
    for _ in range(2):
        with pytest.raises(InvalidName):
            client.d[".."]
        with pytest.raises(TypeError, match="str"):
            client.d[["c"]]


def test_of_very_many_names_the_later_ones_are_made_by_the_driver(client: Any) -> None:
    database = client.d
    names = [f"c{number}" for number in range(1_100)]
    assert [database[name].name for name in names * 2] == names * 2
    assert len(database._saferetry_moulds) == 1_000


def test_nothing_that_is_remembered_keeps_a_client() -> None:
    gc.disable()
    try:
        client: Any = saferetry.MongoClient(URI, connect=False, saferetry=Settings())
        for _ in range(2):
            assert client.d.c.name == "c"
        client._ensure_session()
        client.close()
        kept = weakref.ref(client.d)
        del client
        assert kept() is None
    finally:
        gc.enable()


def test_a_wrapped_subclass_of_the_users_makes_its_own() -> None:
    class Client(pymongo.MongoClient[Any]):
        made = 0

        def __getitem__(self, name: str) -> Any:
            self.made += 1
            return super().__getitem__(f"{name}_{self.made}")

    client = wrap(Client(URI, connect=False), Settings())
    assert [client["d"].name, client.d.name, client["d"].name] == ["d_1", "d_2", "d_3"]
    client.close()


def state_of(session: Any) -> dict[str, Any]:
    """Return all that a session holds, its transaction's state included."""
    parts = {**vars(session), "_options": vars(session._options), "_transaction": vars(session._transaction)}
    return {name: value for name, value in parts.items() if name not in ("_saferetry_call", "_server_session")}


async def test_a_session_lent_for_a_command_is_as_the_drivers_own(client: Any, address: Address) -> None:
    lent = []
    for _ in range(3):  # the first of the driver's making
        with DriverCall(client, address=address) as call:
            session = client._ensure_session()
        assert session._server_session.address is address
        assert session._saferetry_call is call
        lent.append(session)
    assert state_of(lent[0]) == state_of(lent[1]) == state_of(lent[2])
    assert len({id(session._transaction) for session in lent}) == 3
    await done(lent[2].end_session())
    await done(lent[2].end_session())
    assert (lent[1]._server_session is None, lent[2]._server_session) == (False, None)


async def test_a_session_for_a_transaction_is_as_the_drivers_own(client: Any, address: Address) -> None:
    assert begun_as_before(client, address, 50) is None
    first = open_session(client, address, 50)
    await done(first.start_transaction(**TRANSACTION_OPTIONS))
    remember_begun(client, first)
    others = [begun_as_before(client, address, 50) for _ in range(2)]
    for session in others:
        assert state_of(session) == state_of(first)
        assert isinstance(session._server_session, PinnedServerSession)
        assert (session._implicit, session.in_transaction) == (False, True)
    await done(first.abort_transaction())  # nothing was sent, nor is now
    assert [session.in_transaction for session in (first, *others)] == [False, True, True]
    assert state_of(begun_as_before(client, address, 50)) == state_of(others[0])
    assert not client._ensure_session().in_transaction


def test_a_mould_refers_to_no_owner(client: Any) -> None:
    mould = Mould(client.d, client)
    assert client not in gc.get_referents(mould, *gc.get_referents(mould))
