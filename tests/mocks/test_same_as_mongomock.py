"""A guarded mongomock client gives what plain mongomock gives, outside records and inside: results, errors, documents."""

from __future__ import annotations

import copy
import datetime as dt
import re
import string
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mongomock
import pytest
from bson import ObjectId
from hypothesis import given, settings
from hypothesis import strategies as st
from mongomock.collection import Cursor
from mongomock.command_cursor import CommandCursor
from pymongo import ASCENDING, DESCENDING, DeleteOne, InsertOne, ReturnDocument, UpdateOne
from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

from saferetry import Settings, handler, record, wrap

FIELDS = ("a", "b", "c.d")
IN_TRANSACTION = Settings(marker_database="markers")
OWN = "an id"
MADE_ID = re.compile(r"\b(?!0{24})[0-9a-f]{24}\b")


@dataclass(frozen=True)
class Operation:
    """One call on a collection."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, place: Any) -> Any:
        """Make it, with arguments of its own: documents get an id."""
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        return getattr(place, self.name)(*args, **kwargs)


def operation(name: str, *strategies: st.SearchStrategy[Any], **named: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    """Return calls of a method of the collection with some arguments."""
    arguments = st.tuples(st.tuples(*strategies), st.fixed_dictionaries({}, optional=named))
    return arguments.map(lambda drawn: Operation(name, *drawn))


numbers = st.integers(0, 3)
scalars = st.one_of(
    numbers,
    st.text(string.ascii_lowercase, max_size=2),
    st.booleans(),
    st.none(),
    st.sampled_from([1.0, 0.5, dt.datetime(2024, 1, 2, tzinfo=dt.UTC), ObjectId("0" * 24)]),
)
values = st.one_of(scalars, st.lists(numbers, max_size=2), st.dictionaries(st.sampled_from("de"), numbers, max_size=1))
documents = st.dictionaries(st.sampled_from(["_id", "a", "b", "c"]), values, max_size=3)
wrong_documents: st.SearchStrategy[Any] = st.sampled_from([7, "text", None, [], {"$a": 1}, {"a\0": 1}, {"a": object}])
filters = st.one_of(
    st.dictionaries(st.sampled_from(["_id", *FIELDS]), scalars, max_size=2),
    st.builds(
        lambda name, operator, number: {name: {operator: number}},
        st.sampled_from(FIELDS),
        st.sampled_from(["$gt", "$ne", "$lte"]),
        numbers,
    ),
    st.sampled_from(
        [{"$or": [{"a": 1}, {"b": 1}]}, {"a": {"$in": [1, 2]}}, {"$nonsense": 1}, {"a": {"$nonsense": 1}}, 7, None]
    ),
)
mappings = filters.filter(lambda wanted: isinstance(wanted, dict))
updates = st.one_of(
    st.builds(
        lambda operator, name, value: {operator: {name: value}},
        st.sampled_from(["$set", "$inc", "$push", "$unset", "$addToSet", "$setOnInsert", "$max", "$nonsense"]),
        st.sampled_from(FIELDS),
        values,
    ),
    st.sampled_from([{}, {"a": 1}, 7, {"$set": {"_id": 9}}, [{"$set": {"a": 5}}]]),
)
sorts = st.sampled_from([[("_id", ASCENDING)], [("a", DESCENDING), ("_id", ASCENDING)]])
requests = st.one_of(
    documents.map(InsertOne),
    mappings.map(DeleteOne),
    st.builds(UpdateOne, mappings, updates),
)
returned = st.sampled_from([ReturnDocument.BEFORE, ReturnDocument.AFTER])
unknown = {"comment": st.just("x")}

operations = st.one_of(
    operation("insert_one", st.one_of(documents, documents, wrong_documents), **unknown),
    operation("insert_many", st.one_of(st.lists(documents, max_size=4), wrong_documents), ordered=st.booleans()),
    operation("update_one", filters, updates, upsert=st.booleans(), **unknown),
    operation("update_many", filters, updates, upsert=st.booleans()),
    operation("replace_one", filters, st.one_of(documents, updates), upsert=st.booleans()),
    operation("delete_one", filters),
    operation("delete_many", filters, **unknown),
    operation("bulk_write", st.one_of(st.lists(requests, max_size=3), st.just([7])), ordered=st.booleans()),
    operation("find_one_and_update", filters, updates, upsert=st.booleans(), sort=sorts),
    operation(
        "find_one_and_replace",
        filters,
        documents,
        return_document=returned,
    ),
    operation("find_one_and_delete", filters, sort=sorts),
    operation("find", filters, sort=sorts, limit=numbers),
    operation("find_one", filters, sort=sorts),
    operation("count_documents", filters, maxTimeMS=numbers, skip=numbers, **unknown),
    operation("distinct", st.sampled_from(FIELDS), filters, maxTimeMS=numbers),
    operation("aggregate", filters.map(lambda wanted: [{"$match": wanted}, {"$group": {"_id": "$a", "n": {"$sum": 1}}}])),
)
definitions = st.one_of(
    operation("create_index", st.sampled_from(FIELDS), unique=st.booleans(), sparse=st.booleans()),
    operation("drop_index", st.sampled_from(["a_1", "b_1"])),
    operation("drop_indexes"),
    operation("index_information"),
    operation("estimated_document_count"),
    operation("options"),
    operation("find_raw_batches"),
    operation("drop"),
    operation("rename", st.sampled_from(["c", "other", "$bad"])),
)
scripts = st.lists(st.one_of(operations, operations, definitions), min_size=1, max_size=8)


def plain(value: Any, given: frozenset[Any]) -> Any:
    """Return a result in a form that can be compared; ids that were made differ."""
    match value:
        case ObjectId():
            return value if value in given else OWN
        case InsertOneResult() | InsertManyResult():
            return type(value), plain(getattr(value, "inserted_id", None) or getattr(value, "inserted_ids", None), given)
        case UpdateResult() | DeleteResult():
            return type(value), plain({**(value.raw_result or {}), "connectionId": 0}, given)
        case BulkWriteResult():
            return type(value), plain(value.bulk_api_result, given)
        case Cursor() | CommandCursor():
            return value.__class__, plain(list(value), given)
        case dict():
            return [(name, plain(item, given)) for name, item in value.items()]
        case list() | tuple():
            return [plain(item, given) for item in value]
    return type(value), repr(value)


GIVEN = frozenset({ObjectId("0" * 24)})


def raised(call: Callable[..., Any], *args: Any) -> Any:
    """Return what a call gives, or what it raises."""
    try:
        return call(*args)
    except Exception as exc:  # noqa: BLE001 - whatever it is, it has to be the same
        return type(exc), MADE_ID.sub(OWN, str(exc)), getattr(exc, "code", None)


def given_by(made: Operation, place: Any) -> Any:
    return plain(made.on(place), GIVEN)


def story(script: list[Operation], client: Any, inside: Callable[[], Any]) -> Any:
    collection = client["db"]["c"]
    told = []
    for made in script:
        with inside():
            told.append(raised(given_by, made, collection))
    return told, sorted(map(repr, plain(list(client["db"]["c"].find()), GIVEN))), client.list_database_names()


@pytest.mark.parametrize("inside", [nullcontext, record], ids=["outside", "inside"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_call_gives_what_plain_mongomock_gives(inside: Callable[[], Any], data: st.DataObject) -> None:
    script = data.draw(scripts)
    plain_client: Any = mongomock.MongoClient()
    guarded: Any = wrap(mongomock.MongoClient(), Settings())
    assert story(script, guarded, inside) == story(script, plain_client, nullcontext)


def until_an_error(script: list[Operation], place: Any) -> list[Any]:
    """Return what calls give, as long as they give something; the error leaves."""
    return [given_by(made, place) for made in script]


def documents_of(client: Any) -> list[str]:
    return sorted(repr(plain(document, GIVEN)) for document in client["db"]["c"].find())


@settings(max_examples=80, deadline=None)
@given(there=st.lists(st.fixed_dictionaries({"a": numbers, "b": scalars}), max_size=4), script=st.lists(operations, max_size=6))
def test_a_transaction_gives_what_plain_mongomock_gives_or_nothing(there: list[Any], script: list[Operation]) -> None:
    driver: Any = mongomock.MongoClient()
    mock: Any = wrap(mongomock.MongoClient(), IN_TRANSACTION)
    for client in (mock, driver):
        for place, document in enumerate(there):
            client["db"]["c"].insert_one({"_id": place + 10, **document})
    before = documents_of(driver)

    @handler(key="k", name="work", guarantee="transaction", client=mock, digest=lambda _: b"x")
    def work(_: str) -> list[Any]:
        return until_an_error(script, mock["db"]["c"])

    expected = raised(until_an_error, script, driver["db"]["c"])
    assert raised(work, "argument") == expected
    if isinstance(expected, list):
        assert raised(work, "argument") is None  # done before
        assert documents_of(mock) == documents_of(driver)
    else:
        assert documents_of(mock) == before
        assert mock["markers"]["saferetry_records"].count_documents({}) == 0
