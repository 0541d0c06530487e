"""A write call cut into commands, and their results put together: laws, and the driver's own cutting and merging."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import bson
import pytest
from bson.errors import InvalidDocument
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from hypothesis import given
from hypothesis import strategies as st
from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.bulk_shared import _merge_command, _Run
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError
from pymongo.mongo_client import MongoClient

from saferetry import _parts
from saferetry._parts import (
    COUNTS,
    LARGEST_DOCUMENT,
    MOST_BYTES,
    MOST_STATEMENTS,
    Part,
    are_documents,
    are_requests,
    cut_bulk,
    empty_result,
    has_multi,
    insert_many_result,
    merge,
)
from saferetry._plans import Inserted, documents_of, plain_requests, without_made_id
from saferetry._seam import bulk_statements

Request = InsertOne[Any] | UpdateOne | UpdateMany | ReplaceOne[Any] | DeleteOne | DeleteMany
Sent = list[tuple[list[Request], dict[str, Any]]]

CLIENT: MongoClient[dict[str, Any]] = MongoClient(connect=False)
COLLECTION: Collection[dict[str, Any]] = CLIENT["d"]["c"]


@pytest.fixture(scope="module", autouse=True)
def close_the_client() -> Iterator[None]:
    yield
    CLIENT.close()


MAKERS: Mapping[str, Callable[[], Request]] = {
    "insert": lambda: InsertOne({"a": 1}),
    "update": lambda: UpdateOne({}, {"$set": {"a": 1}}),
    "replace": lambda: ReplaceOne({}, {"a": 1}),
    "delete": lambda: DeleteOne({}),
    "update_many": lambda: UpdateMany({}, {"$set": {"a": 1}}),
    "delete_many": lambda: DeleteMany({}),
}
MULTI = (UpdateMany, DeleteMany)
KINDS = {InsertOne: 0, UpdateOne: 1, ReplaceOne: 1, UpdateMany: 1, DeleteOne: 2, DeleteMany: 2}

requests_drawn = st.lists(st.sampled_from(sorted(MAKERS)).map(lambda name: MAKERS[name]()), min_size=1, max_size=12)


def cut(requests: Sequence[Request], *, ordered: bool = True, sent: Sent | None = None, **options: Any) -> list[Part]:
    def bulk_write(target: Any, chosen: Any, **given_options: Any) -> Any:
        if sent is not None:
            sent.append((list(chosen), given_options))

    inserted = Inserted(documents_of(list(requests)))
    inserted.make_ids({})
    return cut_bulk(bulk_write, COLLECTION, requests, {"ordered": ordered, **options}, made_ids=inserted.made_ids)


def positions(parts: Sequence[Part]) -> list[int]:
    return [position for part in parts for position in part.positions]


def kinds(part: Part) -> set[int]:
    return {KINDS[type(request)] for request in part.requests}


# --- cutting ---------------------------------------------------------------------------------------------------------------


@given(requests=requests_drawn, ordered=st.booleans())
def test_every_request_is_in_exactly_one_command(requests: list[Request], ordered: bool) -> None:
    parts = cut(requests, ordered=ordered)
    assert sorted(positions(parts)) == list(range(len(requests)))
    for part in parts:
        assert [requests[position] for position in part.positions] == list(part.requests)


@given(requests_drawn)
def test_ordered_the_order_is_kept(requests: list[Request]) -> None:
    assert positions(cut(requests)) == list(range(len(requests)))


@given(requests_drawn)
def test_unordered_the_order_is_kept_within_a_command(requests: list[Request]) -> None:
    for part in cut(requests, ordered=False):
        assert list(part.positions) == sorted(part.positions)


@given(requests_drawn)
def test_unordered_the_kinds_come_as_the_driver_sends_them(requests: list[Request]) -> None:
    order = [kind for part in cut(requests, ordered=False) for kind in kinds(part)]
    assert order == sorted(order)


@given(requests=requests_drawn, ordered=st.booleans())
def test_a_command_is_of_one_kind(requests: list[Request], ordered: bool) -> None:
    assert all(len(kinds(part)) == 1 for part in cut(requests, ordered=ordered))


@given(requests=requests_drawn, ordered=st.booleans())
def test_a_member_that_changes_many_documents_is_a_command_of_its_own(requests: list[Request], ordered: bool) -> None:
    for part in cut(requests, ordered=ordered):
        is_multi = any(isinstance(request, MULTI) for request in part.requests)
        assert part.multi is is_multi
        assert part.statements == 1 or not is_multi


@given(requests=requests_drawn, ordered=st.booleans())
def test_no_two_neighbours_could_have_been_one_command(requests: list[Request], ordered: bool) -> None:
    parts = cut(requests, ordered=ordered)
    for one, other in pairwise(parts):
        assert kinds(one) != kinds(other) or one.multi or other.multi


@given(requests_drawn)
def test_without_multi_members_an_unordered_bulk_is_cut_where_the_driver_cuts_it(requests: list[Request]) -> None:
    if not has_multi(requests):
        assert len(cut(requests, ordered=False)) == len({KINDS[type(request)] for request in requests})


@given(requests=requests_drawn, ordered=st.booleans())
def test_the_made_ids_follow_their_statements(requests: list[Request], ordered: bool) -> None:
    for part in cut(requests, ordered=ordered):
        ids = {at: made_id_of(request) for at, request in enumerate(part.requests) if isinstance(request, InsertOne)}
        assert dict(part.made_ids) == ids
        assert part.is_insert is bool(ids)
        assert part.is_id_protected is bool(ids)


@pytest.mark.parametrize("count", [1, 1_000, 1_001, 2_500])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_command_holds_a_thousand_statements_at_most(count: int, ordered: bool) -> None:
    parts = cut([InsertOne({"n": n}) for n in range(count)], ordered=ordered)
    assert MOST_STATEMENTS == 1_000
    assert [part.statements for part in parts] == [1_000] * (count // 1_000) + [count % 1_000] * bool(count % 1_000)


def test_a_command_holds_16_mb_at_most() -> None:
    blob = b"x" * (12 * 1024 * 1024)
    assert [part.statements for part in cut([InsertOne({"blob": blob}) for _ in range(3)])] == [1, 1, 1]


@given(sizes=st.lists(st.integers(0, 1_200), min_size=1, max_size=20), ordered=st.booleans())
def test_no_command_is_larger_than_the_limit(sizes: list[int], ordered: bool) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(_parts, "MOST_BYTES", 2_000)
    requests = [InsertOne({"blob": b"x" * size}) for size in sizes]
    parts = cut(requests, ordered=ordered)
    patch.undo()
    assert sorted(positions(parts)) == list(range(len(sizes)))
    for part in parts:
        total = sum(len(bson.encode(request._doc)) for request in cast("list[InsertOne[Any]]", part.requests))
        assert total <= 2_000


def test_a_document_of_more_than_the_limit_does_not_pull_others_into_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parts, "MOST_BYTES", 1_000)
    parts = cut([InsertOne({"a": 1}), InsertOne({"blob": b"x" * 5_000}), InsertOne({"a": 2})])
    assert [list(part.positions) for part in parts] == [[0], [1], [2]]


def test_the_limit_of_a_command_is_below_the_drivers_limit_of_a_message() -> None:
    assert MOST_BYTES + LARGEST_DOCUMENT < 48_000_000  # maxMessageSizeBytes


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"a": object()}, InvalidDocument),
        ({"a": 2**70}, OverflowError),
        ({1: "a key that is no text"}, InvalidDocument),
        ({"a": "\ud800"}, UnicodeEncodeError),
    ],
    ids=["no type of BSON", "beyond int64", "key", "surrogate"],
)
def test_where_one_member_cannot_be_encoded_none_is_sent(document: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        cut([InsertOne({"a": 1}), InsertOne(document), UpdateOne({}, {"$set": {"a": 1}})])


@pytest.mark.parametrize("ordered", [True, False])
def test_a_document_that_the_server_will_refuse_is_sent_alone_and_first(ordered: bool) -> None:
    large = {"blob": b"x" * (LARGEST_DOCUMENT + 1)}
    parts = cut([InsertOne({"a": 1}), InsertOne(large), UpdateOne({}, {"$set": {"a": 1}})], ordered=ordered)
    assert [list(part.positions) for part in parts] == [[1], [0], [2]]


def test_a_single_member_is_measured_by_the_driver() -> None:
    assert len(cut([InsertOne({"a": object()})])) == 1


@pytest.mark.parametrize(
    "request_", [UpdateOne({}, {"a": 1}), ReplaceOne({}, {"$set": {"a": 1}}), UpdateOne({}, {}), InsertOne(cast("Any", 7))]
)
def test_what_the_driver_does_not_take_is_its_own_error(request_: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        cut([InsertOne({"a": 1}), request_])


@pytest.mark.parametrize("ordered", [True, False])
def test_a_command_is_sent_with_the_options_of_the_call(ordered: bool) -> None:
    sent: Sent = []
    requests: list[Request] = [InsertOne({"a": 1}), UpdateOne({}, {"$set": {"a": 1}})]
    for part in cut(requests, ordered=ordered, sent=sent, let={"x": 1}, comment="mine", bypass_document_validation=True):
        part.invoke(COLLECTION)
    assert [chosen for chosen, _ in sent] == [[requests[0]], [requests[1]]]
    options = {"ordered": ordered, "let": {"x": 1}, "comment": "mine", "bypass_document_validation": True}
    assert all(given_options == options for _, given_options in sent)


def test_the_statements_are_those_of_the_driver() -> None:
    requests = [MAKERS[name]() for name in MAKERS]
    statements = bulk_statements(COLLECTION, requests, True)
    assert [kind for kind, _ in statements] == [KINDS[type(request)] for request in requests]
    assert [bool(document.get("multi") or document.get("limit") == 0) for _, document in statements] == [
        isinstance(request, MULTI) for request in requests
    ]


# --- some of a command -----------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 8), data=st.data())
def test_a_piece_of_a_command_holds_the_statements_asked_for(count: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1).map(sorted))
    sent: Sent = []
    requests: list[Request] = [InsertOne({"n": n}) for n in range(count)]
    (part,) = cut(requests, sent=sent)
    piece = part.only(places)
    piece.invoke(COLLECTION)
    chosen = [requests[place] for place in places]
    assert list(piece.positions) == places
    assert sent[0][0] == chosen
    assert dict(piece.made_ids) == {at: made_id_of(request) for at, request in enumerate(chosen)}


def made_id_of(request: Any) -> Any:
    return request._doc["_id"]


def test_a_piece_of_a_piece_keeps_the_places_in_the_users_bulk() -> None:
    (_, part) = cut([UpdateOne({}, {"$set": {"a": 1}}), *[InsertOne({"n": n}) for n in range(4)]])
    assert list(part.only([1, 2, 3]).only([0, 2]).positions) == [2, 4]


def test_a_command_with_one_document_of_the_users_own_id_is_not_protected_by_ids() -> None:
    (part,) = cut([InsertOne({"a": 1}), InsertOne({"_id": 7})])
    assert not part.is_id_protected
    assert part.only([0]).is_id_protected
    assert not part.only([1]).is_id_protected


# --- the documents and their _id -------------------------------------------------------------------------------------------


def test_a_document_without_id_gets_one_once() -> None:
    document: dict[str, Any] = {"a": 1}
    inserted = Inserted({0: document})
    inserted.make_ids({})
    assert isinstance(document["_id"], ObjectId)
    assert inserted.made_ids == {0: document["_id"]}


def test_a_document_with_an_id_keeps_it_and_is_not_protected_by_it() -> None:
    document = {"_id": 7}
    inserted = Inserted({0: document})
    inserted.make_ids({})
    assert document == {"_id": 7}
    assert inserted.made_ids == {}


@pytest.mark.parametrize("document", [RawBSONDocument(bson.encode({"a": 1})), 7, None, "text", [], ["a"], [("a", 1)]])
def test_what_takes_no_id_is_left_alone(document: Any) -> None:
    inserted = Inserted({0: document})
    inserted.make_ids({})
    assert inserted.made_ids == {}


def test_a_repetition_gets_the_id_of_the_first_call() -> None:
    made = ObjectId()
    document: dict[str, Any] = {"a": 1}
    inserted = Inserted({3: document})
    inserted.make_ids({3: made})
    assert document["_id"] == made
    assert inserted.made_ids == {3: made}


def test_a_repetition_with_the_very_document_is_still_protected_by_its_made_id() -> None:
    made = ObjectId()
    inserted = Inserted({0: {"_id": made, "a": 1}})
    inserted.make_ids({0: made})
    assert inserted.made_ids == {0: made}


def test_two_places_of_one_document_have_one_id() -> None:
    document: dict[str, Any] = {"a": 1}
    inserted = Inserted({0: document, 1: document})
    inserted.make_ids({})
    assert len({id(made) for made in inserted.made_ids.values()}) == 1


def test_the_made_id_is_taken_out_for_comparing_and_no_other() -> None:
    made = ObjectId()
    assert without_made_id({"_id": made, "a": 1}, made) == {"a": 1}
    assert without_made_id({"_id": 7, "a": 1}, made) == {"_id": 7, "a": 1}
    assert without_made_id({"_id": made}, None) == {"_id": made}
    assert without_made_id("text", made) == "text"


@given(requests_drawn)
def test_a_bulk_made_again_from_the_same_values_compares_equal(requests: list[Request]) -> None:
    before = plain_requests(copy.deepcopy(requests), {})
    inserted = Inserted(documents_of(requests))
    inserted.make_ids({})
    assert plain_requests(requests, inserted.made_ids) == before


def test_all_options_of_a_request_are_compared() -> None:
    one, other = UpdateOne({}, {"$set": {"a": 1}}), UpdateOne({}, {"$set": {"a": 1}}, upsert=True)
    assert plain_requests([one], {}) != plain_requests([other], {})
    assert plain_requests([UpdateOne({}, {"$set": {"a": 1}})], {}) != plain_requests([UpdateMany({}, {"$set": {"a": 1}})], {})
    hinted = UpdateOne({}, {"$set": {"a": 1}}, hint="a_1")
    assert plain_requests([one], {}) != plain_requests([hinted], {})


@pytest.mark.parametrize(
    ("requests", "are", "multi"),
    [
        ([InsertOne({})], True, False),
        ([InsertOne({}), UpdateMany({}, {})], True, True),
        ([DeleteMany({})], True, True),
        ([], False, False),
        ((InsertOne({}),), False, False),
        ([InsertOne({}), {}], False, False),
        (None, False, False),
        ("text", False, False),
    ],
)
def test_what_the_driver_takes_as_requests(requests: Any, are: bool, multi: bool) -> None:
    assert are_requests(requests) is are
    assert has_multi(requests) is multi


@pytest.mark.parametrize(
    ("documents", "are"),
    [
        ([{}], True),
        ([{}, RawBSONDocument(bson.encode({}))], True),
        ([], False),
        ([{}, 7], False),
        (({},), False),
        (None, False),
    ],
)
def test_what_the_driver_takes_as_documents(documents: Any, are: bool) -> None:
    assert are_documents(documents) is are


# --- merging, against the driver's own -------------------------------------------------------------------------------------


@st.composite
def answered(draw: st.DrawFn) -> tuple[list[Request], bool, list[tuple[Part, dict[str, Any]]]]:
    """Draw a bulk, how the driver cuts it, and a reply of the server for each command that is reached."""
    requests = draw(requests_drawn)
    ordered = draw(st.booleans())
    replies = []
    for part in cut(requests, ordered=ordered):
        refused = sorted(draw(st.sets(st.integers(0, part.statements - 1), max_size=part.statements)))
        if ordered:
            refused = refused[:1]
        done = refused[0] if ordered and refused else part.statements - len(refused)
        reply: dict[str, Any] = {"ok": 1, "n": done}
        if kinds(part) == {1}:
            places = [place for place in range(part.statements) if place not in refused][:done]
            upserted = [place for place in places if draw(st.booleans())]
            reply["nModified"] = draw(st.integers(0, done - len(upserted)))
            if upserted:
                reply["upserted"] = [{"index": place, "_id": place} for place in upserted]
        if refused:
            reply["writeErrors"] = [{"index": place, "code": 11000 + place, "errmsg": "no"} for place in refused]
        if draw(st.integers(0, 4)) == 0:
            reply["writeConcernError"] = {"code": 64, "errmsg": "waiting"}
        replies.append((part, reply))
        if ordered and refused:
            break
    return requests, ordered, replies


def driver_merged(requests: list[Request], ordered: bool, replies: list[tuple[Part, dict[str, Any]]]) -> dict[str, Any]:
    """Return what PyMongo makes of these replies where each command is a run of one bulk."""
    operations = [document for _, document in bulk_statements(COLLECTION, requests, ordered)]
    full = empty_result()
    for part, reply in replies:
        run = _Run(*kinds(part))
        for position in part.positions:
            run.add(position, operations[position])
        _merge_command(run, full, 0, copy.deepcopy(reply))
    full["writeErrors"].sort(key=lambda entry: entry["index"])
    return full


def single(requests: list[Request], ordered: bool, part: Part, reply: dict[str, Any]) -> dict[str, Any]:
    """Return what PyMongo makes of one command alone, as our driver call for it gets it."""
    operations = [document for _, document in bulk_statements(COLLECTION, requests, ordered)]
    run = _Run(*kinds(part))
    for at, position in enumerate(part.positions):
        run.add(at, operations[position])
    full = empty_result()
    _merge_command(run, full, 0, copy.deepcopy(reply))
    return full


@given(answered())
def test_results_merge_as_the_driver_merges_them(
    bulk: tuple[list[Request], bool, list[tuple[Part, dict[str, Any]]]],
) -> None:
    requests, ordered, replies = bulk
    expected = driver_merged(requests, ordered, replies)
    ours = [(part, single(requests, ordered, part, reply)) for part, reply in replies]
    if expected["writeErrors"] or expected["writeConcernErrors"]:
        with pytest.raises(BulkWriteError) as caught:
            merge(ours)
        assert caught.value.details == expected
    else:
        assert merge(ours).bulk_api_result == expected


def test_merging_changes_no_reply() -> None:
    parts = cut([InsertOne({"a": 1}), UpdateOne({}, {"$set": {"a": 1}})])
    result = {**empty_result(), "nUpserted": 1, "upserted": [{"index": 0, "_id": 7}]}
    before = copy.deepcopy(result)
    assert merge([(parts[1], result)]).upserted_ids == {1: 7}
    assert result == before


def test_the_counts_are_those_of_the_driver() -> None:
    counted = {name for name, value in empty_result().items() if value == 0}
    assert set(COUNTS) == counted == {"nInserted", "nUpserted", "nMatched", "nModified", "nRemoved"}


def test_an_insert_many_tells_the_ids_as_the_driver_does() -> None:
    raw = RawBSONDocument(bson.encode({"_id": 2}))
    assert insert_many_result([{"_id": 1}, raw, {"_id": 3}]).inserted_ids == [1, 3]
