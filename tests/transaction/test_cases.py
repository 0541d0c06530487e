"""The cases that a whole record decides: redelivered, reused keys, lost commits (see tests/cases for the others)."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gridfs
import pytest
from bson.objectid import ObjectId
from pymongo.errors import NotPrimaryError, WTimeoutError

from saferetry import Failure, prepare_gridfs
from saferetry.errors import KeyReusedError, UnprotectedWriteError
from saferetry.kafka import kafka_key
from tests.support import CommandLog, app_name, fail_command
from tests.support.driving import ProxyFactory, done, quick
from tests.support.older import HELD_SECONDS
from tests.transaction.scene import Scene, in_transaction, names, only_async, only_sync, without_ids


@dataclass
class Message:
    """What the key callable sees of a confluent_kafka.Message."""

    content: bytes
    position: int = 5
    stream: str = "orders"

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return self.stream

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.position

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_000

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return self.content


# R21, second half


async def test_r21_a_record_whose_inserts_failed_is_not_committed_and_done_when_it_is_redelivered(scene: Scene) -> None:
    name = app_name()
    client = scene.client(appName=name)
    committed = []

    async def on_item(database: Any) -> None:
        await done(database.c.insert_one({"item": 1}))

    failure: dict[str, Any] = {"errorCode": 10107, "errorLabels": ["RetryableWriteError"]}
    with (
        fail_command(scene.admin, app_name=name, commands=["insert"], times=50, **failure),
        pytest.raises(NotPrimaryError),
    ):
        await scene.deliver(on_item, client, budget=0.3)
        committed.append(1)
    assert committed == []
    assert scene.documents() == []
    await scene.deliver(on_item)
    assert without_ids(scene.documents()) == [{"item": 1}]


# R36


async def test_r36_another_order_under_the_offset_of_one_that_was_done_is_an_error(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": scene.runs}))

    make_key = kafka_key("orders-consumer")
    await scene.deliver(on_order, key=make_key(Message(b'{"order": 1}')))
    with pytest.raises(KeyReusedError):
        await scene.deliver(on_order, key=make_key(Message(b'{"order": 2}')))
    assert scene.documents() == [{"_id": 1}]


async def test_r36_the_recoverer_has_an_order_under_the_offset_of_another(scene: Scene) -> None:
    recovered: list[Failure] = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": scene.runs}))

    make_key = kafka_key("orders-consumer")
    await scene.deliver(on_order, key=make_key(Message(b'{"order": 1}')))
    await scene.deliver(on_order, key=make_key(Message(b'{"order": 2}')), recoverer=recovered.append)
    assert [failure.reason for failure in recovered] == ["key_reused"]


async def test_r36_with_another_epoch_both_orders_are_there(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": scene.runs}))

    await scene.deliver(on_order, key=kafka_key("orders-consumer")(Message(b'{"order": 1}')))
    for _ in range(2):
        await scene.deliver(on_order, key=kafka_key("orders-consumer", epoch="2")(Message(b'{"order": 2}')))
    assert scene.documents() == [{"_id": 1}, {"_id": 2}]


# R38


async def test_r38_three_intended_inserts_two_of_them_equal_are_three_and_stay_three(scene: Scene) -> None:
    async def on_batch(database: Any) -> None:
        for letter in "aba":
            await done(database.c.insert_one({"k": letter}))

    for _ in range(2):
        await scene.deliver(on_batch)
    assert without_ids(scene.documents()) == [{"k": "a"}, {"k": "b"}, {"k": "a"}]


# R41


async def test_r41_a_document_that_is_another_one_in_each_run_is_that_of_the_first(scene: Scene) -> None:
    made: list[dict[str, Any]] = []

    async def on_order(database: Any) -> None:
        document = {
            "_id": ObjectId(),
            "order": 7,
            "ts": dt.datetime.now(dt.UTC).replace(microsecond=0, tzinfo=None),
            "u": uuid.uuid4().hex,
        }
        made.append(dict(document))
        await done(database.c.insert_one(document))

    for lazily in (False, False, True):
        await scene.deliver(on_order, lazily=lazily)
    assert scene.documents() == made[:1]


# R43, second half


async def test_r43_inserts_of_a_pool_bound_to_the_record_are_there_once_after_two_deliveries(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        async def insert(number: int) -> None:
            await done(database.c.insert_one({"i": number}))

        await scene.at_once(insert, 2)

    for _ in range(2):
        await scene.deliver(on_order)
    assert len(scene.documents()) == 2


@only_sync
async def test_r43_inserts_of_a_pool_that_is_not_bound_are_warned_of(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async def on_order(database: Any) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda number: database.c.insert_one({"i": number}), range(2)))

    with caplog.at_level(logging.WARNING, "saferetry"):
        for _ in range(2):
            await scene.deliver(on_order)
    assert len(scene.documents()) == 2
    assert any("outside any record" in message for message in caplog.messages)


@only_sync
async def test_r43_strict_refuses_inserts_of_a_pool_that_is_not_bound(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda number: database.c.insert_one({"i": number}), range(2)))

    with pytest.raises(UnprotectedWriteError):
        await scene.deliver(on_order, scene.client(settings=quick(strict=True)))
    assert scene.documents() == scene.markers() == []


# R53


async def test_r53_a_commit_whose_reply_is_lost_twice_is_repeated_alone_on_its_session(
    scene: Scene, proxy: ProxyFactory, log: CommandLog
) -> None:
    scene.there.c.insert_one({"_id": 1, "n": 0})
    lossy = proxy(command="commitTransaction", times=2)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    await scene.deliver(on_order, scene.client(lossy.uri(), log=log))
    assert (lossy.hits, scene.runs) == (2, 1)
    assert scene.documents() == [{"_id": 1, "n": 1}]
    assert names(log) == ["insert", "update", *["commitTransaction"] * 3]
    assert len(in_transaction(log)) == 1


# R55


async def test_r55_a_commit_that_ran_out_of_time_is_repeated_alone_and_has_no_limit_of_ours(
    scene: Scene, log: CommandLog
) -> None:
    scene.there.c.insert_one({"_id": 1, "n": 0})
    name = app_name()
    client = scene.client(log=log, appName=name)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with fail_command(scene.admin, app_name=name, commands=["commitTransaction"], times=1, errorCode=50):
        await scene.deliver(on_order, client)
    assert scene.runs == 1
    assert scene.documents() == [{"_id": 1, "n": 1}]
    assert ["maxTimeMS" in command for command in log.commands("commitTransaction")] == [False, False]


# R70, second half


@only_async
async def test_r70_an_insert_that_its_handler_gave_up_waiting_for_is_there_once_after_a_redelivery(
    scene: Scene, hasty: None
) -> None:
    name = app_name()
    client = scene.client(appName=name)

    async def on_order(database: Any) -> None:
        await asyncio.wait_for(database.c.insert_one({"order": 1}), 0.2)

    await scene.deliver(on_order, key=("warm", 0, 1), digest=lambda _: b"x")
    scene.there.c.delete_many({})
    with fail_command(scene.admin, app_name=name, commands=["insert"], times=1, blockConnection=True, blockTimeMS=600):
        await scene.deliver(on_order, client)
    await scene.deliver(on_order)
    await asyncio.sleep(0.6)
    assert without_ids(scene.documents()) == [{"order": 1}]


@only_async
@pytest.mark.parametrize("command", ["insert", "commitTransaction"])
async def test_r70_a_record_that_was_cancelled_is_there_once_after_a_redelivery(
    scene: Scene, hasty: None, command: str
) -> None:
    name = app_name()
    client = scene.client(appName=name)

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"order": 1}))

    await scene.cancel_held(name, command, scene.deliver(on_order, client))
    await scene.deliver(on_order)
    await asyncio.sleep(HELD_SECONDS)
    assert without_ids(scene.documents()) == [{"order": 1}]


# R72, second half


async def test_r72_a_file_whose_chunks_lost_their_replies_is_one_without_orphans(scene: Scene, proxy: ProxyFactory) -> None:
    await done(prepare_gridfs(scene.client()[scene.name]))
    content = b"x" * 600_000
    lossy = proxy(needle=b"fs.chunks", command="insert", times=2)
    lossy.arm(b"chunks", "close", 2, command="insert")

    async def on_report(database: Any) -> None:
        if scene.api.is_async:
            await gridfs.AsyncGridFSBucket(database).upload_from_stream("r1", content)
        else:
            gridfs.GridFS(database).put(content, filename="r1")

    await scene.deliver(on_report, scene.client(lossy.uri()))
    assert lossy.hits == 2
    await scene.deliver(on_report)
    (file,) = scene.there.fs.files.find()
    assert (file["filename"], file["length"]) == ("r1", 600_000)
    assert gridfs.GridFS(scene.there).get(file["_id"]).read() == content
    assert scene.there.fs.chunks.count_documents({"files_id": {"$ne": file["_id"]}}) == 0


# R76, second half

WAITED_TOO_LONG = {"code": 64, "errmsg": "waiting for replication timed out", "errInfo": {"wtimeout": True}}


async def test_r76_a_commit_that_waited_too_long_for_replication_is_not_done_again_by_the_redelivery(scene: Scene) -> None:
    scene.there.c.insert_one({"_id": 1, "n": 0})
    name = app_name()
    client = scene.client(appName=name)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with fail_command(scene.admin, app_name=name, commands=["commitTransaction"], times=1, writeConcernError=WAITED_TOO_LONG):
        await scene.deliver(on_order, client)
    await scene.deliver(on_order)
    assert scene.runs == 1
    assert scene.documents() == [{"_id": 1, "n": 1}]


async def test_r76_an_update_that_waited_too_long_for_replication_fails_the_record_and_is_done_by_the_redelivery(
    scene: Scene,
) -> None:
    scene.there.c.insert_one({"_id": 1, "n": 0})
    name = app_name()
    client = scene.client(appName=name)

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    with (
        fail_command(scene.admin, app_name=name, commands=["update"], times=1, writeConcernError=WAITED_TOO_LONG),
        pytest.raises(WTimeoutError),
    ):
        await scene.deliver(on_order, client)
    await scene.deliver(on_order)
    assert scene.documents() == [{"_id": 1, "n": 1}]
