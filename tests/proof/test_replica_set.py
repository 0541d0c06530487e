"""Three servers: the primary steps down or is killed at any point of a record, and nothing is lost or there twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from saferetry.errors import TakenOverError
from saferetry.lab.replica_set import ReplicaSet
from tests.proof import work
from tests.proof.conftest import Ground
from tests.proof.work import Database
from tests.support import Mode, Mongod, eventually

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("replica set")]


def once_the_set_is_whole(servers: ReplicaSet, ground: Ground) -> bool:
    servers.heal()
    return bool(eventually(lambda: ground.effects() == work.once(1), timeout=20))


@pytest.mark.parametrize("place", range(4))
def test_a_step_down_between_statements_is_executed_again(place: int, servers: ReplicaSet, majority_ground: Ground) -> None:
    def order(database: Database, position: int) -> int:
        steps: tuple[Callable[[], object], ...] = (
            lambda: database.orders.insert_one({"position": position}),
            lambda: database.stock.update_one({"_id": "stock"}, {"$inc": {"taken": 1}}),
            lambda: database.lines.update_many({}, {"$inc": {"changes": 1}}),
            lambda: None,
        )
        for number, step in enumerate(steps):
            if number == place and len(consumer.executions) == 1:
                servers.step_down()
            step()
        return position

    consumer = majority_ground.consumer(order)
    result = consumer.handle(1)
    assert not [(failure.exception, failure.reason) for failure in consumer.failures]
    assert result == 1
    assert len(consumer.executions) == 2
    assert majority_ground.effects() == work.once(1)


@pytest.mark.parametrize(
    ("mode", "executions"),
    [("cut", 2), ("close", 1)],
    ids=["before the commit came to it", "after the commit, its reply is lost"],
)
def test_the_primary_is_killed_at_the_commit(
    mode: Mode, executions: int, servers: ReplicaSet, majority_ground: Ground, show: Callable[[str], None]
) -> None:
    primary = servers.primary()
    servers.proxy_of(primary).arm(command="commitTransaction", mode=mode, on_hit=primary.kill)
    consumer = majority_ground.consumer()
    begin = time.monotonic()
    assert consumer.handle(1) == 1
    show(f"primary killed at the commit ({mode}): done after {time.monotonic() - begin:.1f} s")
    assert servers.proxy_of(primary).hits == 1
    assert len(consumer.executions) == executions
    assert once_the_set_is_whole(servers, majority_ground)


# A commit that only the primary has: its marker is there, but a failover takes it back.


def local_markers(servers: ReplicaSet, primary: Mongod, ground: Ground) -> int:
    with servers.direct(primary) as client:
        markers = client[ground.name].get_collection(work.MARKERS, read_concern=ReadConcern("local"))
        return markers.count_documents({})


def waiting_commit(pool: ThreadPoolExecutor, servers: ReplicaSet, primary: Mongod, ground: Ground) -> Future[object]:
    """Handle record 1 in a thread until its commit is on the primary and waits for a majority."""
    first = pool.submit(ground.consumer(budget=40).handle, 1)
    eventually(lambda: local_markers(servers, primary, ground) == 1)
    return first


def test_a_commit_that_no_majority_has_is_not_skipped_and_done_again_when_it_is_lost(
    servers: ReplicaSet, majority_ground: Ground, show: Callable[[str], None]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        with servers.cut_off_primary() as primary:
            first = waiting_commit(pool, servers, primary, majority_ground)
            consumer = majority_ground.consumer(budget=40)
            second = pool.submit(consumer.handle, 1)
            time.sleep(1)
            assert not second.done()
            assert not consumer.executions
            primary.kill()
            begin = time.monotonic()
        results = [first.result(), second.result()]
    show(f"a commit that only the killed primary had: done again after {time.monotonic() - begin:.1f} s")
    assert sorted(results, key=str) in ([1, 1], [1, None], [None, None])
    assert once_the_set_is_whole(servers, majority_ground)


def test_a_dead_consumers_commit_that_no_majority_has_is_done_again_when_it_is_lost(
    servers: ReplicaSet, majority_ground: Ground
) -> None:
    with servers.cut_off_primary() as primary:
        worker = majority_ground.worker(1)
        eventually(lambda: local_markers(servers, primary, majority_ground) == 1)
        worker.kill()
        primary.kill()
    consumer = majority_ground.consumer()
    assert consumer.handle(1) == 1
    assert consumer.executions == [1]
    assert once_the_set_is_whole(servers, majority_ground)


def test_a_commit_that_no_majority_has_is_skipped_once_it_has(servers: ReplicaSet, majority_ground: Ground) -> None:
    with ThreadPoolExecutor(2) as pool:
        with servers.cut_off_primary() as primary:
            first = waiting_commit(pool, servers, primary, majority_ground)
            consumer = majority_ground.consumer(budget=40)
            second = pool.submit(consumer.handle, 1)
            time.sleep(0.5)
            assert not second.done()
        assert (first.result(), second.result()) == (1, None)
    assert not consumer.executions
    assert once_the_set_is_whole(servers, majority_ground)


@pytest.mark.parametrize("answers", [True, False], ids=["reads are answered", "reads are not answered"])
def test_a_commit_that_gets_no_majority_in_the_budget_is_nobodys_dead_letter(
    answers: bool, servers: ReplicaSet, majority_ground: Ground
) -> None:
    """The one that sent it gets the driver's error, the next one TakenOverError; no offset may be committed."""
    if answers:  # a majority read of a collection that no majority has waits
        majority_ground.database.create_collection(work.MARKERS)
    first = majority_ground.consumer(budget=2, socketTimeoutMS=1000)
    second = majority_ground.consumer(budget=2, socketTimeoutMS=1000)
    with servers.cut_off_primary():
        with pytest.raises(PyMongoError) as raised:
            first.handle(1)
        assert raised.value.has_error_label("UnknownTransactionCommitResult")
        with pytest.raises(TakenOverError):
            second.handle(1)
        assert not second.executions
    assert not [*first.failures, *second.failures]
    assert majority_ground.consumer().handle(1) is None
    assert once_the_set_is_whole(servers, majority_ground)


def test_records_go_on_while_members_are_killed_one_after_another(servers: ReplicaSet, majority_ground: Ground) -> None:
    """Each member is killed and started again once; whoever was primary meanwhile, all effects are there once."""
    ended = threading.Event()
    consumer = majority_ground.consumer(budget=40)
    done = []

    def handle_all() -> None:
        position = 0
        while not ended.is_set():
            assert consumer.handle(position) == position
            done.append(position)
            position += 1

    def wait_for_more() -> None:
        wanted = len(done) + 5
        eventually(lambda: len(done) > wanted, timeout=40)

    with ThreadPoolExecutor(1) as pool:
        handling = pool.submit(handle_all)
        for member in servers.members:
            wait_for_more()
            member.kill()
            servers.primary()
            wait_for_more()
            servers.heal()
        ended.set()
        handling.result()
    assert not consumer.failures
    assert majority_ground.effects() == work.once(*done)


def test_the_danger_is_there_a_local_marker_is_taken_back(servers: ReplicaSet, majority_ground: Ground) -> None:
    """What a plain read finds on the cut-off primary is gone after the failover: skipping on it would lose the record."""
    with servers.cut_off_primary() as primary:
        worker = majority_ground.worker(1)
        eventually(lambda: local_markers(servers, primary, majority_ground) == 1)
        worker.kill()
        primary.kill()
    servers.primary()
    servers.heal()
    with MongoClient[dict[str, object]](servers.uri) as client:
        assert client[majority_ground.name][work.MARKERS].count_documents({}) == 0
