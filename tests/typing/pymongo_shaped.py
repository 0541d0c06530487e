"""Code as people write it for PyMongo: checked as it is and with the clients' import swapped, never run.

Both type checkers see an error in each line that says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NotRequired, TypedDict, TypeVar, reveal_type

import pymongo
import pymongo.errors
from bson import ObjectId
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.son import SON
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.client_session import ClientSession
from pymongo.collection import Collection, ReturnDocument
from pymongo.database import Database
from pymongo.monitoring import CommandListener
from pymongo.operations import InsertOne, ReplaceOne, UpdateOne
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

Document = dict[str, Any]
Model = TypeVar("Model", bound=Mapping[str, Any])


class Movie(TypedDict):
    _id: NotRequired[ObjectId]
    name: str
    year: int


class Repository(Generic[Model]):
    """A generic repository over a typed collection."""

    def __init__(self, client: MongoClient[Model], name: str) -> None:
        self.client = client
        self.collection: Collection[Model] = client["app"][name]

    def get(self, key: ObjectId) -> Model | None:
        return self.collection.find_one({"_id": key})

    def newest(self, count: int) -> list[Model]:
        return list(self.collection.find().sort("_id", pymongo.DESCENDING).limit(count))

    @contextmanager
    def transaction(self) -> Generator[ClientSession, None, None]:
        with self.client.start_session() as session, session.start_transaction():
            yield session


class Shop(MongoClient[Document]):
    """A client with methods of its own."""

    @property
    def orders(self) -> Collection[Document]:
        return self["shop"]["orders"]


def connect(uris: Sequence[str], listeners: Sequence[CommandListener] = ()) -> MongoClient[Document]:
    client: MongoClient[Document] = MongoClient(
        list(uris), tz_aware=True, event_listeners=listeners, w="majority", serverSelectionTimeoutMS=1000
    )
    return client


def clients() -> None:
    reveal_type(connect(["mongodb://localhost"]))
    reveal_type(MongoClient("localhost", 27017, document_class=RawBSONDocument))
    reveal_type(MongoClient[Movie]())
    with MongoClient[Movie]() as client:
        reveal_type(client)
        reveal_type(client.app)
        reveal_type(client.app.movies.with_options(write_concern=WriteConcern(1)))
        reveal_type(client.get_database("app", read_preference=ReadPreference.SECONDARY))
        reveal_type(client.get_default_database())
        reveal_type(client.list_database_names())
        reveal_type(client.address)
    shop = Shop()
    reveal_type(shop)
    reveal_type(shop.orders.find_one())
    untyped: MongoClient[Any] = MongoClient()
    reveal_type(untyped.app.movies.find_one())


def calls(client: MongoClient[Document], movies: Collection[Movie]) -> None:
    database: Database[Document] = client.app
    options: CodecOptions[Document] = CodecOptions(tz_aware=True)
    collection = database.get_collection("movies", codec_options=options)
    reveal_type(collection.insert_one({"name": "x"}).inserted_id)
    reveal_type(collection.insert_many([{"name": "x"}], ordered=False).inserted_ids)
    reveal_type(collection.update_one({"name": "x"}, {"$set": {"year": 1}}, upsert=True).upserted_id)
    reveal_type(collection.bulk_write([InsertOne({"a": 1}), UpdateOne({}, {"$inc": {"a": 1}})]).upserted_ids)
    reveal_type(collection.find_one_and_update({}, {"$set": {"a": 1}}, return_document=ReturnDocument.AFTER))
    reveal_type(collection.aggregate([{"$match": {}}]))
    reveal_type(collection.distinct("name"))
    reveal_type(collection.create_index([("name", pymongo.DESCENDING)], unique=True))
    reveal_type(database.command("ping"))
    reveal_type(database.command(SON([("ping", 1)])))
    reveal_type(movies.find({}, {"name": 1})[0])
    reveal_type(movies.bulk_write([ReplaceOne({}, Movie(name="x", year=1))]).matched_count)
    try:
        movies.insert_one(Movie(name="x", year=1))
    except pymongo.errors.DuplicateKeyError as exc:
        reveal_type(exc.details)
    for movie in movies.find():
        reveal_type(movie["year"])


def repositories(client: MongoClient[Movie]) -> None:
    repository = Repository(client, "movies")
    reveal_type(repository)
    reveal_type(repository.get(ObjectId()))
    with repository.transaction() as session:
        reveal_type(session.client)
        repository.collection.delete_many({}, session=session)


async def asynchronous(uri: str) -> AsyncIterator[Document]:
    client: AsyncMongoClient[Document] = AsyncMongoClient(uri, maxPoolSize=5)
    database: AsyncDatabase[Document] = client["app"]
    reveal_type(await database.movies.find_one())
    reveal_type(await database.movies.find().to_list())
    reveal_type(await database.movies.aggregate([]))
    reveal_type(await database.list_collection_names())
    async with AsyncMongoClient[Movie](uri) as typed:
        reveal_type(typed)
        reveal_type(typed["app"]["movies"])
    async with client.start_session() as session, await session.start_transaction():
        await database.movies.insert_one({"a": 1}, session=session)
    async for document in database.movies.find():
        yield document
    await client.close()


def wrong_uses(client: MongoClient[Movie]) -> None:
    client.app.movies.insert_one({"name": 1})  # wrong
    client.app.movies.insert_one(Movie(name="x"))  # wrong
    client.app.movies.update_one({})  # wrong
    client.app.movies.find_one()["year"]  # wrong
    MongoClient[Movie](7)  # wrong
    MongoClient[Movie](document_class=Document)  # wrong
    MongoClient[int]()  # wrong
    number: int = client.app  # wrong
    Repository(client.app, "movies")  # wrong
    del number
