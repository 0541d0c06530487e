"""The table of docs/deployments.md, cell by cell."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo import UpdateOne
from pymongo.errors import AutoReconnect
from pymongo.write_concern import WriteConcern

from saferetry import Outcome, RecordKey, record, repeatable
from saferetry.errors import ConfigurationError, RetryRefusedError, UnprotectedWriteError
from tests.deployments.conftest import NAMES, NUMBERED, UNACKNOWLEDGED, UNNUMBERED, Deployment, on
from tests.support import eventually
from tests.support.driving import done

KEY = RecordKey("orders", 0, 7, group="g", digest=b"content")
WRITE_COMMANDS = ("insert", "update", "delete", "findAndModify")
BEFORE = [{"n": 1}, {"n": 2}]

# what is called, the command that it sends, and what is stored when it has its effect once
INSERTS = {
    "insert_one": (lambda c: c.insert_one({"n": 3}), "insert", [*BEFORE, {"n": 3}]),
    "insert_many": (lambda c: c.insert_many([{"n": 3}, {"n": 4}]), "insert", [*BEFORE, {"n": 3}, {"n": 4}]),
}
SINGLES = {
    "update_one": (lambda c: c.update_one({"n": 2}, {"$inc": {"n": 1}}), "update", [{"n": 1}, {"n": 3}]),
    "delete_one": (lambda c: c.delete_one({"n": 2}), "delete", [{"n": 1}]),
    "find_one_and_update": (
        lambda c: c.find_one_and_update({"n": 2}, {"$inc": {"n": 1}}),
        "findAndModify",
        [{"n": 1}, {"n": 3}],
    ),
    "bulk_write of updates": (
        lambda c: c.bulk_write([UpdateOne({"n": 2}, {"$inc": {"n": 1}})]),
        "update",
        [{"n": 1}, {"n": 3}],
    ),
}
MULTIS = {
    "update_many": (lambda c: c.update_many({}, {"$inc": {"n": 1}}), "update", [{"n": 2}, {"n": 3}]),
    "delete_many": (lambda c: c.delete_many({}), "delete", []),
}
WRITES: dict[str, Any] = {**INSERTS, **SINGLES, **MULTIS}


# a write whose reply is lost


@pytest.mark.parametrize("write", [*INSERTS, *SINGLES])
@on(*NUMBERED)
async def test_one_documents_write_is_sent_again_and_done_once(deployment: Deployment, write: str) -> None:
    call, command, after = WRITES[write]
    collection = deployment.collection()
    deployment.proxy.arm(command=command, times=2)
    with record(KEY) as current:
        await done(call(collection))
    assert deployment.proxy.hits == 2
    assert [(view.outcome, view.sends) for view in current.writes] == [(Outcome.APPLIED, 3)]
    assert deployment.documents() == after


@pytest.mark.parametrize("write", INSERTS)
@on(*UNNUMBERED)
async def test_without_numbers_an_insert_is_sent_again_and_done_once(deployment: Deployment, write: str) -> None:
    call, command, after = WRITES[write]
    collection = deployment.collection()
    deployment.proxy.arm(command=command, times=2)
    with record(KEY) as current:
        await done(call(collection))
    assert deployment.proxy.hits == 2
    assert [view.outcome for view in current.writes] == [Outcome.APPLIED]
    assert deployment.documents() == after


@pytest.mark.parametrize("write", SINGLES)
@on(*UNNUMBERED)
async def test_without_numbers_another_write_is_sent_once_and_the_error_says_so(deployment: Deployment, write: str) -> None:
    await told_to_be_unknown(deployment, write)


@pytest.mark.parametrize("write", MULTIS)
@on(*NUMBERED, *UNNUMBERED)
async def test_a_write_of_many_documents_is_sent_once_and_the_error_says_so(deployment: Deployment, write: str) -> None:
    await told_to_be_unknown(deployment, write)


async def told_to_be_unknown(deployment: Deployment, write: str) -> None:
    call, command, after = WRITES[write]
    collection = deployment.collection()
    deployment.proxy.arm(command=command, times=2)
    with record(KEY) as current, pytest.raises(AutoReconnect) as caught:
        await done(call(collection))
    assert "could take effect twice" in caught.value.__notes__[0]
    assert deployment.proxy.hits == deployment.log.sends(command) == 1
    assert [view.outcome for view in current.writes] == [Outcome.UNKNOWN]
    assert deployment.documents() == after


@pytest.mark.parametrize("write", WRITES)
@on(*UNACKNOWLEDGED)
async def test_an_unacknowledged_write_is_sent_once_and_nobody_knows(deployment: Deployment, write: str) -> None:
    call, _, after = WRITES[write]
    collection = deployment.collection()
    with record(KEY) as current:
        await done(call(collection))
    assert [(view.outcome, view.sends) for view in current.writes] == [(Outcome.UNVERIFIABLE, 1)]
    assert deployment.log.sends(*WRITE_COMMANDS) == 1
    eventually(lambda: deployment.documents() == after)


# a handler that is executed again


@on(*NAMES)
async def test_a_handler_that_has_written_is_not_executed_again(deployment: Deployment) -> None:
    collection = deployment.collection()
    executions: list[int] = []

    @deployment.api.handler(key=KEY, retry_on=LookupError)
    async def on_order(order: int) -> None:
        executions.append(order)
        await done(collection.insert_one({"n": 3}))
        raise LookupError

    with pytest.raises(RetryRefusedError):
        await done(on_order(7))
    assert executions == [7]
    eventually(lambda: deployment.documents() == [*BEFORE, {"n": 3}])


# guarantee "transaction"


@pytest.mark.parametrize("write", WRITES)
@on(*NUMBERED, "retryWrites=false")
async def test_a_record_in_a_transaction_is_done_once(deployment: Deployment, write: str) -> None:
    call, command, after = WRITES[write]
    for loses in (True, False):
        client = deployment.client(deployment.with_markers())
        collection = deployment.of(client)

        @deployment.api.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
        async def on_order(order: int, collection: Any = collection) -> None:
            await done(call(collection))

        deployment.proxy.arm(deployment.database.encode(), "close", 2, command=command, skip=1 if command == "insert" else 0)
        await done(on_order(7))
        assert deployment.proxy.hits == (2 if loses else 0)
    assert deployment.documents() == after


@pytest.mark.parametrize("times", [1, 3])
@on(*NUMBERED, "retryWrites=false")
async def test_a_commit_whose_reply_is_lost_is_done_once(deployment: Deployment, times: int) -> None:
    client = deployment.client(deployment.with_markers())
    runs: list[int] = []

    @deployment.api.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
    async def on_order(order: int) -> None:
        runs.append(order)
        await done(deployment.of(client).update_many({}, {"$inc": {"n": 1}}))

    deployment.proxy.arm(command="commitTransaction", times=times)
    for _ in range(2):
        await done(on_order(7))
    assert (deployment.proxy.hits, runs) == (times, [7])
    assert deployment.documents() == [{"n": 2}, {"n": 3}]


@on("standalone")
async def test_a_standalone_refuses_a_transaction(deployment: Deployment) -> None:
    client = deployment.client(deployment.with_markers())

    @deployment.api.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
    async def on_order(order: int) -> None:
        raise AssertionError("it must not run")

    with pytest.raises(ConfigurationError, match="needs a replica set, which may have one node"):
        await done(on_order(7))
    assert deployment.documents() == BEFORE
    assert deployment.there[deployment.database].saferetry_records.count_documents({}) == 0


@pytest.mark.parametrize("write", WRITES)
@on(*UNACKNOWLEDGED)
async def test_an_unacknowledged_write_is_refused_in_a_transaction_before_it_is_sent(
    deployment: Deployment, write: str
) -> None:
    call, command, _ = WRITES[write]
    client = deployment.client(deployment.with_markers())

    @deployment.api.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
    async def on_order(order: int) -> None:
        await done(call(deployment.of(client)))

    with pytest.raises(ConfigurationError, match="write concern 0 asks nobody"):
        await done(on_order(7))
    sent = [sent for sent in deployment.log.commands(command) if sent[command] == "c"]
    assert sent == []
    assert deployment.documents() == BEFORE


@on("w=0 in the URI")
async def test_an_acknowledged_collection_of_an_unacknowledged_client_joins_a_transaction(deployment: Deployment) -> None:
    client = deployment.client(deployment.with_markers())

    @deployment.api.handler(key=KEY, guarantee="transaction", client=client, name="on_order")
    async def on_order(order: int) -> None:
        await done(deployment.of(client).with_options(write_concern=WriteConcern(1)).insert_one({"n": 3}))

    for _ in range(2):
        await done(on_order(7))
    assert deployment.documents() == [*BEFORE, {"n": 3}]


# strict


@pytest.mark.parametrize("write", WRITES)
@on(*UNNUMBERED, *UNACKNOWLEDGED)
async def test_strict_refuses_before_sending(deployment: Deployment, write: str) -> None:
    call, _, _ = WRITES[write]
    collection = deployment.collection(deployment.with_markers(strict=True))
    with record(KEY) as current, pytest.raises(UnprotectedWriteError):
        await done(call(collection))
    assert not current.effect()
    assert deployment.log.sends(*WRITE_COMMANDS) == 0
    assert deployment.documents() == BEFORE


@pytest.mark.parametrize("write", [*INSERTS, *SINGLES])
@on(*NUMBERED)
async def test_strict_lets_protected_writes_through(deployment: Deployment, write: str) -> None:
    call, _, after = WRITES[write]
    with record(KEY):
        await done(call(deployment.collection(deployment.with_markers(strict=True))))
    assert deployment.documents() == after


@on(*NAMES)
async def test_strict_lets_repeatable_writes_and_reads_through(deployment: Deployment) -> None:
    collection = deployment.collection(deployment.with_markers(strict=True))
    with record(KEY):
        with repeatable():
            await done(collection.update_one({"n": 2}, {"$set": {"n": 3}}))
        assert await done(collection.count_documents({"n": 1})) == 1
    eventually(lambda: deployment.documents() == [{"n": 1}, {"n": 3}])


# what an old server does not know


@on("replica set", "standalone")
async def test_a_write_is_tagged_where_the_server_takes_a_comment(deployment: Deployment) -> None:
    """From 4.4 on; an older one would refuse the command."""
    takes_comments = tuple(map(int, deployment.server.version.split(".")[:2])) >= (4, 4)
    collection = deployment.collection()
    with record(KEY):
        await done(collection.insert_one({"n": 3}))
        await done(collection.update_one({"n": 3}, {"$inc": {"n": 1}}))
        await done(collection.find_one_and_update({"n": 4}, {"$inc": {"n": 1}}))
        await done(collection.delete_one({"n": 1}))
    sent = deployment.log.commands(*WRITE_COMMANDS)
    assert ["comment" in command for command in sent] == [takes_comments] * 4
    assert deployment.documents() == [{"n": 2}, {"n": 5}]
