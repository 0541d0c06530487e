"""GridFS buckets prepared for handlers with guarantee "transaction"."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, overload

from pymongo.asynchronous.database import AsyncDatabase
from pymongo.database import Database

from saferetry._seam import is_async_database

_INDEXES = (("files", [("filename", 1), ("uploadDate", 1)], False), ("chunks", [("files_id", 1), ("n", 1)], True))


@overload
def prepare_gridfs(database: Database[Any], bucket: str = "fs") -> None: ...


@overload
def prepare_gridfs(database: AsyncDatabase[Any], bucket: str = "fs") -> Coroutine[Any, Any, None]: ...


def prepare_gridfs(database: Any, bucket: str = "fs") -> Any:
    """Make the indexes of a GridFS bucket, which GridFS itself would make with the first file: not allowed in a transaction.

    Args:
        database: A database of a guarded client; called outside records.
        bucket: The bucket's name.

    Returns:
        None; a coroutine for a database of an AsyncMongoClient.

    Example:
        >>> from saferetry import MongoClient
        >>> client = MongoClient("mongodb://localhost:27017/shop?replicaSet=rs0&socketTimeoutMS=10000")
        >>> prepare_gridfs(client.shop)
    """
    if is_async_database(database):
        return _prepare_async(database, bucket)
    for name, keys, unique in _INDEXES:
        database[f"{bucket}.{name}"].create_index(keys, unique=unique)
    return None


async def _prepare_async(database: Any, bucket: str) -> None:
    for name, keys, unique in _INDEXES:
        await database[f"{bucket}.{name}"].create_index(keys, unique=unique)
