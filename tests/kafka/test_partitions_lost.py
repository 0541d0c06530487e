"""A record that is told that its partition was taken away: it writes no more, and nothing of it is committed."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import pytest
from pymongo.errors import PyMongoError

from saferetry import Failure, Outcome, RecordKey, WriteView, current_record, record
from saferetry.errors import PartitionLostError
from saferetry.kafka import apartitions_lost, partitions_lost
from tests.support import CommandLog, copies, hold_inserts, random_name, running
from tests.support.driving import ProxyFactory, done, quick
from tests.transaction.scene import KEY, Scene, names

Guarantee = Literal["process", "transaction"]
both = pytest.mark.parametrize("guarantee", ["process", "transaction"])
OURS = [(KEY.stream, KEY.partition)]


async def lose(scene: Scene, partitions: Any = OURS, group: str = KEY.group) -> None:
    """Tell that partitions were taken away, as a rebalance callback of a sync or an async consumer does."""
    if scene.api.is_async:
        await apartitions_lost(partitions, group)
    else:
        partitions_lost(partitions, group)


@both
async def test_no_write_is_sent_after_the_loss(scene: Scene, log: CommandLog, guarantee: Guarantee) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 1}))
        await lose(scene)
        await done(database.c.insert_one({"_id": 2}))

    recovered: list[Failure] = []
    with pytest.raises(PartitionLostError, match=r"partition of record on_order \(orders/0/7\) was taken away"):
        await scene.deliver(on_order, scene.client(log=log), guarantee=guarantee, recoverer=recovered.append)
    assert recovered == []
    expected = {"process": [1], "transaction": []}[guarantee]
    assert [document["_id"] for document in scene.documents()] == expected
    inserts = {"process": ["insert"], "transaction": ["insert", "insert", "abortTransaction"]}[guarantee]
    assert names(log) == inserts
    assert scene.markers() == []


@both
async def test_a_handler_that_passes_the_refusal_over_does_not_pass_for_done(scene: Scene, guarantee: Guarantee) -> None:
    async def on_order(database: Any) -> None:
        await lose(scene)
        with contextlib.suppress(PartitionLostError):
            await done(database.c.insert_one({"_id": 1}))

    with pytest.raises(PartitionLostError):
        await scene.deliver(on_order, guarantee=guarantee)
    assert scene.documents() == []
    assert scene.markers() == []


async def test_a_loss_after_the_last_write_is_not_committed(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 1}))
        await lose(scene)

    with pytest.raises(PartitionLostError):
        await scene.deliver(on_order, scene.client(log=log))
    assert "commitTransaction" not in names(log)
    assert scene.documents() == scene.markers() == []


async def test_a_loss_before_the_first_operation_begins_nothing(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await lose(scene)
        await done(database.c.find_one({}))

    with pytest.raises(PartitionLostError):
        await scene.deliver(on_order, scene.client(log=log), lazily=True)
    assert names(log) == []


async def test_a_commit_that_was_sent_already_is_brought_to_its_end(scene: Scene, proxy: ProxyFactory) -> None:
    """Repeating a commit writes nothing new, and its marker tells the partition's next consumer."""

    def told() -> None:
        partitions_lost(OURS, KEY.group)

    async def on_order(database: Any) -> str:
        await done(database.c.insert_one({"_id": 1}))
        return "done"

    losing = proxy(command="commitTransaction", mode="close", times=2, on_hit=told)
    assert await scene.deliver(on_order, scene.client(losing.uri())) == "done"
    assert [document["_id"] for document in scene.documents()] == [1]
    assert len(scene.markers()) == 1


async def test_a_write_that_lost_its_reply_is_not_sent_again(scene: Scene, proxy: ProxyFactory, log: CommandLog) -> None:
    views: list[WriteView] = []

    def told() -> None:
        partitions_lost(OURS, KEY.group)

    async def on_order(database: Any) -> None:
        current = current_record()
        assert current is not None
        try:
            await done(database.c.insert_one({"_id": 1}))
        finally:
            views.extend(current.writes)

    losing = proxy(command="insert", mode="close", times=2, on_hit=told)
    with pytest.raises(PartitionLostError):
        await scene.deliver(on_order, scene.client(losing.uri(), log=log), guarantee="process")
    assert names(log).count("insert") == 2  # the driver's own
    assert [(view.outcome, view.calls) for view in views] == [(Outcome.UNKNOWN, 1)]


async def test_a_doomed_execution_is_not_followed_by_another(scene: Scene, proxy: ProxyFactory) -> None:
    def told() -> None:
        partitions_lost(OURS, KEY.group)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$set": {"seen": True}}, upsert=True))

    losing = proxy(command="update", mode="close", times=1, on_hit=told)
    with pytest.raises(PartitionLostError):
        await scene.deliver(on_order, scene.client(losing.uri()))
    assert scene.runs == 1
    assert scene.documents() == scene.markers() == []


@both
async def test_a_handler_is_not_executed_again(scene: Scene, guarantee: Guarantee) -> None:
    async def on_order(database: Any) -> None:
        await lose(scene)
        raise ConnectionError

    with pytest.raises(PartitionLostError):
        await scene.deliver(on_order, lazily=True, guarantee=guarantee, retry_on=ConnectionError)
    assert scene.runs == 1


@both
async def test_what_the_server_is_at_work_on_is_cancelled(scene: Scene, guarantee: Guarantee) -> None:
    name = random_name("app")
    client = scene.client(appName=name, settings=quick(marker_database=scene.name))
    await done(client[scene.name].c.insert_one({"_id": 0}))

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 1}))

    async def consumer() -> None:
        with pytest.raises((PartitionLostError, PyMongoError)):
            await scene.deliver(on_order, client, guarantee=guarantee)

    async def rebalance() -> None:
        await scene.until(lambda: copies(running(scene.admin, name)))
        await lose(scene)
        await scene.until(lambda: not copies(running(scene.admin, name)))

    with hold_inserts(scene.admin, f"{scene.name}.c", interruptible=True):
        ends = await scene.together(consumer, rebalance)
    assert ends == [None, None]
    assert [document["_id"] for document in scene.documents()] == [0]
    assert scene.markers() == []


async def test_a_record_inside_the_one_that_lost_its_partition_writes_no_more(scene: Scene) -> None:
    collection = scene.client()[scene.name].c
    with pytest.raises(PartitionLostError), record(KEY), record("inner"):
        await lose(scene)
        await done(collection.insert_one({}))
    assert scene.documents() == []


@pytest.mark.parametrize(("partitions", "group"), [([("orders", 1)], "g"), ([("bills", 0)], "g"), (OURS, "another"), ([], "g")])
async def test_another_partition_or_group_does_not_concern_it(scene: Scene, partitions: Any, group: str) -> None:
    collection = scene.client()[scene.name].c
    with record(KEY):
        await lose(scene, partitions, group)
        await done(collection.insert_one({"_id": 1}))
    assert [document["_id"] for document in scene.documents()] == [1]


async def test_a_record_that_begins_when_the_partition_is_back_is_not_concerned(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 1}))

    await lose(scene)
    await scene.deliver(on_order)
    assert [document["_id"] for document in scene.documents()] == [1]


async def test_a_record_without_a_key_has_no_partition(scene: Scene) -> None:
    collection = scene.client()[scene.name].c
    with record():
        await lose(scene)
        await done(collection.insert_one({"_id": 1}))
    assert [document["_id"] for document in scene.documents()] == [1]


async def test_a_command_past_the_guarded_methods_is_refused_too(scene: Scene) -> None:
    client = scene.client()
    with pytest.raises(PartitionLostError), record(KEY):
        await lose(scene)
        await done(client[scene.name].command("insert", "c", documents=[{"_id": 1}]))
    assert scene.documents() == []


async def test_reads_outside_a_transaction_go_on(scene: Scene) -> None:
    collection = scene.client()[scene.name].c
    with record(RecordKey("orders", 0, 7, group="g")):
        await lose(scene)
        assert await done(collection.find_one({})) is None
