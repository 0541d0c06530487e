"""The ways in which a consumer may handle one record, from the weakest promise to the strongest."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pymongo
from pymongo.client_session import ClientSession
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

import saferetry
from saferetry import RecordKey, Settings

Handle = Callable[[int], object]
Effects = Callable[[Any, int, "ClientSession | None"], None]  # database, position, session

OPTIONS: dict[str, Any] = {"w": "majority", "socketTimeoutMS": 20_000, "maxPoolSize": 64}


def on_documents_of_its_own(database: Any, position: int, session: ClientSession | None = None) -> None:
    """Change a document that few other records change, and insert one."""
    own = {"session": session} if session else {}
    database.stock.update_one({"_id": position % 1_000}, {"$inc": {"left": -1}}, **own)
    database.orders.insert_one({"order": position}, **own)


def on_a_hot_document(database: Any, position: int, session: ClientSession | None = None) -> None:
    """Change a document that all records change, and insert one."""
    own = {"session": session} if session else {}
    database.stock.update_one({"_id": 0}, {"$inc": {"left": -1}}, **own)
    database.orders.insert_one({"order": position}, **own)


def on_documents_of(size: int) -> Effects:
    """Return what inserts a document of so many bytes, and changes another."""
    padding = "x" * size

    def effects(database: Any, position: int, session: ClientSession | None = None) -> None:
        own = {"session": session} if session else {}
        database.stock.update_one({"_id": position % 1_000}, {"$inc": {"left": -1}}, **own)
        database.orders.insert_one({"order": position, "padding": padding}, **own)

    return effects


@dataclass(frozen=True)
class Place:
    """Where the records are handled.

    Attributes:
        uri: of the server.
        database: its name.
        effects: what the handler does.
    """

    uri: str
    database: str
    effects: Effects


class Way:
    """Handle records in one way; thread-safe.

    Attributes:
        name: in the report.
        client: its client.
        handle: handles the record at a position; no position twice.
    """

    def __init__(self, name: str, client: Any, handle: Handle) -> None:
        self.name = name
        self.handle = handle
        self.client = client
        self._lock = threading.Lock()
        self._next = 0

    def take(self) -> int:
        """Return the next record's position."""
        with self._lock:
            self._next += 1
            return self._next

    def close(self) -> None:
        """Close its client."""
        self.client.close()


def raw(place: Place) -> Way:
    """Return plain PyMongo: at least once."""
    client = pymongo.MongoClient[dict[str, Any]](place.uri, **OPTIONS)
    database = client[place.database]
    return Way("raw, at least once", client, lambda position: place.effects(database, position, None))


def raw_again(place: Place) -> Way:
    """Return plain PyMongo a second time: how far it is from itself is the noise."""
    way = raw(place)
    way.name = "raw again"
    return way


def inbox_first(place: Place) -> Way:
    """Return plain PyMongo with an inbox: a record whose consumer dies after the inbox insert is lost."""
    client = pymongo.MongoClient[dict[str, Any]](place.uri, **OPTIONS)
    database = client[place.database]

    def handle(position: int) -> None:
        try:
            database.inbox.insert_one(_entry(position))
        except DuplicateKeyError:
            return
        place.effects(database, position, None)

    return Way("inbox first, not atomic", client, handle)


def by_hand(place: Place) -> Way:
    """Return plain PyMongo with a transaction written by hand: inbox and effects are atomic, and the inbox grows for ever."""
    return _by_hand(place, "with_transaction + inbox", _entry)


def by_hand_expiring(place: Place) -> Way:
    """Return the same with an inbox whose entries expire, as saferetry's markers do."""
    way = _by_hand(place, "by hand, expiring inbox", lambda position: {**_entry(position), "at": dt.datetime.now(dt.UTC)})
    way.client[place.database].inbox.create_index("at", expireAfterSeconds=604_800)
    return way


def _by_hand(place: Place, name: str, entry: Callable[[int], dict[str, Any]]) -> Way:
    client = pymongo.MongoClient[dict[str, Any]](place.uri, **OPTIONS)
    database = client[place.database]

    def handle(position: int) -> None:
        def body(session: ClientSession) -> None:
            database.inbox.insert_one(entry(position), session=session)
            place.effects(database, position, session)

        with client.start_session() as session:
            session.with_transaction(body, ReadConcern("snapshot"), WriteConcern("majority"))

    return Way(name, client, handle)


def _entry(position: int) -> dict[str, Any]:
    return {"_id": {"topic": "orders", "partition": 0, "position": position}}


def unscoped(place: Place) -> Way:
    """Return saferetry's client outside any record."""
    client: Any = saferetry.MongoClient(place.uri, saferetry=Settings(), **OPTIONS)
    database = client[place.database]
    return Way("saferetry, no record", client, lambda position: place.effects(database, position, None))


def process(place: Place) -> Way:
    """Return saferetry with guarantee "process"."""
    client: Any = saferetry.MongoClient(place.uri, saferetry=Settings(), **OPTIONS)
    database = client[place.database]

    @saferetry.handler(key=_key, client=client, name="bench")
    def handle(position: int) -> None:
        place.effects(database, position, None)

    return Way('saferetry "process"', client, handle)


def transaction(place: Place) -> Way:
    """Return saferetry with guarantee "transaction"."""
    client: Any = saferetry.MongoClient(place.uri, saferetry=Settings(marker_database=place.database), **OPTIONS)
    database = client[place.database]

    @saferetry.handler(key=_key, guarantee="transaction", client=client, name="bench")
    def handle(position: int) -> None:
        place.effects(database, position, None)

    return Way('saferetry "transaction"', client, handle)


def _key(position: int) -> RecordKey:
    return RecordKey("orders", 0, position, group="bench", digest=b"%d" % position)


Ways = tuple[Callable[[Place], Way], ...]
WAYS: Ways = (raw, inbox_first, by_hand, by_hand_expiring, unscoped, process, transaction)
CALLS: Ways = (raw, raw_again, unscoped, process)
