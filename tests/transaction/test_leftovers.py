"""What outlives its execution can neither write beside the transaction nor into the next one."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pymongo.errors import InvalidOperation, PyMongoError

from saferetry import Record, RecordKey, current_record, propagate
from saferetry._seam import raw_database
from saferetry.errors import ConfigurationError, TakenOverError
from tests.support import CommandLog
from tests.support.driving import done
from tests.transaction.scene import Scene, listed, names, only_async, plainly

WRITES: dict[str, Callable[[Any], Any]] = {
    "insert_one": lambda c: c.insert_one({"_id": "left over"}),
    "update_many": lambda c: c.update_many({}, {"$set": {"left": "over"}}),
    "delete_many": lambda c: c.delete_many({}),
    "find_one_and_update": lambda c: c.find_one_and_update({}, {"$set": {"left": "over"}}),
}


class Leftover:
    """Something started in a handler, in a thread or a task, that works when it is let go."""

    def __init__(self, scene: Scene, work: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._is_async = scene.api.is_async
        self._gate: Any = asyncio.Event() if self._is_async else threading.Event()

        async def wait_and_work() -> None:
            try:
                await done(self._gate.wait())
                await done(work())
            except Exception as exc:  # noqa: BLE001 - looked at by the test
                self.error = exc

        def run() -> None:
            try:
                self._gate.wait()
                work()
            except Exception as exc:  # noqa: BLE001 - looked at by the test
                self.error = exc

        if self._is_async:
            self._running: Any = asyncio.get_running_loop().create_task(wait_and_work())
        else:
            self._running = threading.Thread(target=propagate(run))
            self._running.start()

    async def finish(self) -> None:
        """Let it go and wait for its end."""
        self._gate.set()
        await (self._running if self._is_async else done(self._running.join()))


@pytest.fixture
def stocked(scene: Scene) -> Scene:
    """A document is there."""
    scene.there.c.insert_one({"_id": 1})
    return scene


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_left_over_from_a_failed_execution_is_refused_in_the_next_one(stocked: Scene, name: str) -> None:
    leftovers = []

    async def on_order(database: Any) -> None:
        if stocked.runs == 1:
            leftovers.append(Leftover(stocked, lambda: WRITES[name](database.c)))
            raise LookupError
        await done(database.c.insert_one({"_id": 2}))
        await leftovers[0].finish()

    await stocked.deliver(on_order, retry_on=LookupError)
    assert isinstance(leftovers[0].error, ConfigurationError)
    assert stocked.documents() == [{"_id": 1}, {"_id": 2}]


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_left_over_from_a_committed_record_is_refused(stocked: Scene, name: str) -> None:
    leftovers = []

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 2}))
        leftovers.append(Leftover(stocked, lambda: WRITES[name](database.c)))

    await stocked.deliver(on_order)
    await leftovers[0].finish()
    assert isinstance(leftovers[0].error, ConfigurationError)
    assert stocked.documents() == [{"_id": 1}, {"_id": 2}]


async def test_a_read_left_over_from_a_record_sees_what_is_committed(stocked: Scene) -> None:
    leftovers, found = [], []

    async def on_order(database: Any) -> None:
        async def look() -> None:
            found.append(await done(database.c.find_one({"_id": 2})))

        await done(database.c.insert_one({"_id": 2}))
        work: Callable[[], Any] = look if stocked.api.is_async else (lambda: plainly(look()))
        leftovers.append(Leftover(stocked, work))

    await stocked.deliver(on_order)
    await leftovers[0].finish()
    assert (found, leftovers[0].error) == ([{"_id": 2}], None)


async def test_a_write_in_the_server_when_the_handler_returns_is_committed_with_it_or_not_at_all(stocked: Scene) -> None:
    leftovers = []

    async def on_order(database: Any) -> None:
        slow = {"$where": "sleep(300) || true"}
        leftovers.append(Leftover(stocked, lambda: database.c.update_one(slow, {"$inc": {"n": 1}})))
        leftovers[-1]._gate.set()
        await stocked.sleep(0.1)

    await stocked.deliver(on_order)
    assert len(stocked.markers()) == 1
    await leftovers[0].finish()
    n = stocked.documents()[0].get("n", 0)
    assert n == (1 if leftovers[0].error is None else 0)
    await stocked.sleep(0.3)
    assert stocked.documents()[0].get("n", 0) == n


@pytest.mark.parametrize("ending", ["committed", "aborted"])
async def test_the_session_of_a_record_that_is_over_sends_nothing(stocked: Scene, log: CommandLog, ending: str) -> None:
    client = stocked.client(log=log)
    records: list[Record] = []

    async def on_order(database: Any) -> None:
        record = current_record()
        assert record is not None
        records.append(record)
        await done(database.c.insert_one({"_id": 2}))
        if ending == "aborted":
            raise LookupError

    try:
        await stocked.deliver(on_order, client)
    except LookupError:
        assert ending == "aborted"
    session = records[0].transaction.session
    raw = raw_database(client, stocked.name).c
    log.clear()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: raw.update_many({}, {"$set": {"left": "over"}}, session=session),
        lambda: raw.delete_many({}, session=session),
        lambda: raw.insert_one({"_id": "left over"}, session=session),
        lambda: raw.find_one({}, session=session),
    )
    for call in calls:
        with pytest.raises((ConfigurationError, InvalidOperation)):
            await done(call())
    assert names(log) == []
    assert {"_id": 1} in stocked.documents()


@pytest.mark.parametrize("fetched", [0, 1])
async def test_a_cursor_that_outlives_its_record_is_refused(stocked: Scene, fetched: int) -> None:
    stocked.there.c.insert_many([{"_id": number} for number in range(2, 9)])
    cursors = []

    async def on_order(database: Any) -> None:
        cursor = database.c.find({}, batch_size=2)
        for _ in range(fetched):
            await done(cursor.__anext__() if stocked.api.is_async else next(cursor))
        cursors.append(cursor)

    await stocked.deliver(on_order)
    with pytest.raises(ConfigurationError, match="is over"):
        await listed(cursors[0])
    await done(cursors[0].close())


async def test_a_cursor_that_was_not_read_to_its_end_does_no_harm(stocked: Scene) -> None:
    stocked.there.c.insert_many([{"_id": number} for number in range(2, 9)])

    async def on_order(database: Any) -> None:
        cursor = database.c.find({}, batch_size=2)
        await done(cursor.__anext__() if stocked.api.is_async else next(cursor))
        del cursor
        gc.collect()
        await done(database.c.insert_one({"_id": 9}))

    await stocked.deliver(on_order)
    assert len(stocked.documents()) == 9
    assert stocked.runs == 1


async def test_a_cursor_closed_after_its_record_does_no_harm(stocked: Scene) -> None:
    stocked.there.c.insert_many([{"_id": number} for number in range(2, 9)])
    cursors = []

    async def on_order(database: Any) -> None:
        cursor = database.c.find({}, batch_size=2)
        await done(cursor.__anext__() if stocked.api.is_async else next(cursor))
        cursors.append(cursor)

    await stocked.deliver(on_order)
    await done(cursors[0].close())
    assert stocked.runs == 1


async def test_tasks_or_threads_of_two_records_at_once_keep_to_their_own_transactions(stocked: Scene) -> None:
    client = stocked.client()

    async def deliver(number: int) -> None:
        async def on_order(database: Any) -> None:
            async def insert(part: int) -> None:
                await done(database.c.insert_one({"_id": 100 * number + part}))

            await stocked.at_once(insert, 3)
            if number == 2:
                raise LookupError

        await stocked.deliver(on_order, client, key=("orders", 0, number), digest=lambda _: b"x")

    answers = await stocked.together(lambda: deliver(1), lambda: deliver(2), lambda: deliver(3))
    assert [type(answer) for answer in answers] == [type(None), LookupError, type(None)]
    assert [document["_id"] for document in stocked.documents()] == [1, 100, 101, 102, 300, 301, 302]


async def test_records_of_one_slot_at_once_are_done_one_after_another(stocked: Scene) -> None:
    client = stocked.client()
    at_work: list[int] = []
    most = []

    async def deliver(number: int) -> None:
        async def on_order(database: Any) -> None:
            at_work.append(number)
            most.append(len(at_work))
            await done(database.c.insert_one({"_id": 10 + number}))
            await stocked.sleep(0.02)
            at_work.remove(number)

        await stocked.deliver(on_order, client, key=("orders", 0, 256 * number), digest=lambda _: b"x")

    await stocked.together(*((lambda number=number: deliver(number)) for number in range(4)))
    assert max(most) == 1
    assert len(stocked.documents()) == 5


async def test_one_that_waits_for_its_slot_gives_up_at_the_end_of_its_budget_and_holds_up_nobody(stocked: Scene) -> None:
    client = stocked.client()
    answers: dict[int, list[Any]] = {}

    async def deliver(number: int, **options: Any) -> None:
        async def on_order(database: Any) -> None:
            await done(database.c.insert_one({"_id": 10 + number}))
            if number == 0:
                await stocked.until(lambda: 1 in answers)

        await stocked.deliver(on_order, client, key=RecordKey("orders", 0, 256 * number, group="g", digest=b"x"), **options)

    async def second() -> None:
        await stocked.until(lambda: stocked.runs)
        answers[1] = await stocked.together(lambda: deliver(1, budget=0.2))

    async def third() -> None:
        await stocked.until(lambda: stocked.runs)
        await deliver(2)

    assert await stocked.together(lambda: deliver(0), second, third) == [None] * 3
    assert [(type(error), "was in use by another record" in str(error)) for error in answers[1]] == [(TakenOverError, True)]
    assert [document["_id"] for document in stocked.documents()] == [1, 10, 12]


@only_async
async def test_a_record_cancelled_as_it_waits_for_its_slot_holds_up_nobody(stocked: Scene) -> None:
    client = stocked.client()

    async def deliver(number: int) -> None:
        async def on_order(database: Any) -> None:
            await done(database.c.insert_one({"_id": 10 + number}))
            await asyncio.sleep(0.05)

        await stocked.deliver(on_order, client, key=RecordKey("orders", 0, 256 * number, group="g", digest=b"x"))

    tasks = [asyncio.create_task(deliver(number)) for number in range(4)]
    await stocked.until(lambda: stocked.runs)
    for number in (1, 2):
        tasks[number].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [type(None), asyncio.CancelledError, asyncio.CancelledError, type(None)]
    assert [document["_id"] for document in stocked.documents()] == [1, 10, 13]


async def test_the_same_record_at_once_is_done_once(stocked: Scene) -> None:
    client = stocked.client()

    async def on_order(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}))

    answers = await stocked.together(*([lambda: stocked.deliver(on_order, client)] * 6))
    assert [answer for answer in answers if isinstance(answer, PyMongoError)] == []
    assert stocked.documents() == [{"_id": 1, "n": 1}]
    assert len(stocked.markers()) == 1
