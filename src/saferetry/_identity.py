"""What a record and a call are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import bson
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
    digest: bytes = b""

    def __post_init__(self) -> None:
        """Check every part."""
        faults = []
        if not isinstance(self.stream, str) or not self.stream:
            faults.append(f"stream must be text that is not empty, not {type(self.stream).__name__}")
        if not _is_count(self.partition):
            faults.append("partition must be a whole number, 0 or more")
        if self.position is not None and not _is_count(self.position):
            faults.append("position must be a whole number, 0 or more, or None")
        faults.extend(f"{name} must be text" for name in ("group", "epoch") if not isinstance(getattr(self, name), str))
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
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
