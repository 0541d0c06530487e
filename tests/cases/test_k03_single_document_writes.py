"""K3: a write to one document that is no harmless repetition ($inc, delete_one, a claim) takes effect once."""

from __future__ import annotations

from saferetry import record
from tests.support import CommandLog
from tests.support.driving import Api, ProxyFactory, RawClient, done, quick


async def test_r05_an_increment_whose_reply_is_lost_twice_counts_once(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    admin[database_name].c.insert_one({"_id": 1, "n": 0})
    lossy = proxy(command="update", times=2)
    collection = api.client(lossy.uri(), log=log)[database_name].c
    with record(("t", 0, 5)):
        result = await done(collection.update_one({"_id": 1}, {"$inc": {"n": 1}}))
    assert lossy.hits == 2
    assert (result.matched_count, result.modified_count) == (1, 1)
    assert admin[database_name].c.find_one() == {"_id": 1, "n": 1}
    assert log.sends("update") == 3


async def test_r05_fifty_workers_with_a_hundred_increments_each_count_to_five_thousand(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory
) -> None:
    admin[database_name].c.insert_many([{"_id": worker, "n": 0} for worker in range(50)])
    lossy = proxy(command="update", times=1_000_000, every=50)
    collection = api.client(lossy.uri(), settings=quick(max_attempts=100))[database_name].c

    async def work(worker: int) -> None:
        for offset in range(100):
            with record(("t", worker, offset)):
                await done(collection.update_one({"_id": worker}, {"$inc": {"n": 1}}))

    await api.concurrently(work, 50)
    assert lossy.hits >= 100
    assert [document["n"] for document in admin[database_name].c.find()] == [100] * 50


async def test_r07_a_claim_whose_reply_is_lost_twice_claims_the_first_document_only(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory
) -> None:
    admin[database_name].q.insert_many([{"_id": number, "st": "new"} for number in range(3)])
    lossy = proxy(command="findAndModify", times=2)
    queue = api.client(lossy.uri())[database_name].q
    with record(("t", 0, 7)):
        claimed = await done(queue.find_one_and_update({"st": "new"}, {"$set": {"st": "run"}}, sort=[("_id", 1)]))
    assert lossy.hits == 2
    assert claimed == {"_id": 0, "st": "new"}
    assert list(admin[database_name].q.find({"st": "run"})) == [{"_id": 0, "st": "run"}]


async def test_r09_a_delete_whose_reply_is_lost_twice_deletes_one_document(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory
) -> None:
    admin[database_name].c.insert_many([{"t": 1} for _ in range(3)])
    lossy = proxy(command="delete", times=2)
    collection = api.client(lossy.uri())[database_name].c
    with record(("t", 0, 9)):
        result = await done(collection.delete_one({"t": 1}))
    assert lossy.hits == 2
    assert result.deleted_count == 1
    assert admin[database_name].c.count_documents({}) == 2
