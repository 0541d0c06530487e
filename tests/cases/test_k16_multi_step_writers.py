"""K16: writers of several steps (GridFS, job stores)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gridfs import AsyncGridFS, AsyncGridFSBucket, GridFS, GridFSBucket

from saferetry import record
from saferetry.errors import RetryRefusedError
from tests.support import CommandLog, Mongod
from tests.support.driving import Api, ProxyFactory, RawClient, application_retry, done, quick

CONTENT = random.Random(72).randbytes(600_000)


async def put(api: Api, database: Any, content: bytes) -> Any:
    return await done((AsyncGridFS if api.is_async else GridFS)(database).put(content, filename="r1"))


async def upload(api: Api, database: Any, content: bytes) -> Any:
    bucket = (AsyncGridFSBucket if api.is_async else GridFSBucket)(database)
    return await done(bucket.upload_from_stream("r1", content))


@pytest.mark.parametrize("store", [put, upload])
async def test_r72_a_file_whose_chunk_insert_lost_its_reply_twice_is_one_readable_file_without_orphans(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, store: Any
) -> None:
    lossy = proxy(b"fs.chunks", command="insert", times=2)
    database = api.client(lossy.uri())[database_name]
    with record(("t", 0, 72)):
        file_id = await store(api, database, CONTENT)
    assert lossy.hits == 2
    stored = admin[database_name]
    assert [file["_id"] for file in stored["fs.files"].find()] == [file_id]
    assert stored["fs.chunks"].count_documents({}) == stored["fs.chunks"].count_documents({"files_id": file_id}) == 3
    assert GridFS(stored).get(file_id).read() == CONTENT


@pytest.mark.parametrize("max_attempts", [4, 1], ids=["ours", "the_applications"])
async def test_r74_a_job_deleted_again_after_a_lost_reply_is_still_found(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, max_attempts: int
) -> None:
    admin[database_name].jobs.insert_one({"_id": "job"})
    lossy = proxy(command="delete", times=2)
    jobs = api.client(lossy.uri(), settings=quick(max_attempts=max_attempts))[database_name].jobs

    async def delete() -> Any:
        return await done(jobs.delete_one({"_id": "job"}))

    with record(("t", 0, 74)):
        result: Any = await application_retry()(delete)
    assert lossy.hits == 2
    assert result.deleted_count == 1
    assert admin[database_name].jobs.count_documents({}) == 0


async def test_r74_a_handler_that_deleted_its_job_is_not_executed_again_to_find_it_gone(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].jobs.insert_one({"_id": "job"})
    jobs = api.client(mongod.uri, log=log)[database_name].jobs

    @api.handler(key=("t", 0, 74), retry_on=ConnectionError)
    async def on_job(job: str) -> None:
        if (await done(jobs.delete_one({"_id": job}))).deleted_count == 0:
            raise LookupError(job)
        raise ConnectionError

    with pytest.raises(RetryRefusedError) as caught:
        await done(on_job("job"))
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert log.sends("delete") == 1
