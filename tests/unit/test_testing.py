"""What `saferetry.testing` gives to the tests of others."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import threading
import time
from typing import Any

import pymongo
import pytest
from pymongo.errors import AutoReconnect, ExecutionTimeout, ServerSelectionTimeoutError

from saferetry import Budget, Outcome, RecordKey, Settings, WriteView, current_record, handler, record, repeatable, testing
from saferetry import _world as world
from saferetry.errors import ConfigurationError, RetryRefusedError, UnprotectedWriteError

SLOW = Settings(backoff_base_ms=1_000, backoff_cap_ms=10_000)


@pytest.fixture
def client() -> Any:
    return testing.mock_client(settings=SLOW)


# time


def test_in_fixed_time_nothing_sleeps_and_waits_are_listed(client: Any) -> None:
    started = time.process_time()
    with testing.fixed_time() as clock:
        testing.faults(client).lose_reply("insert_one", times=3)
        with record("r"):
            client.db.c.insert_one({})
    assert len(clock.waits) == 3
    assert clock.now == sum(clock.waits) > 0
    assert time.process_time() - started < clock.now + 5


def test_in_fixed_time_waits_are_the_same_in_every_run_and_follow_the_seed() -> None:
    def waits(seed: int) -> list[float]:
        client = testing.mock_client(settings=SLOW)
        with testing.fixed_time(seed) as clock:
            testing.faults(client).lose_reply(times=3)
            with record("r"):
                client.db.c.find_one()
        return clock.waits

    assert waits(1) == waits(1)
    assert waits(1) != waits(2)


def test_what_never_succeeds_ends_with_its_budget(client: Any) -> None:
    testing.faults(client).lose_request("commit_transaction", times=100_000)
    with testing.fixed_time() as clock, pytest.raises(AutoReconnect):
        handler(key="k", name="h", guarantee="transaction", client=client, digest=lambda _: b"x", budget=5)(
            lambda _: client.db.c.insert_one({})
        )(1)
    assert clock.now <= 5 + 2  # seconds: afterwards it is found out whether it was committed


def test_fixed_time_holds_in_threads_and_tasks_and_ends_with_the_block() -> None:
    async def sleep() -> None:
        await asyncio.gather(*(world.sleep_async(100) for _ in range(2)))

    with testing.fixed_time() as clock:
        thread = threading.Thread(target=world.sleep, args=(1_000,))
        thread.start()
        thread.join()
        asyncio.run(sleep())
        assert clock.now == world.monotonic() == 1_200
    assert world.monotonic() != 1_200


def test_time_goes_by_on_demand_and_never_back() -> None:
    with testing.fixed_time() as clock:
        budget = Budget(10)
        clock.advance(4)
        assert budget.remaining() == 6
        clock.advance(100)
        assert budget.remaining() == 0
        with pytest.raises(ConfigurationError, match="does not go back"):
            clock.advance(-1)


async def test_outside_the_world_is_the_real_one() -> None:
    before = time.monotonic()
    world.sleep(0)
    await world.sleep_async(0)
    assert before <= world.monotonic() <= time.monotonic()
    assert world.uniform(random.Random(1), 5) == random.Random(1).uniform(0, 5)


# decisions


def test_decisions_are_recorded_with_subject_reason_and_wait(client: Any) -> None:
    @handler(key="k", name="on-order", guarantee="transaction", client=client, digest=lambda _: b"x", retry_on=KeyError)
    def on_order(_: int) -> None:
        client.db.c.insert_one({})
        record = current_record()
        assert record is not None
        if record.execution == 1:
            raise KeyError

    with testing.fixed_time() as clock, testing.recorded() as recorder:
        on_order(1)
        on_order(1)
    assert [(decided.what, decided.subject, decided.reason) for decided in recorder.decisions] == [
        ("executed again", "on-order", ""),
        ("skipped", "on-order", "done before"),
    ]
    assert recorder.of("executed again")[0].wait == clock.waits[0]


def test_a_resend_and_a_refusal_are_decisions(client: Any) -> None:
    testing.faults(client).lose_reply("insert_one")
    testing.faults(client).lose_reply("update_many")
    with testing.fixed_time(), testing.recorded() as recorder, record("r"):
        client.db.c.insert_one({})
        with pytest.raises(AutoReconnect):
            client.db.c.update_many({}, {"$inc": {"n": 1}})
        with pytest.raises(RetryRefusedError):
            client.db.c.update_many({}, {"$inc": {"n": 1}})
    assert [(decided.what, decided.subject, decided.reason) for decided in recorder.decisions] == [
        ("resent", "insert_one on db.c", ""),
        ("refused", "update_many on db.c", "refused"),
        ("refused", "update_many on db.c", "outcome unknown"),
    ]


def test_a_read_that_is_sent_again_and_what_cannot_join_are_decisions(client: Any) -> None:
    testing.faults(client).lose_reply("find_one")
    strict = testing.mock_client(settings=Settings(strict=True))
    with testing.fixed_time(), testing.recorded() as recorder:
        with record("r"):
            client.db.c.find_one()
            with pytest.raises(UnprotectedWriteError):
                strict.db.c.delete_many({})
        with pytest.raises(ConfigurationError):
            handler(key="k", name="h", guarantee="transaction", client=client, digest=lambda _: b"x")(
                lambda _: client.db.c.drop()
            )(1)
    assert [(decided.what, decided.subject, decided.reason) for decided in recorder.decisions] == [
        ("resent", "find_one on db.c", ""),
        ("refused", "delete_many on db.c", "the server does not number it"),
        ("refused", "drop on db.c", "MongoDB does not run it in a transaction"),
    ]


def test_giving_up_refusing_and_recovering_are_decisions(client: Any) -> None:
    testing.faults(client).lose_reply("insert_one", times=4)

    @handler(retry_on=AutoReconnect, recoverer=lambda failure: failure.reason)
    def work() -> Any:
        return client.db.c.insert_one({})

    with testing.fixed_time(), testing.recorded() as recorder:
        result: Any = work()
    assert result == "refused"
    assert [decided.what for decided in recorder.decisions] == ["resent"] * 3 + ["given up", "refused", "recovered"]
    assert recorder.of("given up")[0].reason == "attempts"


def test_executions_are_given_up() -> None:
    @handler(retry_on=KeyError)
    def work() -> None:
        raise KeyError

    with testing.fixed_time(), testing.recorded() as recorder, pytest.raises(KeyError):
        work()
    assert [decided.what for decided in recorder.decisions] == ["executed again"] * 3 + ["given up"]


def test_a_recorder_leaves_the_logger_as_it_was(client: Any) -> None:
    logger = logging.getLogger("saferetry")
    before = logger.level, list(logger.handlers)
    with testing.recorded():
        pass
    assert (logger.level, logger.handlers) == before


# fake records


def test_a_fake_record_is_current_and_says_what_it_was_told() -> None:
    view = WriteView("insert_one", "db.c", Outcome.APPLIED, 1, 1)
    with testing.fake_record(("orders", 0, 17), execution=3, skipped=True, writes=[view], budget=5, name="n") as fake:
        assert current_record() is fake
        assert (fake.key, fake.execution, fake.skipped, fake.name) == (RecordKey("orders", 0, 17), 3, True, "n")
        assert fake.writes == (view,)
        assert 0 < fake.remaining() <= 5
    assert current_record() is None
    assert fake.ended


def test_in_a_fake_record_calls_are_protected(client: Any) -> None:
    testing.faults(client).lose_reply("insert_one")
    with testing.fixed_time(), testing.fake_record(None) as fake:
        client.db.c.insert_one({})
    assert fake.writes[0].outcome is Outcome.APPLIED
    assert client.db.c.count_documents({}) == 1


def test_an_error_leaves_a_fake_record() -> None:
    with pytest.raises(KeyError), testing.fake_record():
        raise KeyError
    assert current_record() is None


# failures


def test_each_failure_does_what_it_says(client: Any) -> None:
    faults = testing.faults(client)
    collection = client.db.c
    for fail, error, count in (
        (faults.lose_reply, AutoReconnect, 1),
        (faults.lose_request, AutoReconnect, 1),
        (faults.fail_before_sending, ServerSelectionTimeoutError, 1),
    ):
        fail("insert_one")
        with pytest.raises(error):
            collection.insert_one({})
        assert collection.count_documents({}) == count
    answer = ExecutionTimeout("stopped", 50)
    faults.answer(answer, "insert_one")
    with pytest.raises(ExecutionTimeout) as caught:
        collection.insert_one({})
    assert caught.value is answer
    assert collection.count_documents({}) == 1


@pytest.mark.parametrize(
    ("fail", "outcome", "sends"),
    [("lose_reply", Outcome.APPLIED, 3), ("lose_request", Outcome.APPLIED, 3), ("fail_before_sending", Outcome.APPLIED, 1)],
)
def test_in_a_record_each_is_repaired(client: Any, fail: str, outcome: Outcome, sends: int) -> None:
    getattr(testing.faults(client), fail)("insert_one")
    with testing.fixed_time(), record("r") as current:
        client.db.c.insert_one({})
    assert client.db.c.count_documents({}) == 1
    assert (current.writes[0].outcome, current.writes[0].calls, current.writes[0].sends) == (outcome, 2, sends)


def test_a_failure_strikes_the_calls_it_names_so_often_and_so_late(client: Any) -> None:
    faults = testing.faults(client)
    faults.lose_request("insert_one", collection="c", times=2, after=1)
    hit = []
    for place in (client.db.d, client.db.c, client.db.c, client.db.c, client.db.c):
        try:
            place.insert_one({})
            hit.append(False)
        except AutoReconnect:
            hit.append(True)
    assert hit == [False, False, True, True, False]
    assert faults.pending == 0


def test_failures_are_removed(client: Any) -> None:
    faults = testing.faults(client)
    faults.lose_reply(times=3)
    assert faults.pending == 3
    faults.clear()
    assert faults.pending == 0
    client.db.c.insert_one({})


def test_the_marker_is_hit_only_by_its_name(client: Any) -> None:
    faults = testing.faults(client)
    runs = []

    def work(_: int) -> None:
        runs.append(1)

    @handler(key="k", name="h", guarantee="transaction", client=client, digest=lambda _: b"x")
    def on_order(number: int) -> None:
        work(number)

    faults.lose_reply("insert_one")
    on_order(1)
    assert (runs, faults.pending) == ([1], 1)
    faults.clear()
    faults.lose_reply("insert_one", collection="saferetry_records")
    with testing.fixed_time():
        handler(key="k2", name="h2", guarantee="transaction", client=client, digest=lambda _: b"x")(work)(1)
    assert (runs, faults.pending) == ([1, 1], 0)


def test_repeatable_writes_are_sent_again_in_memory(client: Any) -> None:
    testing.faults(client).lose_reply("update_many")
    client.db.c.insert_one({"n": 1})
    with testing.fixed_time(), record("r"), repeatable():
        client.db.c.update_many({}, {"$inc": {"n": 1}})
    assert client.db.c.find_one()["n"] == 3  # twice, as declared


@pytest.mark.parametrize(("times", "after"), [(0, 0), (1, -1)])
def test_failures_without_sense_are_refused(client: Any, times: int, after: int) -> None:
    with pytest.raises(ConfigurationError, match="faults: times is"):
        testing.faults(client).lose_reply(times=times, after=after)


def test_only_a_client_in_memory_has_failures() -> None:
    with pymongo.MongoClient[dict[str, Any]](connect=False) as raw:
        for other in (raw, None, 7):
            with pytest.raises(ConfigurationError, match="give a mongomock client"):
                testing.faults(other)


def test_without_mongomock_a_mock_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mongomock", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'saferetry\[testing\]'"):
        testing.mock_client()
