"""What a library makes past the guarded methods: its cursors join the record's transaction, the rest is refused unsent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gridfs
import pytest
from pymongo import ReadPreference
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from saferetry import prepare_gridfs
from saferetry.errors import ConfigurationError
from tests.support import CommandLog
from tests.support.driving import done
from tests.transaction.scene import MARKERS, Scene, in_transaction, names

MANY = 250  # more than a cursor's first batch of 101


def by_hand(database: Any, name: str = "c", **options: Any) -> Any:
    """Return a collection that no guarded method made."""
    made: Callable[..., Any] = Collection if isinstance(database.c, Collection) else AsyncCollection
    return made(database, name, **options)


async def listed(cursor: Any) -> list[Any]:
    """Return all that a cursor of either API gives."""
    return await done(cursor.to_list())  # type: ignore[no-any-return]


async def stored(database: Any, content: bytes) -> Any:
    """Store a file and return the GridFS that did it."""
    files: Any = (gridfs.GridFS if isinstance(database.c, Collection) else gridfs.AsyncGridFS)(database)
    await done(files.put(content, filename="r"))
    return files


async def test_gridfs_finds_a_file_that_the_handler_wrote(scene: Scene, log: CommandLog) -> None:
    await done(prepare_gridfs(scene.client()[scene.name]))

    async def on_report(database: Any) -> None:
        files = await stored(database, b"x")
        found = [file.filename for file in await listed(files.find({"filename": "r"}))]
        assert found == await done(files.list()) == ["r"]
        assert await done((await done(files.find_one({"filename": "r"}))).read()) == b"x"
        assert await done((await done(files.get_last_version("r"))).read()) == b"x"
        assert await done(files.exists(filename="r"))

    await scene.deliver(on_report, scene.client(log=log))
    assert len(in_transaction(log)) == 1
    assert all("lsid" in command and command["autocommit"] is False for command in log.commands("find", "distinct"))


async def test_a_gridfs_bucket_finds_and_changes_files_that_the_handler_wrote(scene: Scene) -> None:
    await done(prepare_gridfs(scene.client()[scene.name]))

    async def on_report(database: Any) -> list[str]:
        bucket: Any = (gridfs.AsyncGridFSBucket if scene.api.is_async else gridfs.GridFSBucket)(database)
        kept, gone = [await done(bucket.upload_from_stream(name, b"x" * 300_000)) for name in ("a", "b")]
        await done(bucket.rename(kept, "c"))
        await done(bucket.delete(gone))
        return [file.filename for file in await listed(bucket.find({}))]

    for _ in range(2):
        found = await scene.deliver(on_report, store_result=True)
        assert found == ["c"]
    assert [file["filename"] for file in scene.there.fs.files.find()] == ["c"]
    assert scene.there.fs.chunks.count_documents({}) == 2


async def test_a_file_that_gridfs_found_and_deleted_is_back_with_the_handler_undone(scene: Scene) -> None:
    gridfs.GridFS(scene.there).put(b"before", filename="r")

    async def on_report(database: Any) -> None:
        files: Any = (gridfs.AsyncGridFS if scene.api.is_async else gridfs.GridFS)(database)
        (file,) = await listed(files.find())
        await done(files.delete(file._id))
        raise LookupError

    with pytest.raises(LookupError):
        await scene.deliver(on_report)
    assert [file.read() for file in gridfs.GridFS(scene.there).find()] == [b"before"]


async def test_the_first_operation_of_a_handler_may_be_a_search_of_gridfs(scene: Scene, log: CommandLog) -> None:
    gridfs.GridFS(scene.there).put(b"x", filename="r")

    async def on_report(database: Any) -> None:
        files: Any = (gridfs.AsyncGridFS if scene.api.is_async else gridfs.GridFS)(database)
        (file,) = await listed(files.find())
        await done(database.c.insert_one({"_id": file.filename, "run": scene.runs}))

    for _ in range(2):
        await scene.deliver(on_report, scene.client(log=log), lazily=True)
    assert scene.documents() == [{"_id": "r", "run": 1}]
    assert names(log)[:2] == ["insert", "find"]  # the marker goes first
    assert len(scene.markers()) == 1


async def test_a_cursor_made_by_hand_reads_all_its_batches_in_the_transaction(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_many([{"_id": number} for number in range(MANY)]))
        collection = by_hand(database, read_preference=ReadPreference.SECONDARY_PREFERRED)
        assert len(await listed(collection.find())) == MANY
        assert (await done(collection.find_one({"_id": 7}))) == {"_id": 7}
        await done(database.c.insert_one({"_id": "after"}))

    await scene.deliver(on_order, scene.client(log=log))
    assert len(scene.documents()) == MANY + 1
    assert len(in_transaction(log)) == 1
    assert all(command["autocommit"] is False for command in log.commands("find", "getMore"))
    assert log.sends("getMore") > 0


async def test_an_error_of_a_cursor_made_by_hand_dooms_the_execution(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"run": scene.runs}))
        with pytest.raises(OperationFailure):
            await listed(by_hand(database).find({"$wrong": 1}))
        await done(database.c.insert_one({"run": scene.runs}))

    with pytest.raises(OperationFailure):
        await scene.deliver(on_order)
    assert scene.documents() == []


READS = {
    "count_documents": lambda c: c.count_documents({}),
    "distinct": lambda c: c.distinct("_id"),
    "aggregate": lambda c: c.aggregate([{"$match": {}}]),
    "estimated_document_count": lambda c: c.estimated_document_count(),
}
WRITES = {
    "insert_one": lambda c: c.insert_one({"_id": 2}),
    "insert_many": lambda c: c.insert_many([{"_id": 2}]),
    "update_many": lambda c: c.update_many({}, {"$inc": {"n": 1}}),
    "find_one_and_delete": lambda c: c.find_one_and_delete({}),
    "merge": lambda c: c.aggregate([{"$merge": {"into": "other"}}]),
    "create_index": lambda c: c.create_index("n"),
}


@pytest.mark.parametrize("name", [*READS, *WRITES])
async def test_what_is_made_by_hand_and_cannot_join_is_refused_before_it_is_sent(
    scene: Scene, log: CommandLog, name: str
) -> None:
    scene.there.c.insert_one({"_id": 1})
    call: Any = {**READS, **WRITES}[name]

    async def on_order(database: Any) -> None:
        await done(call(by_hand(database)))

    with pytest.raises(ConfigurationError, match="comes past the guarded methods"):
        await scene.deliver(on_order, scene.client(log=log))
    assert names(log) == ["insert", "abortTransaction"]  # the marker
    assert scene.documents() == [{"_id": 1}]
    assert scene.there.list_collection_names(filter={"name": {"$ne": MARKERS}}) == ["c"]


async def test_a_cursor_that_was_open_before_the_record_goes_on_as_it_was(scene: Scene) -> None:
    scene.there.c.insert_many([{"_id": number} for number in range(MANY)])
    client = scene.client()
    cursor = client[scene.name].c.find(sort=[("_id", 1)])
    first = await done(cursor.next())

    async def on_order(database: Any) -> int:
        await done(database.d.insert_one({}))
        return len(await listed(cursor))

    assert first == {"_id": 0}
    assert await scene.deliver(on_order, client) == MANY - 1


async def test_distinct_of_a_cursor_sees_the_handlers_own_writes(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        await done(database.c.insert_many([{"n": 1}, {"n": 2}]))
        assert await done(database.c.find({"n": {"$gt": 1}}).distinct("n")) == [2]

    await scene.deliver(on_order)


async def test_a_cursor_made_by_hand_cannot_outlive_its_execution(scene: Scene) -> None:
    scene.there.c.insert_many([{"_id": number} for number in range(MANY)])
    kept: list[Any] = []

    async def on_order(database: Any) -> None:
        kept.append(by_hand(database).find())
        await done(kept[0].next())

    await scene.deliver(on_order)
    with pytest.raises(ConfigurationError, match="is over"):
        await listed(kept[0])
