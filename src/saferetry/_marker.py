"""A record's marker: the document that is committed with its effects and says that it is done."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bson.codec_options import DEFAULT_CODEC_OPTIONS
from pymongo.errors import ConfigurationError as NoDefaultDatabase
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference

from saferetry._identity import RecordKey
from saferetry._seam import guard_of, raw_database
from saferetry._settings import Settings
from saferetry.errors import ConfigurationError, KeyReusedError

TTL_INDEX = "saferetry_ttl"
TTL_KEY = "at"
INDEX_MAX_TIME_MS = 500  # a build that waits for a lock makes running transactions fail with LockTimeout
_UNAUTHORIZED = 13


@dataclass(slots=True)
class Marker:
    """Be the marker of one record.

    Attributes:
        database: Where it is.
        collection: Where it is.
        identity: Its ``_id``; an embedded document, since the server takes no array there.
        digest: Hash of the record's digest; None: unchecked.
        namespace: Database and collection.
    """

    database: str
    collection: str
    identity: Mapping[str, Any]
    digest: bytes | None
    namespace: str

    def document(self) -> dict[str, Any]:
        """Return what is inserted."""
        document = {"_id": dict(self.identity), TTL_KEY: dt.datetime.now(dt.UTC)}
        return document if self.digest is None else {**document, "digest": self.digest}

    def check(self, found: Mapping[str, Any]) -> Any:
        """Return the result stored with the marker that was found, or None.

        Raises:
            KeyReusedError: It belongs to a record with another content.
        """
        stored = found.get("digest")
        if self.digest is not None and stored is not None and stored != self.digest:
            name, place = self.identity["name"], [self.identity[part] for part in ("stream", "partition", "position")]
            raise KeyReusedError(
                f"the record {name} ({'/'.join(map(str, place))}) has the key of another one that was done before: a topic was "
                "made anew or offsets were rewound. Give the stream another epoch (kafka_key(group, epoch=...), "
                "RecordKey(epoch=...))"
            )
        return found.get("result")

    @property
    def filter(self) -> dict[str, Any]:
        """What finds it."""
        return {"_id": dict(self.identity)}

    def raw(self, client: Any) -> Any:
        """Return the driver's own collection of markers, past the guarded methods."""
        collections = guard_of(client).marker_collections
        if (made := collections.get(self.namespace)) is None:
            made = collections[self.namespace] = raw_database(client, self.database).get_collection(
                self.collection, codec_options=DEFAULT_CODEC_OPTIONS, read_preference=ReadPreference.PRIMARY
            )
        return made

    def majority(self, client: Any) -> Any:
        """Return it for reads that no failover can take back."""
        return self.raw(client).with_options(read_concern=ReadConcern("majority"))


def marker_of(client: Any, key: RecordKey, name: str, *, digest: bytes) -> Marker:
    """Return a record's marker.

    Raises:
        ConfigurationError: No database is known for it.
    """
    settings = guard_of(client).settings
    database = settings.marker_database or default_database_name(client)
    identity = {
        "group": key.group,
        "stream": key.stream,
        "partition": key.partition,
        "position": key.position,
        "epoch": key.epoch,
        "name": name,
    }
    hashed = hashlib.blake2b(digest, digest_size=32).digest() if digest else None
    collection = settings.marker_collection
    return Marker(database, collection, identity, hashed, f"{database}.{collection}")


def default_database_name(client: Any) -> str:
    """Return the name of the client's default database.

    Raises:
        ConfigurationError: Its URI names none.
    """
    try:
        return str(client.get_default_database().name)
    except NoDefaultDatabase as exc:
        raise ConfigurationError(
            'guarantee "transaction" needs a database for its markers: set marker_database (SAFERETRY_MARKER_DATABASE), or '
            "name a default database in the URI (mongodb://host/DATABASE?...)"
        ) from exc


def life_of(indexes: Mapping[str, Any]) -> float | None:
    """Return the seconds that markers live by an existing index, infinite where it lets none expire; None: there is none."""
    lives = [index.get("expireAfterSeconds", math.inf) for index in indexes.values() if [*dict(index["key"])] == [TTL_KEY]]
    return min(lives, default=None)


def index_question(marker: Marker) -> dict[str, Any]:
    """Return a command that tells a user without the right to list indexes whether there is one."""
    find = {"find": marker.collection, "filter": {}, "hint": {TTL_KEY: 1}}
    return {"explain": find, "verbosity": "queryPlanner"}


def says_index(explanation: Mapping[str, Any]) -> bool:
    """Whether the answer says so; the plan for a collection that is not there has no index."""
    return "IXSCAN" in str(explanation.get("queryPlanner", {}).get("winningPlan"))


def is_unauthorized(exc: PyMongoError) -> bool:
    """Whether the user has no right to something."""
    return getattr(exc, "code", None) == _UNAUTHORIZED


def index_options(settings: Settings) -> dict[str, Any]:
    """Return the options of the index that lets markers expire."""
    return {"expireAfterSeconds": settings.marker_ttl_s, "name": TTL_INDEX, "maxTimeMS": INDEX_MAX_TIME_MS}


def index_refusal(exc: PyMongoError, marker: Marker) -> ConfigurationError | None:
    """Return what a user without the right to make the index is told; None: it may be tried again later."""
    if not is_unauthorized(exc):
        return None
    return ConfigurationError(
        f"the database user may not make the TTL index of {marker.namespace}: grant createIndex (readWrite has it), or make it "
        f"once: createIndex({{{TTL_KEY}: 1}}, {{expireAfterSeconds: ..., name: '{TTL_INDEX}'}})"
    )
