"""What a record and a call are known by."""

from __future__ import annotations

import datetime as dt
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import bson
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.collation import Collation
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.operations import IndexModel, SearchIndexModel

from saferetry.errors import ConfigurationError


@dataclass(frozen=True)
class RecordKey:
    """Name one record of a stream: the same key for every execution of it, in any process.

    Args:
        stream: Topic, queue or table; not empty.
        partition: Part of the stream, 0 or more.
        position: Offset in the partition; None where the stream has none.
        group: Consumer group.
        epoch: Generation of the stream, for a recreated topic or a wanted replay.
        timestamp: Time of the record as the broker gives it (milliseconds since 1970).
        digest: Hash of the record's content; empty: unknown.

    Raises:
        ConfigurationError: A part has the wrong type or range.
    """

    stream: str
    partition: int = 0
    position: int | None = None
    group: str = ""
    epoch: str = ""
    timestamp: int | None = None
    digest: bytes = field(default=b"", repr=False)  # a user's own may be the content itself

    def __post_init__(self) -> None:
        """Check every part."""
        faults = []
        if not isinstance(self.stream, str) or not self.stream:
            faults.append(f"stream must be text that is not empty, not {type(self.stream).__name__}")
        for part, number, or_none in (("partition", self.partition, ""), ("position", self.position, ", or None")):
            if number is None and or_none:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                faults.append(f"{part} must be a whole number, 0 or more{or_none}")
        for name, value in (("group", self.group), ("epoch", self.epoch)):
            if not isinstance(value, str):
                faults.append(f"{name} must be text")
        if self.timestamp is not None and (isinstance(self.timestamp, bool) or not isinstance(self.timestamp, int)):
            faults.append("timestamp must be a whole number of milliseconds, or None")
        if not isinstance(self.digest, bytes):
            faults.append("digest must be bytes")
        if faults:
            raise ConfigurationError("record key: " + "; ".join(faults))

    @classmethod
    def of(cls, value: RecordKey | str | tuple[Any, ...]) -> RecordKey:
        """Return ``value`` as a key: a key, a text, or ``(stream, partition, position)``.

        Raises:
            ConfigurationError: Anything else.
        """
        if isinstance(value, RecordKey):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, tuple) and 1 <= len(value) <= 3:  # noqa: PLR2004 - stream, partition, position
            return cls(*value)
        raise ConfigurationError(
            f"record key: got {type(value).__name__}; give a RecordKey, a text, or (stream, partition, position)"
        )

    def hashed(self) -> str:
        """Return 32 hexadecimal digits that stand for this key in tags and logs."""
        parts = (self.group, self.stream, self.partition, self.position, self.epoch)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


class DerivedIds:
    """Make the ``_id`` of a record's inserts from what they are, so that a redelivery makes the same ones.

    An ``_id`` follows from the record's key and the handler's name, the namespace, the document's content (moments since the
    execution began left out, since they differ each time) and how often that content came before in the execution.

    Args:
        key: The record's key.
        name: The handler's name.
        now: Returns the time, with its time zone.
    """

    def __init__(self, key: RecordKey, name: str, now: Callable[[], dt.datetime]) -> None:
        identity = (key.group, key.stream, key.partition, key.position, key.epoch, key.timestamp, key.digest, name)
        self._identity = repr(identity).encode()
        self._now = now
        self._start = now()
        self._seen: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def make(self, namespace: str, document: Mapping[str, Any], codec_options: Any) -> ObjectId:
        """Return the ``_id`` for a document without one; a random one if it has no BSON form."""
        content = canonical({"document": without_moments(document, self._start, self._now())}, codec_options)
        if content is None:
            return ObjectId()
        hashed = hashlib.sha256(b"\0".join((self._identity, namespace.encode(), content))).digest()
        with self._lock:  # threads of one record: two documents with one id would be taken for one
            self._seen[hashed] += 1
            occurrence = self._seen[hashed].to_bytes(8, "big")
        return ObjectId(hashlib.sha256(b"saferetry-1" + hashed + occurrence).digest()[:12])


def without_moments(value: Any, start: dt.datetime, end: dt.datetime) -> Any:
    """Return a value in which moments of an execution, different in each, are replaced by a mark."""
    if isinstance(value, dt.datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
        return "\0now" if start <= moment <= end else value
    if isinstance(value, Mapping) and not isinstance(value, RawBSONDocument):
        return {name: without_moments(item, start, end) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_moments(item, start, end) for item in value]
    return value


def canonical(arguments: Mapping[str, Any], codec_options: Any) -> bytes | None:
    """Return a call's arguments as BSON, to tell whether two calls are equal; None if they have no BSON form."""
    try:
        return bson.encode(_plain(arguments, codec_options), codec_options=codec_options)
    except Exception:  # noqa: BLE001 - whatever the encoder dislikes: such a call has no equal
        return None


def _plain(value: Any, codec_options: Any) -> Any:
    if isinstance(value, RawBSONDocument):
        return value
    if isinstance(value, (Collation, IndexModel, SearchIndexModel)):
        return _plain(value.document, codec_options)
    if isinstance(value, (Collection, AsyncCollection)):
        return value.full_name
    if isinstance(value, (Database, AsyncDatabase)):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(item, codec_options) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, codec_options) for item in value]
    try:
        bson.encode({"": value}, codec_options=codec_options)
    except Exception:  # noqa: BLE001 - options of the driver's, as a WriteConcern: they tell themselves apart
        return f"{type(value).__qualname__} {value!r}"
    return value


def encoded_size(document: Any, codec_options: Any) -> int:
    """Return the size of a document in bytes of BSON.

    Raises:
        bson.errors.InvalidDocument, OverflowError: The document cannot be encoded.
    """
    if isinstance(document, RawBSONDocument):
        return len(document.raw)
    return len(bson.encode(document, codec_options=codec_options))
