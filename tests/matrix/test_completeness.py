"""The table of guarded methods against the driver's classes: what sends a write is in it, and nothing comes past it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import gridfs
import pymongo
import pytest
from bson.dbref import DBRef
from pymongo import InsertOne, UpdateOne
from pymongo.asynchronous.change_stream import AsyncChangeStream
from pymongo.asynchronous.command_cursor import AsyncCommandCursor
from pymongo.asynchronous.cursor import AsyncCursor
from pymongo.change_stream import ChangeStream
from pymongo.command_cursor import CommandCursor
from pymongo.cursor import Cursor
from pymongo.errors import PyMongoError
from pymongo.operations import IndexModel, SearchIndexModel
from pymongo.write_concern import WriteConcern

import saferetry
from saferetry._collections import AsyncCollection, AsyncDatabase, Collection, Database
from saferetry._methods import GUARDED, Kind
from saferetry._seam import ASYNC_DRIVER_TYPES, DRIVER_TYPES
from tests.support import CommandLog, Mongod, Proxy, random_name
from tests.support.driving import Api, done

MERGE = [{"$match": {"n": 1}}, {"$merge": {"into": "copy"}}]
SEARCH_DEFINITION = {"mappings": {"dynamic": True}}
SEARCH = {"definition": SEARCH_DEFINITION, "name": "search"}

# Each method once, with arguments that make it write if it can. A sample gets the client, the database or the collection.
SAMPLES: tuple[Mapping[str, Callable[[Any], Any]], ...] = (
    {
        "bulk_write": lambda client: client.bulk_write([InsertOne({"x": 1}, namespace="database.c")]),
        "drop_database": lambda client: client.drop_database("completeness_dropped"),
        "list_database_names": lambda client: client.list_database_names(),
        "list_databases": lambda client: client.list_databases(),
        "server_info": lambda client: client.server_info(),
        "watch": lambda client: client.watch(max_await_time_ms=1),
    },
    {
        "aggregate": lambda database: database.aggregate([{"$listLocalSessions": {}}, {"$merge": {"into": "copy"}}]),
        "command": lambda database: database.command("insert", "c", documents=[{"x": 1}]),
        "create_collection": lambda database: database.create_collection("made"),
        "cursor_command": lambda database: database.cursor_command("aggregate", "c", pipeline=MERGE, cursor={}),
        "dereference": lambda database: database.dereference(DBRef("c", 1)),
        "drop_collection": lambda database: database.drop_collection("c"),
        "list_collection_names": lambda database: database.list_collection_names(),
        "list_collections": lambda database: database.list_collections(),
        "validate_collection": lambda database: database.validate_collection("c"),
        "watch": lambda database: database.watch(max_await_time_ms=1),
    },
    {
        "aggregate": lambda c: c.aggregate(MERGE),
        "aggregate_raw_batches": lambda c: c.aggregate_raw_batches(MERGE),
        "bulk_write": lambda c: c.bulk_write([InsertOne({"x": 1}), UpdateOne({"_id": 1}, {"$inc": {"n": 1}})]),
        "count_documents": lambda c: c.count_documents({}),
        "create_index": lambda c: c.create_index("n"),
        "create_indexes": lambda c: c.create_indexes([IndexModel("n")]),
        "create_search_index": lambda c: c.create_search_index(SEARCH),
        "create_search_indexes": lambda c: c.create_search_indexes([SearchIndexModel(SEARCH_DEFINITION, name="search")]),
        "delete_many": lambda c: c.delete_many({}),
        "delete_one": lambda c: c.delete_one({}),
        "distinct": lambda c: c.distinct("n"),
        "drop": lambda c: c.drop(),
        "drop_index": lambda c: c.drop_index("n_1"),
        "drop_indexes": lambda c: c.drop_indexes(),
        "drop_search_index": lambda c: c.drop_search_index("search"),
        "estimated_document_count": lambda c: c.estimated_document_count(),
        "find": lambda c: c.find(),
        "find_one": lambda c: c.find_one({}),
        "find_one_and_delete": lambda c: c.find_one_and_delete({}),
        "find_one_and_replace": lambda c: c.find_one_and_replace({}, {"x": 1}),
        "find_one_and_update": lambda c: c.find_one_and_update({}, {"$inc": {"n": 1}}),
        "find_raw_batches": lambda c: c.find_raw_batches(),
        "index_information": lambda c: c.index_information(),
        "insert_many": lambda c: c.insert_many([{"x": 1}]),
        "insert_one": lambda c: c.insert_one({"x": 1}),
        "list_indexes": lambda c: c.list_indexes(),
        "list_search_indexes": lambda c: c.list_search_indexes(),
        "options": lambda c: c.options(),
        "rename": lambda c: c.rename("renamed"),
        "replace_one": lambda c: c.replace_one({}, {"x": 1}),
        "update_many": lambda c: c.update_many({}, {"$inc": {"n": 1}}),
        "update_one": lambda c: c.update_one({}, {"$inc": {"n": 1}}),
        "update_search_index": lambda c: c.update_search_index("search", SEARCH_DEFINITION),
        "watch": lambda c: c.watch(max_await_time_ms=1),
    },
)
# And those without a sample, with the reason.
NO_SAMPLE: Mapping[str, str] = {
    "aclose": "close under another name",
    "aconnect": "connects, nothing else",
    "append_metadata": "a name for the next handshakes",
    "close": "ends the client; its endSessions writes no data",
    "eq_props": "what equality compares",
    "get_collection": "returns an object",
    "get_database": "returns an object",
    "get_default_database": "returns an object",
    "next": "says that this is no iterator",
    "start_session": "returns an object; what runs on it goes through the methods above",
    "with_options": "returns an object",
}
# Guarded, but no server up to 6.0 shows what they send.
UNSEEN = {"bulk_write of MongoClient": "needs server 8.0; the driver refuses before it sends"}
READS = (None, Kind.READ, Kind.CURSOR, Kind.METADATA, Kind.APART)
READ_COMMANDS = frozenset(
    {"aggregate", "buildInfo", "buildinfo", "count", "distinct", "endSessions", "find", "getMore", "hello", "killCursors"}
    | {"killSessions", "listCollections", "listDatabases", "listIndexes", "ping", "validate"}
)
CELLS = [
    pytest.param(place, name, id=f"{DRIVER_TYPES[place].__name__}.{name}") for place in range(3) for name in SAMPLES[place]
]


def writes(commands: list[dict[str, Any]]) -> list[str]:
    """Return the names of the commands that change something; one that is not known to read is taken to."""
    return [name for command in commands if (name := next(iter(command))) not in READ_COMMANDS or _merges(command)]


def _merges(command: Mapping[str, Any]) -> bool:
    last = (command.get("pipeline") or [{}])[-1]
    return "$out" in last or "$merge" in last


async def exhaust(value: Any) -> Any:
    """Await what must be, and read a cursor to its end, so that all its commands are sent."""
    answer = await done(value)
    if isinstance(answer, (ChangeStream, AsyncChangeStream)):
        await done(answer.close())
    elif isinstance(answer, (AsyncCursor, AsyncCommandCursor)):
        [document async for document in answer]
    elif isinstance(answer, (Cursor, CommandCursor)):
        list(answer)
    return answer


@pytest.fixture
def plain(api: Api, mongod: Mongod, log: CommandLog) -> Any:
    """A plain client of the driver, whose commands are in `log`."""
    return api.raw_client(mongod.uri, log=log)


@pytest.mark.parametrize("types", [DRIVER_TYPES, ASYNC_DRIVER_TYPES], ids=["sync", "async"])
def test_every_public_method_has_a_sample_or_a_reason(types: tuple[type[Any], ...]) -> None:
    missing, stale = [], []
    for driver_type, samples in zip(types, SAMPLES, strict=True):
        public = {name for name in dir(driver_type) if not name.startswith("_") and callable(getattr(driver_type, name))}
        missing += [f"{driver_type.__name__}.{name}" for name in sorted(public - samples.keys() - NO_SAMPLE.keys())]
        if pymongo.version_tuple >= (4, 20):  # an older driver has fewer
            stale += [f"{driver_type.__name__}.{name}" for name in sorted(samples.keys() - public)]
    assert not missing, "give a sample or a reason, and look whether it belongs into saferetry._methods"
    assert not stale


@pytest.mark.parametrize(("place", "name"), CELLS)
async def test_what_sends_a_write_is_guarded(place: int, name: str, plain: Any, log: CommandLog) -> None:
    if not callable(getattr(DRIVER_TYPES[place], name, None)):
        assert pymongo.version_tuple < (4, 20)
        return
    database = plain[random_name("test")]
    await done(database.c.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": 2}]))
    log.clear()
    failed = False
    try:
        await exhaust(SAMPLES[place][name]((plain, database, database.c)[place]))
    except (PyMongoError, NotImplementedError):
        failed = True  # a server without search indexes, say: the command was sent all the same
    commands = log.commands()
    sent = writes(commands)
    for left in await done(database.list_collection_names()):
        await done(database.drop_collection(left))

    kind = GUARDED[place].get(name)
    if f"{name} of {DRIVER_TYPES[place].__name__}" in UNSEEN:
        assert failed
        assert not commands
        return
    assert commands, "a sample that sends nothing shows nothing"
    if sent:
        assert kind not in READS, f"{name} sends {sent} and is not guarded"
    else:
        assert kind in READS, f"{name} is guarded as a write and its sample sends none"


@pytest.mark.parametrize("types", [DRIVER_TYPES, ASYNC_DRIVER_TYPES], ids=["sync", "async"])
def test_the_table_names_methods_that_there_are(types: tuple[type[Any], ...]) -> None:
    """A name misspelt in the table would guard nothing."""
    for driver_type, table, samples in zip(types, GUARDED, SAMPLES, strict=True):
        assert table.keys() <= samples.keys()
        assert all(hasattr(driver_type, name) for name in table) or pymongo.version_tuple < (4, 20)


# --- databases and collections ---------------------------------------------------------------------------------------------


class UsersClient(pymongo.MongoClient[dict[str, Any]]):
    """A user's own subclass."""


class UsersAsyncClient(pymongo.AsyncMongoClient[dict[str, Any]]):
    """A user's own subclass."""


@pytest.fixture(params=["new", "wrapped", "wrapped_subclass"])
async def any_guarded(request: pytest.FixtureRequest, api: Api, mongod: Mongod) -> AsyncIterator[Any]:
    """A guarded client, made in each of the ways there are."""
    uri = mongod.uri.replace("/?", "/default_database?")
    if request.param == "new":
        client = api.client(uri)
    elif request.param == "wrapped":
        client = saferetry.wrap(api.raw_client(uri))
    else:
        client = saferetry.wrap((UsersAsyncClient if api.is_async else UsersClient)(uri))
    yield client
    await done(client.close())


WAYS_TO_A_DATABASE: Mapping[str, Callable[[Any], Any]] = {
    "client[...]": lambda client: client["d"],
    "client.d": lambda client: client.d,
    "get_database": lambda client: client.get_database("d"),
    "get_database()": lambda client: client.get_database(),
    "get_database with options": lambda client: client.get_database("d", write_concern=WriteConcern(w="majority")),
    "get_default_database": lambda client: client.get_default_database("other"),
    "with_options": lambda client: client.d.with_options(write_concern=WriteConcern(w="majority")),
    "with_options twice": lambda client: client.d.with_options().with_options(),
    "collection.database": lambda client: client.d.c.database,
    "collection.with_options.database": lambda client: client.d.c.with_options().database,
    "sub-collection.database": lambda client: client.d.c.sub.database,
}
WAYS_TO_A_COLLECTION: Mapping[str, Callable[[Any], Any]] = {
    "database[...]": lambda client: client.d["c"],
    "database.c": lambda client: client.d.c,
    "get_collection": lambda client: client.d.get_collection("c"),
    "get_collection with options": lambda client: client.d.get_collection("c", write_concern=WriteConcern(w="majority")),
    "with_options": lambda client: client.d.c.with_options(write_concern=WriteConcern(w="majority")),
    "with_options of the database": lambda client: client.d.with_options().c,
    "c.sub": lambda client: client.d.c.sub,
    "c[...]": lambda client: client.d.c["sub"],
    "c.sub.sub": lambda client: client.d.c.sub.sub.with_options(),
    "cursor.collection": lambda client: client.d.c.find().collection,
}


@pytest.mark.parametrize("way", WAYS_TO_A_DATABASE)
async def test_every_way_to_a_database_gives_a_guarded_one(way: str, any_guarded: Any) -> None:
    for scope in (False, True):
        if scope:
            with saferetry.record():
                database = WAYS_TO_A_DATABASE[way](any_guarded)
        else:
            database = WAYS_TO_A_DATABASE[way](any_guarded)
        assert isinstance(database, (Database, AsyncDatabase))
        assert database.client is any_guarded
        assert isinstance(database.c, (Collection, AsyncCollection))
        assert database == any_guarded[database.name]


@pytest.mark.parametrize("way", WAYS_TO_A_COLLECTION)
async def test_every_way_to_a_collection_gives_a_guarded_one(way: str, any_guarded: Any) -> None:
    collection = WAYS_TO_A_COLLECTION[way](any_guarded)
    assert isinstance(collection, (Collection, AsyncCollection))
    assert isinstance(collection.database, (Database, AsyncDatabase))
    assert collection.database.client is any_guarded
    assert collection == any_guarded.d[collection.name]


@pytest.mark.parametrize("inside", [True, False], ids=["in a record", "outside"])
async def test_create_collection_gives_a_guarded_one(inside: bool, any_guarded: Any) -> None:
    database = any_guarded[random_name("test")]
    if inside:
        async with saferetry.record():
            collection = await done(database.create_collection("made"))
    else:
        collection = await done(database.create_collection("made"))

    assert isinstance(collection, (Collection, AsyncCollection))
    assert collection.database.client is any_guarded
    await done(collection.drop())


@pytest.fixture
def bucket(api: Api, guarded: Any, proxy: Callable[..., Proxy], database_name: str) -> Any:
    """A GridFS bucket behind a proxy that loses the replies of the insert into its files twice."""
    losing = proxy(b"fs.files\0", mode="close", times=2, command="insert")
    bucket_type = gridfs.AsyncGridFSBucket if api.is_async else gridfs.GridFSBucket
    return bucket_type(guarded(losing.uri())[database_name])


async def test_gridfs_goes_through_guarded_objects(bucket: Any, admin: Any, log: CommandLog, database_name: str) -> None:
    async with saferetry.record() as record:
        await done(bucket.upload_from_stream("name", b"content"))

    assert [file["filename"] for file in admin[database_name].fs.files.find()] == ["name"]
    assert admin[database_name].fs.chunks.count_documents({}) == 1
    assert {view.method for view in record.writes} == {"create_index", "insert_many", "insert_one"}
    assert [command["insert"] for command in log.commands("insert")].count("fs.files") == 3
