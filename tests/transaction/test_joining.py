"""A handler's operations join one transaction, whatever they are and wherever in the handler they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gridfs
import pytest
from pymongo import DeleteMany, DeleteOne, InsertOne, ReadPreference, ReplaceOne, UpdateMany, UpdateOne
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from saferetry import prepare_gridfs
from tests.support import CommandLog
from tests.support.driving import done, quick
from tests.transaction.scene import KEY, MARKERS, Scene, in_transaction, listed, names

WRITES: dict[str, tuple[Callable[[Any], Any], list[dict[str, Any]]]] = {
    "insert_one": (lambda c: c.insert_one({"_id": 9}), [{"_id": 1, "n": 0}, {"_id": 2, "n": 0}, {"_id": 9}]),
    "insert_many": (
        lambda c: c.insert_many([{"_id": 8}, {"_id": 9}]),
        [{"_id": 1, "n": 0}, {"_id": 2, "n": 0}, {"_id": 8}, {"_id": 9}],
    ),
    "update_one": (lambda c: c.update_one({"_id": 1}, {"$inc": {"n": 1}}), [{"_id": 1, "n": 1}, {"_id": 2, "n": 0}]),
    "upsert": (
        lambda c: c.update_one({"_id": 3}, {"$inc": {"n": 1}}, upsert=True),
        [{"_id": 1, "n": 0}, {"_id": 2, "n": 0}, {"_id": 3, "n": 1}],
    ),
    "update_many": (lambda c: c.update_many({}, {"$inc": {"n": 1}}), [{"_id": 1, "n": 1}, {"_id": 2, "n": 1}]),
    "replace_one": (lambda c: c.replace_one({"_id": 1}, {"m": 1}), [{"_id": 1, "m": 1}, {"_id": 2, "n": 0}]),
    "delete_one": (lambda c: c.delete_one({"_id": 1}), [{"_id": 2, "n": 0}]),
    "delete_many": (lambda c: c.delete_many({}), []),
    "find_one_and_update": (
        lambda c: c.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}),
        [{"_id": 1, "n": 1}, {"_id": 2, "n": 0}],
    ),
    "find_one_and_replace": (
        lambda c: c.find_one_and_replace({"_id": 1}, {"m": 1}),
        [{"_id": 1, "m": 1}, {"_id": 2, "n": 0}],
    ),
    "find_one_and_delete": (lambda c: c.find_one_and_delete({"_id": 1}), [{"_id": 2, "n": 0}]),
    "bulk_write": (
        lambda c: c.bulk_write(
            [
                InsertOne({"_id": 9}),
                UpdateOne({"_id": 9}, {"$inc": {"n": 1}}),
                UpdateMany({}, {"$inc": {"n": 1}}),
                ReplaceOne({"_id": 1}, {"m": 1}),
                DeleteOne({"_id": 2}),
                DeleteMany({"n": 77}),
            ]
        ),
        [{"_id": 1, "m": 1}, {"_id": 9, "n": 2}],
    ),
}
COUNTS = ("inserted_id", "inserted_ids", "inserted_count", "matched_count", "modified_count", "upserted_id", "deleted_count")
READS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "find_one": (lambda c: c.find_one({"_id": 9}), {"_id": 9, "n": 0}),
    "find": (lambda c: c.find({}, {"n": 0}), [{"_id": 1}, {"_id": 2}, {"_id": 9}]),
    "aggregate": (lambda c: c.aggregate([{"$group": {"_id": None, "n": {"$sum": 1}}}]), [{"_id": None, "n": 3}]),
    "count_documents": (lambda c: c.count_documents({}), 3),
    "distinct": (lambda c: c.distinct("_id"), [1, 2, 9]),
}


@pytest.fixture
def stocked(scene: Scene) -> Scene:
    """Two documents are there."""
    scene.there.c.insert_many([{"_id": 1, "n": 0}, {"_id": 2, "n": 0}])
    return scene


@pytest.mark.parametrize("name", WRITES)
async def test_each_write_is_there_once_after_two_deliveries(stocked: Scene, name: str) -> None:
    write, left = WRITES[name]

    async def on_order(database: Any) -> None:
        await done(write(database.c))

    await stocked.deliver(on_order)
    await stocked.deliver(on_order)
    assert stocked.documents() == left


@pytest.mark.parametrize("name", WRITES)
async def test_each_write_is_undone_with_the_handler_that_fails_after_it(stocked: Scene, name: str) -> None:
    write, _ = WRITES[name]

    async def on_order(database: Any) -> None:
        await done(write(database.c))
        raise LookupError

    with pytest.raises(LookupError):
        await stocked.deliver(on_order)
    assert stocked.documents() == [{"_id": 1, "n": 0}, {"_id": 2, "n": 0}]
    assert stocked.markers() == []


@pytest.mark.parametrize("name", WRITES)
async def test_the_result_of_each_write_is_the_drivers(stocked: Scene, name: str) -> None:
    write, _ = WRITES[name]
    stocked.there.plain.insert_many([{"_id": 1, "n": 0}, {"_id": 2, "n": 0}])
    expected = write(stocked.there.plain)

    async def on_order(database: Any) -> Any:
        return await done(write(database.c))

    result = await stocked.deliver(on_order)
    assert type(result) is type(expected)
    assert [getattr(result, count, None) for count in COUNTS] == [getattr(expected, count, None) for count in COUNTS]


@pytest.mark.parametrize("name", READS)
async def test_each_read_sees_the_handlers_own_writes(stocked: Scene, name: str) -> None:
    read, expected = READS[name]

    async def on_order(database: Any) -> Any:
        await done(database.c.insert_one({"_id": 9, "n": 0}))
        answer = read(database.c)
        return await listed(answer) if name in ("find", "aggregate") else await done(answer)

    assert await stocked.deliver(on_order) == expected


async def test_a_cursor_of_several_batches_sees_the_handlers_own_writes(scene: Scene, log: CommandLog) -> None:
    scene.there.c.insert_many([{"_id": number} for number in range(250)])

    async def on_order(database: Any) -> int:
        await done(database.c.insert_one({"_id": 1_000}))
        return len(await listed(database.c.find({}, batch_size=100)))

    assert await scene.deliver(on_order, scene.client(log=log)) == 251
    assert log.sends("getMore") == 2


async def test_a_raw_batch_sees_the_handlers_own_writes(stocked: Scene) -> None:
    async def on_order(database: Any) -> int:
        await done(database.c.insert_one({"_id": 9}))
        return len(await listed(database.c.find_raw_batches({}, batch_size=1)))

    assert await stocked.deliver(on_order) == 3


async def test_writes_between_the_batches_of_a_cursor_join(scene: Scene) -> None:
    scene.there.c.insert_many([{"_id": number} for number in range(25)])

    async def on_order(database: Any) -> None:
        for document in await listed(database.c.find({}, batch_size=10)):
            await done(database.c.update_one(document, {"$set": {"seen": True}}))

    await scene.deliver(on_order)
    assert len(scene.documents(seen=True)) == 25


async def test_an_insert_many_of_2500_is_one_command_and_there_once(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> int:
        result = await done(database.c.insert_many([{"i": number} for number in range(2_500)]))
        return len(result.inserted_ids)

    assert await scene.deliver(on_order, scene.client(log=log)) == 2_500
    await scene.deliver(on_order)
    assert scene.there.c.count_documents({}) == 2_500
    assert log.sends("insert") == 2


async def test_insert_many_takes_a_generator_again_in_the_next_execution(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_many({"_id": number} for number in range(3)))
        if scene.runs == 1:
            raise LookupError

    await scene.deliver(on_order, retry_on=LookupError)
    assert scene.documents() == [{"_id": 0}, {"_id": 1}, {"_id": 2}]


async def test_all_operations_run_in_the_one_transaction_of_the_marker(stocked: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        for write, _ in WRITES.values():
            await done(write(database.joined))
            await done(database.joined.delete_many({}))
        await listed(database.c.find())

    await stocked.deliver(on_order, stocked.client(log=log))
    commands = [command for command in log.commands() if command.get("autocommit") is False]
    assert len(in_transaction(log)) == 1
    assert names(log) == [next(iter(command)) for command in commands]
    assert [bool(command.get("startTransaction")) for command in commands] == [True] + [False] * (len(commands) - 1)
    assert commands[0]["insert"] == MARKERS


async def test_nothing_is_seen_from_outside_before_the_commit(stocked: Scene) -> None:
    seen = []

    async def on_order(database: Any) -> None:
        await done(database.c.delete_many({}))
        await done(database.c.insert_one({"_id": 9}))
        seen.append(stocked.documents())
        seen.append(stocked.markers())

    await stocked.deliver(on_order)
    assert seen == [[{"_id": 1, "n": 0}, {"_id": 2, "n": 0}], []]


async def test_reads_are_of_one_snapshot(stocked: Scene) -> None:
    async def on_order(database: Any) -> int:
        await done(database.c.find_one({}))
        stocked.there.c.insert_one({"_id": 9})
        return int(await done(database.c.count_documents({})))

    assert await stocked.deliver(on_order) == 2


async def test_operations_at_once_all_join(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        async def insert(number: int) -> None:
            for part in range(5):
                await done(database.c.insert_one({"_id": 10 * number + part}))
                await done(database.c.update_one({"_id": "n"}, {"$inc": {"n": 1}}, upsert=True))

        await scene.at_once(insert, 8)

    await scene.deliver(on_order, scene.client(log=log))
    await scene.deliver(on_order)
    assert scene.there.c.find_one({"_id": "n"}) == {"_id": "n", "n": 40}
    assert scene.there.c.count_documents({}) == 41
    assert len(in_transaction(log)) == 1


class Crowd(CommandListener):
    """Count how many commands run at a time."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0

    def started(self, event: CommandStartedEvent) -> None:
        self.running += 1
        self.most = max(self.most, self.running)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        self.running -= 1

    def failed(self, event: CommandFailedEvent) -> None:
        self.running -= 1


async def test_operations_at_once_are_sent_one_after_another(scene: Scene) -> None:
    crowd = Crowd()

    async def on_order(database: Any) -> None:
        async def insert(number: int) -> None:
            await done(database.c.insert_one({"_id": number}))

        await scene.at_once(insert, 8)

    await scene.deliver(on_order, scene.client(event_listeners=[crowd]))
    assert (crowd.running, crowd.most) == (0, 1)


async def test_operations_at_once_without_client_begin_one_transaction(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        async def insert(number: int) -> None:
            await done(database.c.insert_one({"_id": number}))

        await scene.at_once(insert, 8)

    await scene.deliver(on_order, scene.client(log=log), lazily=True)
    assert len(scene.documents()) == 8
    assert len(in_transaction(log)) == 1


async def test_a_gridfs_file_is_there_once_and_whole(scene: Scene) -> None:
    content = bytes(range(256)) * 2_400
    await done(prepare_gridfs(scene.client()[scene.name]))

    async def on_order(database: Any) -> None:
        if scene.api.is_async:
            await gridfs.AsyncGridFSBucket(database).upload_from_stream("r", content)
        else:
            gridfs.GridFS(database).put(content, filename="r")

    await scene.deliver(on_order)
    await scene.deliver(on_order)
    assert scene.there.fs.files.count_documents({}) == 1
    assert gridfs.GridFS(scene.there).find_one({"filename": "r"}).read() == content  # type: ignore[union-attr]  # it is there
    assert scene.there.fs.chunks.count_documents({}) == 3


async def test_a_gridfs_file_is_undone_with_the_handler_that_fails_after_it(scene: Scene) -> None:
    await done(prepare_gridfs(scene.client()[scene.name]))

    async def on_order(database: Any) -> None:
        if scene.api.is_async:
            await gridfs.AsyncGridFSBucket(database).upload_from_stream("r", b"x" * 300_000)
        else:
            gridfs.GridFSBucket(database).upload_from_stream("r", b"x" * 300_000)
        raise LookupError

    with pytest.raises(LookupError):
        await scene.deliver(on_order)
    assert scene.there.fs.files.count_documents({}) == 0
    assert scene.there.fs.chunks.count_documents({}) == 0


async def test_a_gridfs_file_written_in_the_handler_can_be_read_in_it(scene: Scene) -> None:
    await done(prepare_gridfs(scene.client()[scene.name], "b"))

    async def on_order(database: Any) -> bytes:
        if scene.api.is_async:
            bucket = gridfs.AsyncGridFSBucket(database, "b")
            file_id = await bucket.upload_from_stream("r", b"x" * 300_000)
            return bytes(await (await bucket.open_download_stream(file_id)).read())
        file_id = gridfs.GridFSBucket(database, "b").upload_from_stream("r", b"x" * 300_000)
        return bytes(gridfs.GridFSBucket(database, "b").open_download_stream(file_id).read())

    assert await scene.deliver(on_order) == b"x" * 300_000


WEAK: dict[str, Any] = {"w": 1, "readPreference": "secondaryPreferred", "readConcernLevel": "local"}


async def test_a_client_with_weaker_concerns_still_reads_a_snapshot_and_commits_with_majority(
    stocked: Scene, log: CommandLog
) -> None:
    async def on_order(database: Any) -> None:
        await listed(database.c.find())
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order, stocked.client(log=log, **WEAK))
    first = log.commands("insert")[0]
    assert first["readConcern"]["level"] == "snapshot"
    assert [command["writeConcern"] for command in log.commands("commitTransaction")] == [{"w": "majority"}]
    for command in log.commands("find", "update"):
        assert command.get("$readPreference", {"mode": "primary"})["mode"] == "primary"
        assert not {"writeConcern", "readConcern"} & set(command)


async def test_a_collection_with_weaker_concerns_joins_as_any_other(stocked: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        weak = database.get_collection(
            "c",
            write_concern=WriteConcern(w=1),
            read_concern=ReadConcern("local"),
            read_preference=ReadPreference.SECONDARY_PREFERRED,
        )
        await listed(weak.find())
        await done(weak.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    await stocked.deliver(on_order, stocked.client(log=log))
    assert stocked.documents()[0]["n"] == 1
    for command in log.commands("find", "update"):
        assert command.get("$readPreference", {"mode": "primary"})["mode"] == "primary"
        assert not {"writeConcern", "readConcern"} & set(command)


async def test_statements_have_a_time_limit_below_the_socket_timeout(stocked: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        for write, _ in WRITES.values():
            await done(write(database.joined))
            await done(database.joined.delete_many({}))
        await done(database.c.find_one({}))
        await done(database.c.count_documents({}))
        await done(database.c.distinct("_id"))

    await stocked.deliver(on_order, stocked.client(log=log, socketTimeoutMS=3_000))
    statements = log.commands("insert", "update", "delete", "findAndModify", "find", "aggregate", "distinct")
    assert len(statements) > 2 * len(WRITES)
    assert all(0 < command["maxTimeMS"] < 3_000 for command in statements)


async def test_a_commit_has_no_time_limit_of_ours(stocked: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    await stocked.deliver(on_order, stocked.client(log=log, socketTimeoutMS=3_000))
    assert ["maxTimeMS" in command for command in log.commands("commitTransaction")] == [False]


async def test_an_abort_that_ends_a_failed_handler_is_sent_once(stocked: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))
        raise LookupError

    with pytest.raises(LookupError):
        await stocked.deliver(on_order, stocked.client(log=log))
    assert names(log) == ["insert", "insert", "abortTransaction"]


async def test_writes_carry_a_tag_that_names_record_and_execution(stocked: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 9}))
        await done(database.c.update_one({"_id": 9}, {"$inc": {"n": 1}}))
        await done(database.c.find_one_and_delete({"_id": 1}))
        await done(database.c.delete_many({}))
        if stocked.runs == 1:
            raise LookupError

    await stocked.deliver(on_order, stocked.client(log=log), retry_on=LookupError)
    commands = log.commands("insert", "update", "findAndModify", "delete")
    tags = [{"saferetry": {"record": KEY.hashed(), "execution": number}} for number in (1, 2)]
    assert [command["comment"] for command in commands] == [tags[0]] * 5 + [tags[1]] * 5


async def test_a_tag_does_not_replace_a_comment_of_the_users(stocked: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 9}, comment="mine"))

    await stocked.deliver(on_order, stocked.client(log=log))
    assert log.commands("insert")[-1]["comment"] == "mine"


async def test_no_tag_is_sent_where_it_is_switched_off(stocked: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 9}))

    await stocked.deliver(on_order, stocked.client(log=log, settings=quick(tag=False)))
    assert not any("comment" in command for command in log.commands("insert"))


async def test_nothing_but_the_marker_is_added_to_the_users_data(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 9, "n": 0}))

    await stocked.deliver(on_order)
    assert stocked.documents() == [{"_id": 1, "n": 0}, {"_id": 2, "n": 0}, {"_id": 9, "n": 0}]
    assert set(stocked.there.list_collection_names()) == {"c", MARKERS}


async def test_the_marker_holds_identity_digest_and_time_and_nothing_else(stocked: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 9, "secret": "of the user's"}))

    await stocked.deliver(on_order)
    (marker,) = stocked.markers()
    assert set(marker) == {"_id", "at", "digest"}
    identity = {"group": "g", "stream": "orders", "partition": 0, "position": 7, "epoch": "", "name": "on_order"}
    assert marker["_id"] == identity
    assert b"content" not in marker["digest"]


async def test_the_handlers_result_is_returned(stocked: Scene) -> None:
    async def on_order(database: Any) -> object:
        return await done(database.c.find_one({"_id": 1}))

    assert await stocked.deliver(on_order) == {"_id": 1, "n": 0}


async def test_a_handler_without_operations_leaves_a_marker(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        pass

    await scene.deliver(on_order)
    await scene.deliver(on_order)
    assert len(scene.markers()) == 1
    assert scene.runs == 1


async def test_a_handler_without_client_and_operations_sends_nothing(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> str:
        return "done"

    assert await scene.deliver(on_order, scene.client(log=log), lazily=True) == "done"
    assert log.names() == []
