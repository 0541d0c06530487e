"""What the server cannot recognise as the same write is sent once, and its error says that nobody knows the outcome."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from pymongo import InsertOne, UpdateMany
from pymongo.errors import AutoReconnect, OperationFailure
from pymongo.write_concern import WriteConcern

import saferetry
from saferetry import Outcome, RecordKey, Settings
from tests.matrix.rows import INC, INSERT_ONE, NOT_ADDRESSABLE
from tests.matrix.runner import DRIVER_SENDS, LOST_TWICE, STOCK, Fault, Ground, Row, addresses, answer_of, report_of
from tests.support.driving import done


def refused(exc: Any) -> bool:
    """Whether it is the driver's own error with our note and report of a refusal."""
    assert type(exc) is AutoReconnect
    (note,) = exc.__notes__
    return note.startswith("saferetry: ") and "could take effect twice" in note and report_of(exc).decision == "refused"


@pytest.mark.parametrize("row", NOT_ADDRESSABLE, ids=str)
async def test_a_lost_reply_leaves_one_send_and_an_unknown_outcome(row: Row, ground: Ground) -> None:
    run = await ground.disturbed(row, Fault("close", 1))

    assert ground.proxy.hits == 1
    assert ground.log.sends(*row.commands) == 1
    assert refused(run.answer)
    (view,) = run.writes
    assert (view.outcome, view.calls, view.sends) == (Outcome.UNKNOWN, 1, 1)
    assert report_of(run.answer).write == view
    assert run.seen.left == (await ground.undisturbed(row)).left


@pytest.mark.parametrize("row", NOT_ADDRESSABLE, ids=str)
async def test_a_cut_command_is_not_sent_again_since_nobody_knows(row: Row, ground: Ground) -> None:
    nothing = Row("nothing", lambda c: None, row.commands, row.setup, row.unique)
    run = await ground.disturbed(row, Fault("cut", 1))

    assert ground.log.sends(*row.commands) == 1
    assert refused(run.answer)
    assert run.writes[0].outcome is Outcome.UNKNOWN
    assert run.seen.left == (await ground.undisturbed(nothing)).left


@pytest.mark.parametrize("row", NOT_ADDRESSABLE, ids=str)
async def test_an_undisturbed_call_gives_what_plain_pymongo_gives(row: Row, ground: Ground) -> None:
    run = await ground.disturbed(row, Fault("close", 0))

    assert ground.log.sends(*row.commands) == 1
    assert run.seen == await ground.undisturbed(row)
    assert run.writes[0].outcome is Outcome.APPLIED


UPDATE_MANY = Row("update_many", lambda c: c.update_many({}, {"$inc": {"n": 1}}), ("update",))


async def test_inside_repeatable_it_is_sent_again(ground: Ground) -> None:
    with saferetry.repeatable():
        run = await ground.disturbed(UPDATE_MANY, Fault("close", 1))

    assert ground.log.sends("update") == 2
    assert [document["n"] for document in ground.documents()] == [document["n"] + 2 for document in STOCK]
    assert run.answer.modified_count == 3
    assert run.writes[0].outcome is Outcome.APPLIED


async def test_what_never_left_is_sent_when_a_server_can_be_had(ground: Ground) -> None:
    ground.prepare(ground.name, UPDATE_MANY)
    patient = Settings(backoff_base_ms=1, backoff_cap_ms=5, max_attempts=100)
    ground.proxy.arm(mode="refuse_hello")
    client = ground.connect(ground.proxy.uri(serverSelectionTimeoutMS=50), settings=patient)
    recovery = threading.Timer(0.2, ground.proxy.recover)
    recovery.start()

    async with saferetry.record() as record:
        result = await done(client[ground.name].c.update_many({}, {"$inc": {"n": 1}}))
        (view,) = record.writes

    recovery.join()
    assert result.modified_count == 3
    assert (view.outcome, view.sends) == (Outcome.APPLIED, 1)
    assert view.calls > 1
    assert ground.log.sends("update") == 1


async def test_unacknowledged_is_sent_once_and_unverifiable(ground: Ground) -> None:
    unacknowledged = Row("w0", lambda c: c.with_options(write_concern=WriteConcern(w=0)).insert_one({"_id": 10}), ("insert",))
    run = await ground.disturbed(unacknowledged, Fault("close", 0))

    assert not run.answer.acknowledged
    assert (run.writes[0].outcome, run.writes[0].sends) == (Outcome.UNVERIFIABLE, 1)
    assert ground.log.sends("insert") == 1


@pytest.mark.parametrize("row", [INSERT_ONE, INC], ids=str)
async def test_a_session_of_the_users_is_left_alone(row: Row, ground: Ground) -> None:
    """The driver's own resend runs on it; ours would need its number."""
    ground.prepare(ground.name, row)
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=2, command=row.commands[0])
    session = client.start_session()
    async with saferetry.record() as record:
        collection = client[ground.name].c
        call = (
            (lambda: collection.insert_one({"x": 1}, session=session))
            if row is INSERT_ONE
            else (lambda: collection.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session))
        )
        exc = await answer_of(call)
        sent = {bytes(command["lsid"]["id"]) for command in ground.log.commands(*row.commands)}
        assert sent == {bytes(session.session_id["id"])}
        await done(session.end_session())

    assert refused(exc)
    assert record.writes[0].outcome is Outcome.UNKNOWN
    assert ground.log.sends(*row.commands) == DRIVER_SENDS
    assert ground.log.sends("killSessions") == 0


async def test_a_transaction_of_the_users_is_left_alone(ground: Ground) -> None:
    ground.prepare(ground.name, INC)
    client = ground.connect(ground.proxy.uri())
    collection = client[ground.name].c
    session = client.start_session()
    async with saferetry.record() as record, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(lambda: ended(session))
        await done(session.start_transaction())
        await done(collection.insert_one({"_id": 10}, session=session))
        await done(collection.insert_many([{"_id": 11}, {"_id": 12}], session=session))
        await done(collection.bulk_write([InsertOne({"_id": 13}), UpdateMany({}, {"$inc": {"n": 1}})], session=session))
        assert await done(collection.count_documents({}, session=session)) == 7
        await done(session.commit_transaction())

    assert [document["_id"] for document in ground.documents()] == [1, 2, 3, 10, 11, 12, 13]
    assert len({(lsid, number) for lsid, number, _ in addresses(ground.log)}) == 1
    assert record.effect()


async def ended(session: Any) -> None:
    """End a session of either API."""
    await done(session.end_session())


async def test_outside_a_record_a_lost_reply_is_the_drivers_business(ground: Ground) -> None:
    ground.prepare(ground.name, INC)
    client = ground.connect(ground.proxy.uri())
    ground.proxy.arm(mode="close", times=2, command="update")

    exc = await answer_of(lambda: client[ground.name].c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    assert type(exc) is AutoReconnect
    assert not hasattr(exc, "saferetry")
    assert not getattr(exc, "__notes__", [])
    assert ground.log.sends("update") == DRIVER_SENDS
    assert ground.log.sends("killSessions") == 0


async def test_every_reply_lost_is_given_up_unknown_with_the_effect_once(ground: Ground) -> None:
    run = await ground.disturbed(INC, Fault("close", 100))

    assert type(run.answer) is AutoReconnect
    assert report_of(run.answer).decision == "attempts"
    assert len(report_of(run.answer).waits) == 3
    (view,) = run.writes
    assert (view.outcome, view.calls, view.sends) == (Outcome.UNKNOWN, 4, 4 * DRIVER_SENDS)
    assert ground.log.sends("update") == 4 * DRIVER_SENDS
    assert ground.left.c.find_one({"_id": 1}) == {**STOCK[0], "n": 2}


async def test_a_multi_member_stops_the_bulk_and_tells_what_was_done(ground: Ground) -> None:
    row = Row(
        "bulk",
        lambda c: c.bulk_write(
            [
                InsertOne({"_id": 10}),
                InsertOne({"_id": 11}),
                UpdateMany({}, {"$inc": {"n": 1}}),
                InsertOne({"_id": 12}),
            ]
        ),
        ("insert", "update", "insert"),
    )
    run = await ground.disturbed(row, Fault("close", 1), place=1)

    assert refused(run.answer)
    assert report_of(run.answer).done == 2
    assert ground.log.sends("insert") == 1
    assert ground.log.sends("update") == 1
    assert {document["_id"]: document["n"] for document in ground.documents()} == {1: 2, 2: 3, 3: 4, 10: 1, 11: 1}
    assert run.writes[0].outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("place", [0, 2])
async def test_a_multi_member_takes_no_protection_from_the_others(place: int, ground: Ground) -> None:
    row = Row(
        "bulk",
        lambda c: c.bulk_write([InsertOne({"x": 1}), UpdateMany({}, {"$inc": {"n": 1}}), InsertOne({"x": 2})]),
        ("insert", "update", "insert"),
    )
    run = await ground.disturbed(row, LOST_TWICE, place=place)

    assert run.seen == await ground.undisturbed(row)
    assert ["txnNumber" in command for command in ground.log.commands("update")] == [False]
    assert all("txnNumber" in command for command in ground.log.commands("insert"))


async def test_an_error_reply_to_a_multi_write_leaves_as_it_is(ground: Ground) -> None:
    row = Row("update_many-wrong", lambda c: c.update_many({}, {"$inc": {"tags": 1}}), ("update",))
    run = await ground.disturbed(row, Fault("close", 0))

    assert isinstance(run.answer, OperationFailure)
    assert run.answer.code == 14  # TypeMismatch
    assert ground.log.sends("update") == 1
    assert run.seen == await ground.undisturbed(row)


async def test_what_is_refused_stops_the_handler_from_running_again(ground: Ground) -> None:
    ground.prepare(ground.name, UPDATE_MANY)
    client = ground.connect(ground.proxy.uri())
    executions = []

    @saferetry.handler(key=lambda message: RecordKey("orders", 0, message), retry_on=(AutoReconnect,), name="orders")
    async def on_message(message: int) -> None:
        executions.append(message)
        await done(client[ground.name].c.update_many({}, {"$inc": {"n": 1}}))

    ground.proxy.arm(mode="close", times=1, command="update")
    exc = await answer_of(lambda: on_message(1))

    assert isinstance(exc, saferetry.errors.RetryRefusedError)
    assert refused(exc.__cause__)
    assert executions == [1]
    assert ground.log.sends("update") == 1
