"""Copies of what a mongomock server holds: taken, changed apart, and put back.

Read and run with mongomock 4.3.0. What is used of its private names: ``MongoClient._store`` (as ``mongomock.patch`` does) and
``CollectionStore._documents``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pymongo.errors import DuplicateKeyError

from saferetry.errors import DriverMismatchError

Name = tuple[str, str]  # database and collection


def store_of(client: Any) -> Any:
    """Return what a mongomock client's server holds.

    Raises:
        DriverMismatchError: It is not held in the way that this module knows.
    """
    store = vars(client).get("_store")
    if store is None or "_documents" not in vars(type(store)()["any"]["any"]):
        raise DriverMismatchError("this mongomock lacks MongoClient._store or CollectionStore._documents: install 4.3")
    return store


class Copy:
    """Be a copy of a server's collections that nobody else sees.

    Args:
        client: A mongomock client of the server.
        only: The one collection to copy, without its indexes; None: everything.
    """

    def __init__(self, client: Any, only: Name | None = None) -> None:
        self._origin = store_of(client)
        store = type(self._origin)()
        for name, collection in _collections(self._origin):
            if only in (None, name):
                _copy_into(store[name[0]][name[1]], collection, with_indexes=only is None)
        own_type = next(base for base in type(client).__mro__ if base.__module__.startswith("mongomock"))
        self.client = own_type(tz_aware=client.codec_options.tz_aware, _store=store)
        self._store = store
        self._before = {name: _copied(collection) for name, collection in _collections(store)}

    def place(self, place: Any) -> Any:
        """Return the copy's collection or database for one of the server's."""
        if not hasattr(type(place), "full_name"):
            return self.client.get_database(place.name)
        return self.client.get_database(place.database.name).get_collection(
            place.name,
            codec_options=place.codec_options,
            read_preference=place.read_preference,
            write_concern=place.write_concern,
            read_concern=place.read_concern,
        )

    def put_back(self) -> bool:
        """Change in the server what was changed here; False, and nothing is changed, if it was changed there, too."""
        changes = {name: dict(self._changes(name, collection)) for name, collection in _collections(self._store)}
        if any(self._collides(name, changed) for name, changed in changes.items()):
            return False
        for (database, name), changed in changes.items():
            target = self._origin[database][name]
            for key, document in changed.items():
                if document is not None:
                    target[key] = document
                elif key in target._documents:
                    del target[key]
        return True

    def changed(self, name: Name) -> list[Any]:
        """Return the documents of a collection that are new or changed here."""
        changes = self._changes(name, self._store[name[0]][name[1]])
        return [document for _, document in changes if document is not None]

    def _changes(self, name: Name, collection: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the keys and documents that were changed; None: deleted."""
        before = self._before.get(name, {})
        for key, document in collection._documents.items():
            if key not in before or not _is_same(before[key], document):
                yield key, document
        for key in before:
            if key not in collection._documents:
                yield key, None

    def _collides(self, name: Name, changed: Mapping[Any, Any]) -> bool:
        there, before = self._origin[name[0]][name[1]], self._before.get(name, {})
        is_unique = changed and any(index.get("unique") for index in there.indexes.values())
        keys = set(before) | set(there._documents) if is_unique else changed
        return any(not _is_same(there._documents.get(key), before.get(key)) for key in keys)


def _collections(store: Any) -> Iterator[tuple[Name, Any]]:
    for database in store.list_created_database_names():
        for name in store[database].list_created_collection_names():
            yield (database, name), store[database][name]


def _copy_into(target: Any, source: Any, *, with_indexes: bool) -> None:
    target.create()
    target._documents.update(_copied(source))
    if with_indexes:
        for name, index in source.indexes.items():
            target.create_index(name, index)


def _copied(collection: Any) -> dict[Any, Any]:
    return {key: copy.deepcopy(document) for key, document in list(collection._documents.items())}


def _is_same(left: Any, right: Any) -> bool:
    return bool(left == right and repr(left) == repr(right))  # 1, 1.0 and True are equal


def contents(place: Any) -> list[str]:
    """Return what a collection holds, in a form that can be compared."""
    return [repr(document) for document in list(place._store._documents.values())]


def duplicate_of(client: Any, place: Any, write: Callable[[Any], Any]) -> dict[str, Any] | None:
    """Return what a server tells of a duplicate (``keyPattern``, ``keyValue``), which mongomock does not.

    Args:
        client: A mongomock client of the server.
        place: The collection.
        write: Makes the call that failed, given a collection; on a copy without unique indexes it goes through.

    Returns:
        None where it was the ``_id``, or is not to be found.
    """
    name = (place.database.name, place.name)
    scratch = Copy(client, only=name)
    try:
        write(scratch.place(place))
    except DuplicateKeyError:
        return None
    for index in client._store[name[0]][name[1]].indexes.values():
        for document in scratch.changed(name) if index.get("unique") else ():
            values = {field: _at(document, field) for field, _ in index["key"]}
            if len(list(scratch.place(place).find(values).limit(2))) > 1:
                return {"keyPattern": dict(index["key"]), "keyValue": values}
    return None


def _at(document: Any, field: str) -> Any:
    for part in field.split("."):
        document = document.get(part) if isinstance(document, Mapping) else None
    return document
