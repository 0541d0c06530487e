"""Where no transaction number goes out (retryWrites=false, a standalone): inserts are protected by the `_id` made for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import InsertOne, MongoClient, UpdateOne
from pymongo.errors import AutoReconnect, BulkWriteError

import saferetry
from saferetry import Outcome, Settings
from saferetry.errors import UnprotectedWriteError
from tests.matrix.rows import FIND_ONE_AND_UPDATE, INC, INSERT_ONE, raw
from tests.matrix.runner import WRITE_COMMANDS, Fault, Ground, Row, addresses, answer_of, report_of, seen
from tests.support import CommandLog, Mongod, Proxy, random_name

INSERT = ("insert",)


@pytest.fixture(params=["retryWrites=false", "standalone"])
def unnumbered(request: pytest.FixtureRequest, log: CommandLog, guarded: Any, proxy: Callable[..., Proxy]) -> Iterator[Ground]:
    """The ground on a server, or with a client, without retryable writes."""
    is_standalone = request.param == "standalone"
    server: Mongod = request.getfixturevalue("standalone" if is_standalone else "mongod")

    def connect(uri: str, **options: Any) -> Any:
        return guarded(uri, **({} if is_standalone else {"retryWrites": False}), **options)

    name = random_name("test")
    with MongoClient[dict[str, Any]](server.uri) as admin:
        yield Ground(server, admin, log, proxy(target_port=server.port), connect, name)
        for database in (admin[name], admin[name + "_plain"]):
            for collection in database.list_collection_names():
                database.drop_collection(collection)


PROTECTED = (
    INSERT_ONE,
    Row("insert_one-duplicate_key", lambda c: c.insert_one({"n": 1}), INSERT, unique="n"),
    Row("insert_many", lambda c: c.insert_many([{"x": 1}, {"x": 2}, {"x": 3}]), INSERT),
    Row("insert_many-unordered", lambda c: c.insert_many([{"x": 1}, {"x": 2}, {"x": 3}], ordered=False), INSERT),
    Row("insert_many-generator", lambda c: c.insert_many({"x": x} for x in range(3)), INSERT),
    Row("insert_many-failing", lambda c: c.insert_many([{"n": 10}, {"n": 1}, {"n": 12}]), INSERT, unique="n"),
    Row("insert_many-failing_at_once", lambda c: c.insert_many([{"n": 1}, {"n": 12}]), INSERT, unique="n"),
    Row(
        "insert_many-unordered-failing",
        lambda c: c.insert_many([{"n": 10}, {"n": 1}, {"n": 12}, {"n": 2}, {"n": 14}], ordered=False),
        INSERT,
        unique="n",
    ),
    Row("bulk_write", lambda c: c.bulk_write([InsertOne({"x": 1}), InsertOne({"x": 2})]), INSERT),
    Row(
        "bulk_write-failing",
        lambda c: c.bulk_write([InsertOne({"n": 10}), InsertOne({"n": 1}), UpdateOne({"_id": 1}, {"$inc": {"n": 50}})]),
        INSERT,
        unique="n",
    ),
    Row(
        "bulk_write-mixed",
        lambda c: c.bulk_write(
            [InsertOne({"x": 1}), InsertOne({"x": 2}), UpdateOne({"_id": 1}, {"$inc": {"n": 1}}), InsertOne({"x": 3})]
        ),
        ("insert", "update", "insert"),
    ),
)
CELLS = [
    pytest.param(row, place, fault, id=f"{row}-{place}-{fault}")
    for row in PROTECTED
    for place, command in enumerate(row.commands)
    if command == "insert"
    for fault in (Fault("close", 1), Fault("close", 2), Fault("cut", 1), Fault("cut", 2))
    if fault.times == 1 or row.name in ("insert_one", "insert_many", "insert_many-unordered-failing")
]


@pytest.mark.parametrize(("row", "place", "fault"), CELLS)
async def test_inserts_without_id_have_their_effect_once(row: Row, place: int, fault: Fault, unnumbered: Ground) -> None:
    run = await unnumbered.disturbed(row, fault, place=place)

    assert unnumbered.proxy.hits == fault.times
    assert run.seen == await unnumbered.undisturbed(row)
    if not isinstance(run.answer, Exception):  # else the first copy could still be on its way: nobody waits for it
        assert run.writes[0].outcome is Outcome.APPLIED
    sent = unnumbered.log.commands(*WRITE_COMMANDS)
    assert run.writes[0].sends == len(sent)
    assert not any("txnNumber" in command for command in sent)
    statements = max(len(command["documents"]) for command in unnumbered.log.commands("insert"))
    assert len(sent) <= len(row.commands) + fault.times + statements  # ordered: on from behind what was there already


async def test_many_inserts_with_a_loss_at_each_command(unnumbered: Ground) -> None:
    row = Row("many", lambda c: c.insert_many([{"x": x} for x in range(2_500)], ordered=False), INSERT * 3)
    run = await unnumbered.each_lost(row, times=1)

    assert run.seen == await unnumbered.undisturbed(row)
    assert run.writes[0].sends == unnumbered.log.sends("insert") == 6


async def test_many_ordered_inserts_with_a_loss_are_made_up_for_in_the_bound(unnumbered: Ground) -> None:
    """An ordered insert stops at the first document that is there already: what follows it must not cost a send each."""
    row = Row("many", lambda c: c.insert_many([{"x": x} for x in range(300)]), INSERT)
    run = await unnumbered.disturbed(row, Fault("close", 1))

    assert run.seen == await unnumbered.undisturbed(row)
    assert unnumbered.log.sends("insert") < 20


async def test_what_makes_up_for_a_loss_may_get_lost_too(unnumbered: Ground) -> None:
    row = Row("lossy", lambda c: c.insert_many([{"n": n} for n in (10, 11, 1, 13)]), INSERT, unique="n")
    unnumbered.prepare(unnumbered.name, row)
    client = unnumbered.connect(unnumbered.proxy.uri())
    unnumbered.proxy.arm(mode="close", times=100, command="insert", skip=-1, every=2)  # the first, the third, ...
    async with saferetry.record():
        answer = await answer_of(lambda: row.call(client[unnumbered.name].c))

    assert unnumbered.proxy.hits > 1
    assert seen(unnumbered.left, answer) == await unnumbered.undisturbed(row)


REFUSED = (
    INC,
    FIND_ONE_AND_UPDATE,
    Row("insert_one-own_id", lambda c: c.insert_one({"_id": 10}), INSERT),
    Row("insert_one-raw", lambda c: c.insert_one(raw({"x": 1})), INSERT),
    Row("insert_many-own_id", lambda c: c.insert_many([{"x": 1}, {"_id": 10}]), INSERT),
    Row("insert_many-raw", lambda c: c.insert_many([{"x": 1}, raw({"x": 2})]), INSERT),
    Row("replace_one", lambda c: c.replace_one({"_id": 1}, {"x": 1}), ("update",)),
    Row("delete_one", lambda c: c.delete_one({"_id": 1}), ("delete",)),
    Row("update_many", lambda c: c.update_many({}, {"$inc": {"n": 1}}), ("update",)),
    Row("bulk_write", lambda c: c.bulk_write([UpdateOne({"_id": 1}, {"$inc": {"n": 1}})]), ("update",)),
)


@pytest.mark.parametrize("mode", ["close", "cut"])
@pytest.mark.parametrize("row", REFUSED, ids=str)
async def test_everything_else_is_sent_once_and_refused(row: Row, mode: Any, unnumbered: Ground) -> None:
    run = await unnumbered.disturbed(row, Fault(mode, 1))

    assert type(run.answer) is AutoReconnect
    assert report_of(run.answer).decision == "refused"
    assert run.writes[0].outcome is Outcome.UNKNOWN
    (sent,) = unnumbered.log.commands(*WRITE_COMMANDS)
    assert "txnNumber" not in sent
    lost = Row("nothing", lambda c: None, (), row.setup) if mode == "cut" else row
    assert run.seen.left == (await unnumbered.undisturbed(lost)).left


async def test_a_duplicate_of_somebody_elses_is_no_success(unnumbered: Ground) -> None:
    """Only the `_id` made for this call proves its first copy; another unique key proves nothing."""
    row = Row("other_key", lambda c: c.insert_one({"n": 1}), INSERT, unique="n")
    run = await unnumbered.disturbed(row, Fault("cut", 1))

    assert run.seen == await unnumbered.undisturbed(row)
    assert run.seen.answer["error"] == "DuplicateKeyError"
    assert run.writes[0].outcome is Outcome.UNKNOWN  # the first copy could still be on its way: nobody waits for it


async def test_failing_members_keep_their_places(unnumbered: Ground) -> None:
    row = Row(
        "places",
        lambda c: c.insert_many([{"n": place} for place in (10, 11, 12, 1, 14, 2)], ordered=False),
        INSERT,
        unique="n",
    )
    run = await unnumbered.disturbed(row, Fault("close", 1))

    assert isinstance(run.answer, BulkWriteError)
    assert [entry["index"] for entry in run.answer.details["writeErrors"]] == [3, 5]
    assert run.answer.details["nInserted"] == 4


async def test_strict_refuses_to_send_without_a_number(unnumbered: Ground) -> None:
    run = await unnumbered.disturbed(INC, Fault("close", 0), settings=Settings(strict=True))

    assert isinstance(run.answer, UnprotectedWriteError)
    assert unnumbered.log.sends(*WRITE_COMMANDS) == 0
    assert run.writes[0].outcome is Outcome.NOT_SENT


async def test_undisturbed_it_is_plain_pymongo(unnumbered: Ground) -> None:
    run = await unnumbered.disturbed(INC, Fault("close", 0))

    assert run.seen == await unnumbered.undisturbed(INC)
    assert unnumbered.log.sends("update") == 1
    with pytest.raises(KeyError):
        addresses(unnumbered.log)
