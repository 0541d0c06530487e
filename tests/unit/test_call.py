"""One write call from its first send to its end, on a server in memory: what is sent, how often, and what is known after."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from bson.codec_options import CodecOptions, TypeRegistry
from hypothesis import given
from hypothesis import strategies as st
from pymongo import InsertOne, UpdateMany, UpdateOne
from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError, ExecutionTimeout, ServerSelectionTimeoutError
from pymongo.write_concern import WriteConcern

from saferetry import CallReport, Outcome, WriteView, record, repeatable
from saferetry._addresses import Address
from saferetry._seam import guard_of
from saferetry.errors import ConfigurationError, RetryRefusedError, UnprotectedWriteError
from tests.unit.fake_server import Fake, Fault, fake, is_failed, retried

LOST: list[Fault] = ["reply lost"] * 8  # four driver calls of two sends each
NOTHING_ARRIVES: list[Fault] = ["lost"] * 8
PASSING = (AutoReconnect, ExecutionTimeout)


def report_of(exc: BaseException) -> CallReport:
    return exc.saferetry  # type: ignore[attr-defined, no-any-return]  # an attribute of ours


def inc(name: str) -> UpdateOne:
    return UpdateOne({"counter": name}, {"$inc": {"n": 1}})


def inc_all(name: str) -> UpdateMany:
    return UpdateMany({"counter": name}, {"$inc": {"n": 1}})


# --- sent again ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", range(8))
def test_an_increment_whose_replies_are_lost_is_made_once(lost: int) -> None:
    with fake(LOST[:lost]) as db, record("r") as current:
        assert db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}}).modified_count == 1
        assert db.server.copies["a"] == 1
        assert current.writes == (WriteView("update_one", "d.c", Outcome.APPLIED, lost // 2 + 1, lost + 1, None),)


@pytest.mark.parametrize("lost", range(8))
def test_an_insert_that_never_arrives_is_made_once_it_does(lost: int) -> None:
    with fake(NOTHING_ARRIVES[:lost]) as db, record("r"):
        inserted = db.collection().insert_one({"a": 1}).inserted_id
        assert list(db.server.documents) == [inserted]


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
def test_at_most_max_attempts_driver_calls_and_two_sends_each(max_attempts: int) -> None:
    with fake(["reply lost"] * 99, max_attempts=max_attempts) as db, record("r"), pytest.raises(AutoReconnect):
        db.collection().insert_one({"a": 1})
    assert db.server.driver_calls == max_attempts
    assert db.server.sends == 2 * max_attempts
    assert len(db.server.documents) == 1


def test_max_attempts_is_counted_for_each_command() -> None:
    faults: list[Fault] = [*LOST[:6], "ok", *LOST[:6], "ok"]
    with fake(faults) as db, record("r"):
        assert db.collection().bulk_write([InsertOne({"a": 1}), inc("a")]).bulk_api_result["nInserted"] == 1
    assert db.server.driver_calls == 8


def test_no_attempt_starts_that_would_not_fit_into_the_budget() -> None:
    with fake(LOST) as db, record("r", budget=0.05), pytest.raises(AutoReconnect) as caught:
        db.collection().insert_one({"a": 1})
    assert db.server.driver_calls == 1
    assert report_of(caught.value).decision == "budget"


def test_the_first_attempt_always_starts() -> None:
    with fake() as db, record("r", budget=1e-9):
        db.collection().insert_one({"a": 1})
    assert db.server.driver_calls == 1


def test_an_error_that_stays_is_final() -> None:
    with fake() as db, record("r") as current:
        collection = db.collection()
        collection.insert_one({"_id": 7})
        with pytest.raises(DuplicateKeyError) as caught:
            collection.insert_one({"_id": 7})
        assert db.server.driver_calls == 2
        assert current.writes[1] == WriteView("insert_one", "d.c", Outcome.NOT_APPLIED, 1, 1, 11000)
    assert report_of(caught.value).decision == "final"
    assert not hasattr(caught.value, "__notes__")


def test_the_last_error_leaves_as_it_is_with_a_note_and_a_report() -> None:
    with fake(LOST) as db, record("r") as current, pytest.raises(AutoReconnect) as caught:
        db.collection().insert_one({"a": 1})
    report = report_of(caught.value)
    assert type(caught.value) is AutoReconnect
    assert report.write == current.writes[0] == WriteView("insert_one", "d.c", Outcome.UNKNOWN, 4, 8, None)
    assert (report.decision, len(report.waits), report.done) == ("attempts", 3, 0)
    assert caught.value.__notes__ == [
        "saferetry: insert_one on d.c: outcome unknown after 8 sends; given up after 4 driver calls (max_attempts)"
    ]


def test_a_report_tells_how_many_operations_of_a_bulk_were_done() -> None:
    faults: list[Fault] = ["ok", *LOST]
    with fake(faults) as db, record("r"), pytest.raises(AutoReconnect) as caught:
        db.collection().bulk_write([InsertOne({"a": 1}), InsertOne({"a": 2}), inc("a")])
    assert report_of(caught.value).done == 2


def test_a_command_that_was_acknowledged_is_not_sent_again() -> None:
    first, second = InsertOne({"a": 1}), inc("a")
    with fake(["ok", "reply lost", "lost", "ok"]) as db, record("r"):
        db.collection().bulk_write([first, second])
    assert [requests for _, requests in db.server.seen] == [[first], [second], [second]]


def test_a_failed_member_of_an_ordered_bulk_stops_it_with_the_drivers_error_and_a_report() -> None:
    with fake() as db, record("r") as current:
        db.collection().insert_one({"_id": 7})
        with pytest.raises(BulkWriteError) as caught:
            db.collection().bulk_write([inc("a"), InsertOne({"_id": 7}), inc("b")])
        assert current.writes[1].outcome is Outcome.APPLIED
    assert [error["index"] for error in caught.value.details["writeErrors"]] == [1]
    assert caught.value.details["nModified"] == 1
    assert db.server.copies["b"] == 0
    assert report_of(caught.value).done == 2  # acknowledged: one done, one refused


def test_a_bulk_that_is_given_up_tells_places_as_the_user_numbered_them() -> None:
    details = {  # the driver's answer to the second command: stopped by a step-down, after an upsert
        "writeErrors": [{"index": 1, "code": 10107, "errmsg": "not primary"}],
        "writeConcernErrors": [],
        "upserted": [{"index": 0, "_id": 5}],
        "nInserted": 0,
        "nUpserted": 1,
        "nMatched": 0,
        "nModified": 0,
        "nRemoved": 0,
    }
    with fake() as db, record("r"):
        collection = db.collection()
        run = collection.server.run

        def failing(method: str, argument: Any, statements: Any, **options: Any) -> dict[str, Any]:
            if len(argument) == 2:
                raise BulkWriteError(copy.deepcopy(details))
            return run(method, argument, statements, **options)  # type: ignore[no-any-return]

        collection.server.run = failing
        with pytest.raises(BulkWriteError) as caught:
            collection.bulk_write([InsertOne({"a": 1}), inc("a"), inc("b")])
    assert caught.value.details["writeErrors"][0]["index"] == 2
    assert caught.value.details["upserted"][0]["index"] == 1


# --- what has no number ----------------------------------------------------------------------------------------------------


def test_an_update_many_whose_reply_is_lost_is_sent_once() -> None:
    with fake(LOST) as db, record("r") as current, pytest.raises(AutoReconnect) as caught:
        db.collection().update_many({"counter": "a"}, {"$inc": {"n": 1}})
    assert db.server.copies["a"] == 1
    assert current.writes == (WriteView("update_many", "d.c", Outcome.UNKNOWN, 1, 1, None),)
    assert report_of(caught.value).decision == "refused"
    assert caught.value.__notes__[0].endswith("outcome unknown after 1 sends; not sent again, since it could take effect twice")


def test_an_update_many_for_which_there_was_no_server_is_sent_again() -> None:
    with fake(["no server", "no server", "ok"]) as db, record("r"):
        db.collection().update_many({"counter": "a"}, {"$inc": {"n": 1}})
    assert db.server.copies["a"] == 1


def test_a_repeatable_update_many_is_sent_again() -> None:
    with fake(["reply lost", "lost", "ok"]) as db, record("r") as current, repeatable():
        db.collection().update_many({"counter": "a"}, {"$set": {"n": 1}})
        assert current.effect() == ""
    assert db.server.copies["a"] == 2


def test_the_users_own_repetition_of_it_is_refused_without_a_send() -> None:
    with fake(["reply lost"]) as db, record("r") as current:
        with pytest.raises(AutoReconnect) as first:
            db.collection().update_many({"counter": "a"}, {"$inc": {"n": 1}})
        with pytest.raises(
            RetryRefusedError, match=r"update_many on d\.c was not sent again: its outcome is unknown"
        ) as second:
            db.collection().update_many({"counter": "a"}, {"$inc": {"n": 1}})
        assert second.value.__cause__ is first.value
        assert second.value.writes == current.writes
    assert db.server.sends == 1


def test_on_a_standalone_an_increment_is_sent_once() -> None:
    with fake(LOST, numbers=False) as db, record("r"), pytest.raises(AutoReconnect):
        db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
    assert db.server.sends == 1


def test_on_a_standalone_an_insert_is_protected_by_its_id() -> None:
    with fake(["reply lost", "lost", "ok"], numbers=False) as db, record("r") as current:
        document: dict[str, Any] = {"a": 1}
        assert db.collection().insert_one(document).inserted_id == document["_id"]
        assert current.writes[0].outcome is Outcome.APPLIED
    assert db.server.copies == {document["_id"]: 1}


def test_on_a_standalone_an_insert_with_an_id_of_the_users_is_sent_once() -> None:
    with fake(LOST, numbers=False) as db, record("r"), pytest.raises(AutoReconnect):
        db.collection().insert_one({"_id": 7})
    assert db.server.sends == 1


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("stored", range(5))
def test_on_a_standalone_an_insert_many_of_which_some_are_stored_is_completed(ordered: bool, stored: int) -> None:
    documents = [{"a": n} for n in range(4)]
    with fake(["lost", "ok"], numbers=False) as db, record("r"):
        server = db.server
        run = server.run

        def half_way(method: str, argument: Any, statements: Any, **options: Any) -> dict[str, Any]:
            if server.driver_calls == 0:
                server.apply(None, statements[:stored], ordered=True)
            return run(method, argument, statements, **options)

        server.run = half_way  # type: ignore[method-assign]  # the first copy stores some and dies
        result = db.collection().insert_many(documents, ordered=ordered)
    assert result.inserted_ids == [document["_id"] for document in documents]
    assert server.copies == {document["_id"]: 1 for document in documents}


def test_a_servers_own_duplicate_is_no_copy_of_ours() -> None:
    with fake(["reply lost", "ok"], numbers=False) as db, record("r"), repeatable():
        db.server.documents[7] = {"_id": 7}
        with pytest.raises(BulkWriteError) as caught:
            db.collection().insert_many([{"a": 1}, {"_id": 7}], ordered=False)
    assert [error["index"] for error in caught.value.details["writeErrors"]] == [1]
    assert caught.value.details["nInserted"] == 1


@pytest.mark.parametrize("wire_version", [9, 17])
def test_a_server_that_forgets_errors_on_a_resend_is_asked_statement_by_statement(wire_version: int) -> None:
    documents: list[dict[str, Any]] = [{"_id": 1}, {"_id": 7}, {"_id": 3}]
    with fake(["reply lost", "ok"], wire_version=wire_version) as db, record("r"):
        db.server.documents[7] = {"_id": 7}
        with pytest.raises(BulkWriteError) as caught:
            db.collection().insert_many(documents, ordered=False)
    assert [error["index"] for error in caught.value.details["writeErrors"]] == [1]
    assert caught.value.details["nInserted"] == 2
    assert db.server.copies == {1: 1, 3: 1}
    assert db.server.collisions == []


def test_a_server_that_misplaces_errors_on_a_resend_is_asked_statement_by_statement() -> None:
    """Before 5.0 the statements that the server remembers come first in its answer to a resend."""
    documents: list[dict[str, Any]] = [{"_id": 7}, {"_id": 1}, {"_id": 8}]
    with fake(["reply lost", "ok"], wire_version=9) as db, record("r"):
        db.server.documents |= {7: {"_id": 7}, 8: {"_id": 8}}
        run = db.server.run

        def misplacing(method: str, argument: Any, statements: Any, **options: Any) -> dict[str, Any]:
            result = run(method, argument, statements, **options)
            if len(statements) == 3:
                result["writeErrors"] = [{"index": place, "code": 11000} for place in (1, 2)]
            return result

        db.server.run = misplacing  # type: ignore[method-assign]  # as 4.4.2 does
        with pytest.raises(BulkWriteError) as caught:
            db.collection().insert_many(documents, ordered=False)
    assert [error["index"] for error in caught.value.details["writeErrors"]] == [0, 2]
    assert caught.value.details["nInserted"] == 1


class _Document(dict[str, Any]):
    """A document that can be watched."""


def test_a_record_keeps_no_document_of_a_write_that_is_over() -> None:
    document = _Document(a=1)
    watched = weakref.ref(document)
    with fake() as db, record("r") as current:
        db.collection().insert_one(document)
        db.server.seen.clear()
        db.server.documents.clear()
        del document
        gc.collect()
        assert watched() is None
        assert len(current.writes) == 1


# --- the user's own repetition ---------------------------------------------------------------------------------------------


def test_an_equal_next_call_is_the_same_write() -> None:
    with fake(LOST) as db, record("r") as current:
        outcome = retried(lambda: db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}}), 2, AutoReconnect)
        assert not is_failed(outcome)
        assert current.writes == (WriteView("update_one", "d.c", Outcome.APPLIED, 5, 9, None),)
    assert db.server.copies["a"] == 1


def test_an_equal_next_insert_has_the_same_id() -> None:
    with fake(LOST) as db, record("r"):
        with pytest.raises(AutoReconnect):
            db.collection().insert_one({"a": 1})
        document: dict[str, Any] = {"a": 1}
        assert db.collection().insert_one(document).inserted_id == document["_id"]
    assert db.server.copies == {document["_id"]: 1}


def test_the_very_document_may_be_given_again() -> None:
    document: dict[str, Any] = {"a": 1}
    with fake(LOST) as db, record("r"):
        assert not is_failed(retried(lambda: db.collection().insert_one(document), 2, AutoReconnect))
    assert db.server.copies == {document["_id"]: 1}


def test_a_call_with_other_arguments_is_another_write() -> None:
    with fake(LOST) as db, record("r") as current:
        with pytest.raises(AutoReconnect):
            db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
        db.collection().update_one({"counter": "a"}, {"$inc": {"n": 2}})
        assert [write.outcome for write in current.writes] == [Outcome.UNKNOWN, Outcome.APPLIED]
    assert db.server.copies["a"] == 2


def test_after_another_write_an_equal_one_is_a_new_one() -> None:
    with fake(LOST) as db, record("r") as current:
        with pytest.raises(AutoReconnect):
            db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
        db.collection().insert_one({"a": 1})
        db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
        assert len(current.writes) == 3
    assert db.server.copies["a"] == 2


def test_in_the_next_record_an_equal_call_is_a_new_one() -> None:
    with fake(LOST) as db:
        with record("r"), pytest.raises(AutoReconnect):
            db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
        with record("r"):
            db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
    assert db.server.copies["a"] == 2


def test_an_equal_call_after_one_that_went_well_is_a_new_one() -> None:
    with fake() as db, record("r"):
        for _ in range(3):
            db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
            db.collection().insert_one({"a": 1})
    assert db.server.copies["a"] == 3
    assert len(db.server.documents) == 3


def test_an_equal_call_after_one_that_was_not_applied_is_a_new_one() -> None:
    with fake(["timed out"] * 4) as db, record("r") as current:
        for _ in range(2):
            retried(lambda: db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}}), 1, ExecutionTimeout)
        assert [write.outcome for write in current.writes] == [Outcome.NOT_APPLIED, Outcome.APPLIED]
    assert db.server.copies["a"] == 1


def test_a_repetition_is_made_with_the_repetitions_own_document() -> None:
    first: dict[str, Any] = {"a": 1}
    with fake(NOTHING_ARRIVES) as db, record("r"):
        with pytest.raises(AutoReconnect):
            db.collection().insert_one(first)
        del first["_id"]  # people who know that the driver puts it in do so before they try again
        again = dict(first)
        first["a"] = 2
        inserted = db.collection().insert_one(again).inserted_id
    assert db.server.documents == {again["_id"]: {"a": 1, "_id": again["_id"]}}
    assert inserted == again["_id"]


def test_a_call_with_a_session_of_the_users_is_no_repetition() -> None:
    # It may be part of a transaction of his, and then must not be made outside it.
    with fake(LOST) as db, record("r") as current, db.client.start_session() as session:
        with pytest.raises(AutoReconnect):
            db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
        db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}}, session=session)
        assert len(current.writes) == 2
    assert "session of the user's" in current.effect()


def test_a_call_with_write_concern_0_is_no_repetition_that_would_count_as_applied() -> None:
    with fake(LOST) as db, record("r") as current:
        with pytest.raises(AutoReconnect):
            db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
        db.collection(write_concern=WriteConcern(w=0)).update_one({"counter": "a"}, {"$inc": {"n": 1}})
        assert [write.outcome for write in current.writes] == [Outcome.UNKNOWN, Outcome.UNVERIFIABLE]


# --- addresses -------------------------------------------------------------------------------------------------------------


def test_a_bulk_that_the_user_repeats_gives_every_address_back_once() -> None:
    faults: list[Fault] = ["ok", *LOST]  # the first command is acknowledged, the second never answers
    requests = [InsertOne({"a": 1}), inc("a"), InsertOne({"a": 2})]
    with fake(faults) as db, record("r"):
        assert not is_failed(retried(lambda: db.collection().bulk_write(requests), 2, AutoReconnect))
        held = [guard_of(db.client).pool.acquire() for _ in range(10)]
    # One address for two writes, and the server swallows the second.
    assert len({session_of(address) for address in held}) == 10
    assert not {(session_of(address), int(address.number)) for address in held} & {place[:2] for place in db.server.memory}


def session_of(address: Address) -> bytes:
    return bytes(address.session_id["id"])


def test_an_address_of_unknown_fate_is_never_used_for_another_write() -> None:
    with fake(LOST) as db:
        pool = guard_of(db.client).pool
        with record("r"), pytest.raises(AutoReconnect):
            db.collection().update_one({"counter": "a"}, {"$inc": {"n": 1}})
        assert pool.discarded == 1
        with record("r"):
            db.collection().update_one({"counter": "b"}, {"$inc": {"n": 1}})
    sessions = {session for session, _, _ in db.server.memory}
    assert len(sessions) == 2


def test_sessions_are_used_again_from_write_to_write() -> None:
    with fake() as db, record("r"):
        for number in range(5):
            db.collection().insert_one({"a": number})
    assert sorted(number for _, number, _ in db.server.memory) == [1, 2, 3, 4, 5]
    assert len({session for session, _, _ in db.server.memory}) == 1


STATEMENTS = st.lists(st.sampled_from(["insert", "inc", "inc_all"]), min_size=1, max_size=5)
RUNS: Any = st.tuples(st.sampled_from(["ok", "lost", "reply lost", "no server", "timed out"]), st.integers(1, 5))
FAULTS: Any = st.lists(RUNS, max_size=20).map(lambda runs: [fault for fault, length in runs for _ in range(length)])


@given(bulks=st.lists(st.tuples(STATEMENTS, st.booleans()), min_size=1, max_size=5), faults=FAULTS, numbers=st.booleans())
def test_whatever_is_lost_and_repeated_every_statement_takes_effect_once_or_the_user_is_told(
    bulks: Sequence[tuple[Sequence[str], bool]], faults: list[Fault], numbers: bool
) -> None:
    with fake(faults, numbers=numbers, max_attempts=2) as db:
        for place, (statements, ordered) in enumerate(bulks):
            requests = [made(statement, f"{place}.{at}") for at, statement in enumerate(statements)]
            with record("r") as current:
                result = repeated_while_unknown(db, requests, ordered=ordered)
                outcome = current.writes[-1].outcome
            copies = [copies_of(db, request) for request in requests]
            assert db.server.collisions == []
            assert max(copies) <= 1
            if result is None:
                assert outcome is not Outcome.APPLIED or 0 in copies
            else:
                assert copies == [1] * len(requests)
                assert result.inserted_count == statements.count("insert")
                assert outcome is Outcome.APPLIED


def repeated_while_unknown(db: Fake, requests: list[Any], *, ordered: bool) -> Any:
    """Make a bulk as people do, again while its outcome is unknown; return its result, or None."""
    for _ in range(4):
        try:
            return db.collection().bulk_write(requests, ordered=ordered)
        except PASSING as exc:
            if report_of(exc).write.outcome is not Outcome.UNKNOWN:
                return None
        except RetryRefusedError:
            return None
    return None


@given(
    statements=st.lists(st.sampled_from(["insert", "taken", "inc"]), min_size=1, max_size=6),
    ordered=st.booleans(),
    faults=FAULTS,
    wire_version=st.sampled_from([9, 17]),
)
def test_whatever_is_lost_the_members_that_are_refused_are_told_at_their_places(
    *, statements: list[str], ordered: bool, faults: list[Fault], wire_version: int
) -> None:
    requests = [InsertOne({"_id": at}) if name == "taken" else made(name, f"{at}") for at, name in enumerate(statements)]
    taken = [at for at, name in enumerate(statements) if name == "taken"]
    with fake(faults, wire_version=wire_version, max_attempts=2) as db:
        db.server.documents.update({at: {"_id": at} for at in taken})
        with record("r"):
            told = refused_while_unknown(db, requests, ordered=ordered)
        copies = [copies_of(db, request) for request in requests]
        assert db.server.collisions == []
        assert max(copies) <= 1
        if told is not None:
            assert told == (taken[:1] if ordered else taken)
            reached = range(taken[0]) if ordered and taken else range(len(requests))
            assert [copies[at] for at in reached if at not in taken] == [1] * len([at for at in reached if at not in taken])


def refused_while_unknown(db: Fake, requests: list[Any], *, ordered: bool) -> list[int] | None:
    """Make a bulk as `repeated_while_unknown` does; return the places of members that were refused, or None."""
    try:
        return None if repeated_while_unknown(db, requests, ordered=ordered) is None else []
    except BulkWriteError as exc:
        return [error["index"] for error in exc.details["writeErrors"]]


def made(statement: str, token: str) -> Any:
    if statement == "insert":
        return InsertOne({"token": token})
    return inc(token) if statement == "inc" else inc_all(token)


def copies_of(db: Fake, request: Any) -> int:
    return db.server.copies[request._doc.get("_id") if isinstance(request, InsertOne) else request._filter["counter"]]


# --- reads and writes that look like reads ---------------------------------------------------------------------------------

MERGE = [{"$merge": {"into": "d", "whenMatched": [{"$set": {"n": {"$add": ["$n", 1]}}}]}}]


@pytest.mark.parametrize("stage", [MERGE, [{"$out": "d"}]], ids=["$merge", "$out"])
@pytest.mark.parametrize("form", ["document", "keywords", "both"])
def test_an_aggregate_command_that_writes_is_a_write(form: str, stage: Any) -> None:
    forms: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "document": (({"aggregate": "c", "pipeline": stage, "cursor": {}},), {}),
        "keywords": (("aggregate", "c"), {"pipeline": stage, "cursor": {}}),
        "both": (({"aggregate": "c", "cursor": {}},), {"pipeline": stage}),
    }
    arguments, keywords = forms[form]
    with fake(LOST) as db, record("r") as current:
        with pytest.raises(AutoReconnect):
            db.database().command(*arguments, **keywords)
        assert db.server.sends == 1
        assert [write.method for write in current.writes] == ["command"]
        assert current.effect() != ""


def test_a_command_that_reads_is_sent_again_and_is_no_effect() -> None:
    with fake(["reply lost", "reply lost", "ok"]) as db, record("r") as current:
        db.database().command("collStats", "c")
        assert current.writes == ()
        assert current.effect() == ""
    assert db.server.driver_calls == 3


# --- what must not vanish --------------------------------------------------------------------------------------------------


def test_documents_do_not_vanish_when_what_could_not_be_measured_can_be_sent_after_all() -> None:
    class Moody:
        """A value whose encoder fails the first time (a lookup that timed out, say)."""

    calls: list[int] = []

    def encode(_: Any) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not now")
        return "encoded"

    options: CodecOptions[Any] = CodecOptions(type_registry=TypeRegistry(fallback_encoder=encode))
    documents: list[dict[str, Any]] = [{"a": 1}, {"a": Moody()}, {"a": 3}]
    with fake() as db, record("r"):
        outcome = retried(
            lambda: db.collection(codec_options=options).insert_many(documents), 1, ValueError, ConfigurationError
        )
    assert is_failed(outcome) or len(db.server.documents) == 3


def test_a_strict_bulk_with_a_member_that_cannot_be_protected_is_refused_whole() -> None:
    with (
        fake(strict=True) as db,
        record("r"),
        pytest.raises(UnprotectedWriteError, match=r"bulk_write on d\.c cannot be protected"),
    ):
        db.collection().bulk_write([InsertOne({"a": 1}), inc_all("a")])
    assert db.server.sends == 0


def test_outside_a_record_the_driver_is_called_as_it_is() -> None:
    requests = [InsertOne({"a": 1}), inc("a"), inc_all("a")]
    with fake(["no server"]) as db:
        with pytest.raises(ServerSelectionTimeoutError) as caught:
            db.collection().bulk_write(requests)
        db.collection().bulk_write(requests)
    assert not hasattr(caught.value, "saferetry")
    assert [argument for _, argument in db.server.seen] == [requests, requests]


def test_disabled_the_driver_is_called_as_it_is_in_a_record_too() -> None:
    with fake(["no server"], disabled=True) as db, record("r") as current:
        with pytest.raises(ServerSelectionTimeoutError):
            db.collection().insert_one({"a": 1})
        assert current.writes == ()
    assert db.server.driver_calls == 1


def test_wrong_arguments_are_the_drivers_own_error() -> None:
    with fake() as db, record("r") as current:
        with pytest.raises(TypeError, match="colour"):
            db.collection().insert_one({"a": 1}, colour="red")
        with pytest.raises((TypeError, ValueError)):
            db.collection().bulk_write([UpdateOne({"counter": "a"}, {"n": 1})])
        assert current.writes == ()
    assert db.server.sends == 0


def test_a_generator_of_documents_is_read_once() -> None:
    read: list[int] = []

    def documents() -> Any:
        for number in range(3):
            read.append(number)
            yield {"a": number}

    with fake(["reply lost", "reply lost", "ok"]) as db, record("r"):
        assert len(db.collection().insert_many(documents()).inserted_ids) == 3
    assert read == [0, 1, 2]
    assert len(db.server.documents) == 3
