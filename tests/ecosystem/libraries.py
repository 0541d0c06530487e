"""Real libraries over PyMongo: how each is given a client, and a piece of work that goes through its own save calls.

Each is opened on a database, with plain PyMongo or with saferetry in its place, in the way that docs/ecosystem.md shows. The
work of each writes, changes what it wrote where the library has a call for that, and returns what the library read back.
"""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import beanie
import celery
import celery.backends.mongodb
import flask
import flask_pymongo
import gridfs
import mongoengine
import pyarrow as pa
import pymongo
import pymongoarrow.api
from apscheduler.jobstores.mongodb import MongoDBJobStore
from apscheduler.schedulers.background import BackgroundScheduler

import saferetry
from saferetry import Settings, prepare_gridfs, record
from tests.support.driving import OPTIONS, QUICK, done

CONTENT = bytes(range(256)) * 1_200  # two chunks
LATER = dt.datetime(2099, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Connection:
    """Say what a library is to connect to, and with what."""

    uri: str  # without a database
    database: str
    is_guarded: bool = True
    settings: Settings = QUICK
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def uri_of_database(self) -> str:
        """The URI with the database in it."""
        return self.uri.replace("/?", f"/{self.database}?")

    @property
    def arguments(self) -> dict[str, Any]:
        """The options of a client of either kind; a guarded one has its settings."""
        own = {name: value for name, value in OPTIONS.items() if name not in self.uri} | self.options
        return {**own, "saferetry": self.settings} if self.is_guarded else own

    def client(self, *, is_async: bool = False) -> Any:
        """Return a client."""
        package: Any = saferetry if self.is_guarded else pymongo
        return (package.AsyncMongoClient if is_async else package.MongoClient)(self.uri, **self.arguments)


@dataclass(frozen=True)
class Opened:
    """Be a library at work on one database."""

    client: Any
    work: Callable[[], Any]  # returns something to await where the library is asyncio's


@dataclass(frozen=True)
class Library:
    """Say how a library is opened, and which commands its work sends.

    Attributes:
        package: Its name on PyPI.
        open: Opens it.
        commands: The names of its write commands.
        many: Of these, those that may change many documents.
        is_async: It works with AsyncMongoClient.
    """

    package: str
    open: Callable[[Connection], AbstractAsyncContextManager[Opened]]
    commands: tuple[str, ...]
    many: tuple[str, ...] = ()
    is_async: bool = False
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.package


class Order(mongoengine.Document):  # type: ignore[misc]  # mongoengine has no types
    """A model of mongoengine."""

    item = mongoengine.StringField(unique=True)
    left = mongoengine.IntField(default=10)
    meta = {"collection": "orders"}  # noqa: RUF012 - mongoengine's way


@asynccontextmanager
async def _mongoengine(connection: Connection) -> AsyncIterator[Opened]:
    kind = {"mongo_client_class": saferetry.MongoClient} if connection.is_guarded else {}
    options = {"uuidRepresentation": "standard", **connection.arguments, **kind}
    client = mongoengine.connect(connection.database, host=connection.uri, **options)
    Order.ensure_indexes()

    def work() -> Any:
        order = Order(item="a").save()
        order.left = 9
        order.save()
        Order.objects(item="a").update_one(inc__left=-1)
        Order(item="b").save()
        Order.objects(item="b").delete()
        return [(found.item, found.left) for found in Order.objects]

    try:
        yield Opened(client, work)
    finally:
        mongoengine.disconnect()


class Parcel(beanie.Document):
    """A model of beanie."""

    item: str
    left: int = 10

    class Settings:
        """Where it is stored."""

        name = "parcels"


@asynccontextmanager
async def _beanie(connection: Connection) -> AsyncIterator[Opened]:
    client = connection.client(is_async=True)
    await beanie.init_beanie(database=client[connection.database], document_models=[Parcel])

    async def work() -> Any:
        parcel = await Parcel(item="a").insert()
        parcel.left = 9
        await parcel.save()
        await Parcel.find_one(Parcel.item == "a").update({"$inc": {"left": -1}})
        await Parcel.insert_many([Parcel(item="b"), Parcel(item="c")])
        await (await Parcel.find(Parcel.item == "b").to_list())[0].delete()
        return sorted([(found.item, found.left) for found in await Parcel.find_all().to_list()])

    try:
        yield Opened(client, work)
    finally:
        await client.close()


@asynccontextmanager
async def _flask(connection: Connection) -> AsyncIterator[Opened]:
    app = flask.Flask("shop")
    arguments = {name: value for name, value in connection.arguments.items() if name != "saferetry"}
    mongo: Any = flask_pymongo.PyMongo(app, connection.uri_of_database, **arguments)
    if connection.is_guarded:
        saferetry.wrap(mongo.cx, connection.settings)
        mongo.db = mongo.cx[connection.database]  # made before the client was guarded
    prepare_gridfs(mongo.db)

    def work() -> Any:
        mongo.db.orders.insert_one({"item": "a", "left": 10})
        mongo.db["orders"].update_one({"item": "a"}, {"$inc": {"left": -1}})
        mongo.save_file("r", io.BytesIO(CONTENT))
        with app.test_request_context():
            sent = mongo.send_file("r")
        sent.direct_passthrough = False
        return mongo.db.orders.find_one_or_404({"item": "a"})["left"], len(sent.get_data())

    try:
        yield Opened(mongo.cx, work)
    finally:
        mongo.cx.close()


@asynccontextmanager
async def _gridfs(connection: Connection) -> AsyncIterator[Opened]:
    client = connection.client()
    prepare_gridfs(client[connection.database])
    files = gridfs.GridFS(client[connection.database])

    def work() -> Any:
        files.put(CONTENT, filename="r")
        files.delete(files.put(CONTENT, filename="gone"))
        (found,) = files.find()
        return files.list(), found.read() == CONTENT

    try:
        yield Opened(client, work)
    finally:
        client.close()


@asynccontextmanager
async def _gridfs_bucket(connection: Connection) -> AsyncIterator[Opened]:
    client = connection.client()
    prepare_gridfs(client[connection.database])
    bucket = gridfs.GridFSBucket(client[connection.database])

    def work() -> Any:
        bucket.rename(bucket.upload_from_stream("r", CONTENT), "s")
        bucket.delete(bucket.upload_from_stream("gone", CONTENT))
        (found,) = bucket.find({})
        return found.filename, bucket.open_download_stream_by_name("s").read() == CONTENT

    try:
        yield Opened(client, work)
    finally:
        client.close()


@asynccontextmanager
async def _async_gridfs(connection: Connection) -> AsyncIterator[Opened]:
    client = connection.client(is_async=True)
    await done(prepare_gridfs(client[connection.database]))
    files = gridfs.AsyncGridFS(client[connection.database])

    async def work() -> Any:
        await files.put(CONTENT, filename="r")
        await files.delete(await files.put(CONTENT, filename="gone"))
        (found,) = [file async for file in files.find()]
        return await files.list(), await found.read() == CONTENT

    try:
        yield Opened(client, work)
    finally:
        await client.close()


@asynccontextmanager
async def _async_gridfs_bucket(connection: Connection) -> AsyncIterator[Opened]:
    client = connection.client(is_async=True)
    await done(prepare_gridfs(client[connection.database]))
    bucket = gridfs.AsyncGridFSBucket(client[connection.database])

    async def work() -> Any:
        await bucket.rename(await bucket.upload_from_stream("r", CONTENT), "s")
        await bucket.delete(await bucket.upload_from_stream("gone", CONTENT))
        (found,) = [file async for file in bucket.find({})]
        return found.filename, await (await bucket.open_download_stream_by_name("s")).read() == CONTENT

    try:
        yield Opened(client, work)
    finally:
        await client.close()


def job() -> None:
    """Be a job that is never run: its time is far off."""


@asynccontextmanager
async def _apscheduler(connection: Connection) -> AsyncIterator[Opened]:
    client = connection.client()
    store = MongoDBJobStore(connection.database, "jobs", client)
    scheduler = BackgroundScheduler(jobstores={"default": store}, timezone=dt.UTC)
    scheduler.start(paused=True)

    def work() -> Any:
        for name in ("a", "b"):
            scheduler.add_job(job, "date", run_date=LATER, id=name)
        scheduler.modify_job("a", name="renamed")
        scheduler.remove_job("b")
        return [(found.id, found.name) for found in scheduler.get_jobs()]

    try:
        yield Opened(client, work)
    finally:
        scheduler.shutdown()  # closes the client


class SafeBackend(celery.backends.mongodb.MongoBackend):  # type: ignore[misc]  # Celery has no types
    """Celery's own backend over a guarded client, each result being stored in a record."""

    settings: ClassVar[Settings] = QUICK

    def _get_connection(self) -> Any:
        return saferetry.wrap(super()._get_connection(), self.settings)

    def _store_result(self, task_id: str, *args: Any, **kwargs: Any) -> Any:
        with record(task_id, name="celery"):
            return super()._store_result(task_id, *args, **kwargs)


@asynccontextmanager
async def _celery(connection: Connection) -> AsyncIterator[Opened]:
    SafeBackend.settings = connection.settings
    backend = f"{__name__}:SafeBackend+" if connection.is_guarded else ""
    options = {name: value for name, value in connection.arguments.items() if name != "saferetry"}
    app = celery.Celery("shop", backend=f"{backend}{connection.uri_of_database}", set_as_current=False)
    app.conf.update(task_store_eager_result=True, mongodb_backend_settings={"options": options})

    @app.task(name="add")  # type: ignore[untyped-decorator]  # Celery has no types
    def add(first: int, second: int) -> int:
        return first + second

    app.backend.collection  # noqa: B018 - its index is made with the first use: not in a transaction

    def work() -> Any:
        add.apply((1, 2), task_id="sum")
        stored = app.backend.get_task_meta("sum")
        return stored["status"], stored["result"]

    try:
        yield Opened(app.backend._get_connection(), work)
    finally:
        app.backend._get_connection().close()
        app.close()


@asynccontextmanager
async def _pymongoarrow(connection: Connection) -> AsyncIterator[Opened]:
    client = connection.client()
    collection = client[connection.database].rows

    def work() -> Any:
        pymongoarrow.api.write(collection, pa.table({"n": list(range(300))}))
        schema = pymongoarrow.api.Schema({"n": pa.int64()})
        found = pymongoarrow.api.find_arrow_all(collection, {"n": {"$gte": 100}}, schema=schema)
        grouped = [{"$group": {"_id": None, "n": {"$sum": "$n"}}}]
        total = pymongoarrow.api.aggregate_arrow_all(collection, grouped, schema=schema)
        return found.num_rows, total.to_pylist()

    try:
        yield Opened(client, work)
    finally:
        client.close()


LIBRARIES = (
    Library("mongoengine", _mongoengine, ("insert", "update", "delete"), many=("delete",)),
    Library("beanie", _beanie, ("insert", "update", "findAndModify", "delete"), is_async=True),
    Library("flask-pymongo", _flask, ("insert", "update")),
    Library("pymongo", _gridfs, ("insert", "delete"), name="GridFS"),
    Library("pymongo", _gridfs_bucket, ("insert", "update", "delete"), name="GridFSBucket"),
    Library("pymongo", _async_gridfs, ("insert", "delete"), is_async=True, name="AsyncGridFS"),
    Library("pymongo", _async_gridfs_bucket, ("insert", "update", "delete"), is_async=True, name="AsyncGridFSBucket"),
    Library("apscheduler", _apscheduler, ("insert", "update", "delete")),
    Library("celery", _celery, ("update",)),
    Library("pymongoarrow", _pymongoarrow, ("insert",)),
)
