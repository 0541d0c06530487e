"""A guarded mongomock client is a mongomock client to all who ask, and guarded at every level."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mongomock
import pymongo
import pytest
from gridfs import GridFS
from mongomock.gridfs import enable_gridfs_integration
from pymongo.errors import AutoReconnect, DuplicateKeyError

import saferetry
from saferetry import Outcome, Settings, handler, record, testing, wrap
from saferetry._methods import GUARDED
from saferetry.errors import ConfigurationError, DriverMismatchError, TakenOverError, UnprotectedWriteError
from tests.support.driving import QUICK, quick


@pytest.fixture
def client() -> Any:
    return testing.mock_client(settings=QUICK)


def levels(client: Any) -> dict[str, Any]:
    """Return guarded objects of all kinds by how they were come by."""
    database = client["db"]
    return {
        "client": client,
        "client[]": database,
        "client.": client.db,
        "get_database": client.get_database("db"),
        "get_default_database": client.get_default_database(),
        "database.with_options": database.with_options(),
        "collection.database": database["c"].database,
        "database.client": database.client,
        "database[]": database["c"],
        "database.": database.c,
        "get_collection": database.get_collection("c"),
        "create_collection": database.create_collection("made"),
        "collection[]": database["c"]["sub"],
        "collection.": database.c.sub,
        "with_options": database.c.with_options(write_concern=pymongo.WriteConcern(w=1)),
    }


@pytest.mark.parametrize("way", levels(testing.mock_client()))
def test_whatever_a_guarded_client_makes_is_guarded_and_one_of_mongomocks(client: Any, way: str) -> None:
    made = levels(client)[way]
    assert type(made).__module__ == "saferetry._foreign"
    assert isinstance(made, mongomock.MongoClient | mongomock.Database | mongomock.Collection)
    assert made == made.__wrapped__
    assert hash(made) == hash(made.__wrapped__)
    assert repr(made) == repr(made.__wrapped__)
    assert not isinstance(made, pymongo.MongoClient)


@pytest.mark.parametrize(
    ("place", "mock_type"), [(0, mongomock.MongoClient), (1, mongomock.Database), (2, mongomock.Collection)]
)
def test_every_method_of_the_table_that_mongomock_has_is_guarded(client: Any, place: int, mock_type: Any) -> None:
    made = (client, client.db, client.db.c)[place]
    names = {name for name in GUARDED[place] if name in vars(mock_type)}
    assert names
    assert names <= set(vars(type(made)))


def test_what_belongs_together_is_the_same(client: Any) -> None:
    assert client.db.client is client
    assert client.db.c.database.client is client
    assert client.db.c.with_options() == client.db.c
    with client as entered:
        assert entered is client


def test_a_guarded_client_is_not_guarded_again(client: Any) -> None:
    assert wrap(client) is client
    assert wrap(client, QUICK) is client
    with pytest.raises(ConfigurationError, match="guarded already"):
        wrap(client, Settings(max_attempts=9))


def test_what_mongomock_does_not_know_it_still_refuses(client: Any) -> None:
    with pytest.raises(TypeError, match="comment"):
        client.db.c.insert_one({}, comment="x")
    with pytest.raises(NotImplementedError, match="sessions"):
        client.start_session()
    with record("r"), pytest.raises(NotImplementedError, match="sessions"):
        client.db.c.insert_one({}, session=object())
    with record("r"), pytest.raises(NotImplementedError):
        client.db.command("buildInfo")
    with pytest.raises(TypeError, match="not callable"):
        client.db.c.no_such_method()


def test_databases_and_collections_are_dropped_by_name_or_object(client: Any) -> None:
    client.db.c.insert_one({})
    client.db.drop_collection(client.db.c)
    assert client.db.list_collection_names() == []
    client.db.c.insert_one({})
    client.drop_database(client.db)
    assert client.list_database_names() == []


def test_the_kill_switch_leaves_plain_mongomock() -> None:
    client = testing.mock_client(settings=Settings(disabled=True, strict=True))
    with record("r") as current:
        client.db.c.insert_one({"_id": 1})
    assert current.writes == ()
    assert client.db.c.find_one() == {"_id": 1}


def test_strict_refuses_a_write_outside_records() -> None:
    client = testing.mock_client(settings=Settings(strict=True))
    with pytest.raises(UnprotectedWriteError, match="outside any record"):
        client.db.c.insert_one({})
    assert client.db.c.count_documents({}) == 0


def test_r64_the_calls_of_a_record_get_no_argument_that_mongomock_refuses(client: Any) -> None:
    plain: Any = mongomock.MongoClient()

    def calls(collection: Any) -> list[Any]:
        return [
            collection.insert_one({"_id": 1, "n": 1}).inserted_id,
            collection.update_one({"_id": 1}, {"$inc": {"n": 1}}).modified_count,
            collection.bulk_write([pymongo.InsertOne({"_id": 2, "n": 5})]).inserted_count,
            collection.find_one_and_update({"_id": 2}, {"$inc": {"n": 1}}),
            collection.distinct("n"),
            collection.delete_one({"_id": 1}).deleted_count,
            collection.count_documents({}),
        ]

    with record(("t", 0, 64)) as current:
        assert calls(client.db.c) == calls(plain.db.c)
    assert {write.outcome for write in current.writes} == {Outcome.APPLIED}


def test_r64_a_redelivery_gives_the_count_of_a_real_server(client: Any) -> None:
    @handler(key=("t", 0, 64), guarantee="transaction", name="r64", client=client, digest=lambda _: b"x")
    def once(_: int) -> None:
        client.db.c.insert_one({})

    @handler(key=("t", 0, 64), name="r64-process")
    def as_plain_pymongo(_: int) -> None:
        client.db.d.insert_one({})

    for _ in range(2):
        once(1)
        as_plain_pymongo(1)
    assert (client.db.c.count_documents({}), client.db.d.count_documents({})) == (1, 2)


# inside mongomock.patch()


@pytest.fixture
def patched() -> Iterator[None]:
    with mongomock.patch(servers=(("here.example.com", 27017), ("there.example.com", 27018))):
        yield


def test_inside_patch_a_client_is_a_guarded_mock_of_the_named_server(patched: None) -> None:
    uri = "mongodb://here.example.com/shop"
    first = saferetry.MongoClient[Any](uri, saferetry=quick(strict=True), tz_aware=True)
    second = saferetry.MongoClient[Any]("here.example.com", 27017)
    elsewhere = saferetry.MongoClient[Any]("there.example.com", 27018)
    assert isinstance(first, mongomock.MongoClient)
    with record("r"):
        first.shop.orders.insert_one({"_id": 1})
    assert second.shop.orders.find_one() == {"_id": 1}
    assert elsewhere.shop.orders.find_one() is None
    assert first.codec_options.tz_aware
    with pytest.raises(UnprotectedWriteError):
        first.shop.orders.insert_one({"_id": 2})
    with pytest.raises(ValueError, match="does not exist"):
        saferetry.MongoClient[Any]("nowhere.example.com")


def test_inside_patch_another_consumer_finds_the_record_done(patched: None) -> None:
    def consumer() -> Callable[[int], int | None]:
        client = saferetry.MongoClient[Any]("mongodb://here.example.com/shop", saferetry=QUICK)

        @handler(key=("t", 0, 1), guarantee="transaction", name="once", client=client, digest=lambda _: b"x", store_result=True)
        def once(number: int) -> int:
            client.shop.orders.insert_one({})
            return number

        return once

    assert (consumer()(1), consumer()(2)) == (1, 1)
    assert saferetry.MongoClient[Any]("here.example.com").shop.orders.count_documents({}) == 1


def test_inside_patch_real_clients_stay_real() -> None:
    with mongomock.patch(on_new="pymongo"):
        client = saferetry.MongoClient[Any]("nowhere.example.com", connect=False)
        with client:
            assert type(client) is saferetry.MongoClient


def test_another_patch_is_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pymongo, "MongoClient", lambda *_: pytest.fail("called"))
    with saferetry.MongoClient[Any](connect=False) as client:
        assert type(client) is saferetry.MongoClient


def test_a_subclass_is_not_patched(patched: None) -> None:
    class OwnClient(saferetry.MongoClient[Any]):
        pass

    with OwnClient("here.example.com", connect=False) as client:
        assert type(client) is OwnClient


# transactions in memory


def transactional(client: Any, name: str, work: Callable[[int], Any], **options: Any) -> Callable[[int], Any]:
    decorate = handler(
        key=lambda number: ("t", 0, number),
        guarantee="transaction",
        name=name,
        client=client,
        digest=lambda _: b"x",
        **options,
    )
    return decorate(work)


def test_others_see_nothing_before_the_commit(client: Any) -> None:
    seen = []

    def work(_: int) -> None:
        client.db.c.insert_one({})
        thread = threading.Thread(target=lambda: seen.append(client.db.c.count_documents({})))
        thread.start()
        thread.join()
        seen.append(client.db.c.count_documents({}))

    transactional(client, "work", work)(1)
    assert seen == [0, 1]
    assert client.db.c.count_documents({}) == 1


def test_what_somebody_else_changed_meanwhile_is_a_conflict_and_executed_again(client: Any) -> None:
    client.db.c.insert_one({"_id": 1, "n": 0})
    runs = []

    def work(_: int) -> None:
        runs.append(client.db.c.find_one({"_id": 1})["n"])
        client.db.c.update_one({"_id": 1}, {"$inc": {"n": 1}})
        if len(runs) == 1:
            thread = threading.Thread(target=lambda: client.db.c.update_one({"_id": 1}, {"$inc": {"n": 10}}))
            thread.start()
            thread.join()

    transactional(client, "work", work)(1)
    assert runs == [0, 10]
    assert client.db.c.find_one() == {"_id": 1, "n": 11}


def test_a_unique_value_that_somebody_else_took_meanwhile_is_a_conflict(client: Any) -> None:
    client.db.c.create_index("n", unique=True)
    runs = []

    def work(_: int) -> None:
        runs.append(1)
        if client.db.c.find_one({"n": 1}) is None:
            client.db.c.insert_one({"n": 1})
        if len(runs) == 1:
            thread = threading.Thread(target=lambda: client.db.c.insert_one({"n": 1}))
            thread.start()
            thread.join()

    transactional(client, "work", work)(1)
    assert len(runs) == 2
    assert client.db.c.count_documents({}) == 1


def test_a_newer_execution_of_a_record_takes_over_from_a_stalled_one(client: Any) -> None:
    stalls, taken_over = threading.Event(), threading.Event()
    ends: list[Any] = []

    def work(number: int) -> str:
        client.db.c.insert_one({})
        if threading.current_thread() is not threading.main_thread():
            stalls.set()
            assert taken_over.wait(30)
        client.db.c.insert_one({})
        return "done"

    stalled = transactional(client, "work", work, store_result=True)
    thread = threading.Thread(target=lambda: ends.append(stalled(1)))
    thread.start()
    assert stalls.wait(30)
    ends.append(transactional(client, "work", work, store_result=True)(1))
    taken_over.set()
    thread.join(30)
    assert ends == ["done", "done"]
    assert client.db.c.count_documents({}) == 2


def test_a_live_rival_that_does_not_commit_in_time_is_told_of(client: Any) -> None:
    testing.faults(client).answer(
        pymongo.errors.OperationFailure("newer", 225, {"ok": 0.0, "code": 225}), "insert_one", collection="c", times=1_000
    )
    with testing.fixed_time(), pytest.raises(TakenOverError):
        transactional(client, "work", lambda _: client.db.c.insert_one({}), budget=1.0)(1)
    assert client.db.c.count_documents({}) == 0


def test_a_cursor_of_a_transaction_reads_its_own_writes(client: Any) -> None:
    def work(_: int) -> list[int]:
        client.db.c.insert_many([{"_id": 2}, {"_id": 1}])
        return [document["_id"] for document in client.db.c.find().sort("_id").limit(5)]

    assert transactional(client, "work", work, store_result=True)(1) == [1, 2]


def test_a_cursor_is_mongomocks_and_knows_its_guarded_collection(client: Any) -> None:
    client.db.c.insert_many([{"_id": place} for place in range(4)])
    cursor: Any = client.db.c.find({})
    assert issubclass(cursor.__class__, mongomock.collection.Cursor)
    assert type(cursor.collection) is type(client.db.c)
    assert cursor.sort("_id", -1).skip(1).limit(2) is cursor
    assert [document["_id"] for document in cursor] == [2, 1]
    assert cursor.clone()[0] == {"_id": 2}
    assert cursor[1:2] is cursor
    assert cursor.distinct("_id") == [0, 1, 2, 3]
    cursor.rewind()
    with cursor as entered:
        assert next(entered) == {"_id": 2}
    with pytest.raises(TypeError):
        len(cursor)


def test_a_cursor_of_a_transaction_is_of_no_use_after_it(client: Any) -> None:
    client.db.c.insert_one({})
    cursors = []
    transactional(client, "work", lambda _: cursors.append(client.db.c.find()))(1)
    with pytest.raises(ConfigurationError, match="execution that this task or thread belongs to is over"):
        next(cursors[0])


def test_a_cursor_of_a_transaction_does_not_go_on_after_an_error(client: Any) -> None:
    client.db.c.insert_one({"_id": 1})
    runs = []

    def work(_: int) -> list[Any]:
        runs.append(1)
        cursor = client.db.c.find()
        try:
            client.db.c.update_one({}, {"$inc": {"n": 1}})
        except AutoReconnect:
            return list(cursor)
        return list(cursor)

    testing.faults(client).lose_reply("update_one")
    assert transactional(client, "work", work, store_result=True)(1) == [{"_id": 1, "n": 1}]
    assert len(runs) == 2


def test_options_of_a_collection_hold_inside(client: Any) -> None:
    aware = client.db.c.with_options(codec_options=client.codec_options.with_options(tz_aware=True))

    def work(_: int) -> Any:
        aware.insert_one({"at": dt.datetime(2024, 1, 2, tzinfo=dt.UTC)})
        return aware.find_one()["at"].tzinfo is not None

    assert transactional(client, "work", work, store_result=True)(1) is True


def test_gridfs_of_mongomock_takes_it(client: Any) -> None:
    enable_gridfs_integration()  # type: ignore[no-untyped-call]  # mongomock's
    files = GridFS(client.db)
    with record("r"):
        name = files.put(b"content")
    assert files.get(name).read() == b"content"


def test_an_insert_whose_reply_was_lost_twice_is_one_document(client: Any) -> None:
    testing.faults(client).lose_reply("insert_one", times=2)
    with record("r") as current:
        client.db.c.insert_one({})
    assert client.db.c.count_documents({}) == 1
    assert (current.writes[0].outcome, current.writes[0].calls) == (Outcome.APPLIED, 3)


def test_outside_records_a_lost_reply_is_the_drivers_error(client: Any) -> None:
    testing.faults(client).lose_reply("insert_one")
    with pytest.raises(AutoReconnect):
        client.db.c.insert_one({"_id": 1})
    with pytest.raises(DuplicateKeyError):
        client.db.c.insert_one({"_id": 1})


# what is loaded, and what is refused


def test_importing_saferetry_does_not_import_mongomock() -> None:
    script = "import sys, saferetry, saferetry.testing; sys.exit('mongomock' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_another_foreign_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="int is not a PyMongo client"):
        wrap(7)
    with pytest.raises(ConfigurationError, match="Database is not a PyMongo client"):
        wrap(mongomock.MongoClient()["db"])


def test_a_mongomock_that_keeps_its_data_elsewhere_is_refused() -> None:
    moved: Any = mongomock.MongoClient()
    del moved._store
    with pytest.raises(DriverMismatchError, match=r"lacks MongoClient\._store"):
        wrap(moved)
