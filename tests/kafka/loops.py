"""Both loops on a consumer that does as the test says: no broker, no waiting for a group."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from saferetry import RecordKey, Settings
from saferetry._losses import LOSSES
from saferetry.kafka import PollBudget
from saferetry.kafka._arun import AsyncLoop
from saferetry.kafka._consuming import Terms
from saferetry.kafka._ledger import Place
from saferetry.kafka._message import Message, read_message
from saferetry.kafka._run import Loop
from tests.kafka.messages import ConfluentMessage

Handler = Callable[[Any], Any]
BUDGET = Settings(longest_execution_ms=100)
PLACE = RecordKey("t", 0, 0, group="g")


class FakeConsumer:
    """A consumer in our shape, with topic "t".

    Attributes:
        log: The messages of each partition.
        committed: What was committed.
        commits: Every commit, in order.
        commit_errors: Raised by the next commits.
        events: Called one after another inside the next polls, with this consumer.
        is_closed: It has left the group.
    """

    def __init__(self, *counts: int) -> None:
        self.log = {("t", number): count for number, count in enumerate(counts)}
        self.committed: dict[Place, int] = {}
        self.commits: list[dict[Place, int]] = []
        self.commit_errors: list[Exception] = []
        self.events: list[Callable[[FakeConsumer], Any]] = []
        self.paused: set[Place] = set()
        self.was_paused: set[Place] = set()
        self.is_closed = False
        self.polls = 0
        self.longest_wait = 0.0
        self.max_poll_gap = 0.0
        self._next: dict[Place, int] = {}
        self._polled_at = 0.0

    def assign(self, places: Iterable[Place]) -> None:
        """Tell that partitions are assigned; they begin where they were committed."""
        places = list(places)
        for place in places:
            self._next[place] = self.committed.get(place, 0)
        self.assigned(places)

    def revoke(self, places: Iterable[Place]) -> Any:
        """Tell that partitions are revoked."""
        for place in (places := list(places)):
            self._next.pop(place)
        return self.revoked(places)

    def lose(self, places: Iterable[Place]) -> Any:
        """Tell that partitions were lost."""
        for place in (places := list(places)):
            self._next.pop(place)
        return self.lost(places)

    def subscribe(self, topics: Any, assigned: Any, revoked: Any, lost: Any) -> None:
        self.assigned, self.revoked, self.lost = assigned, revoked, lost

    def next_event(self) -> Any:
        """Do what is to happen inside this poll."""
        now = time.monotonic()
        self.max_poll_gap = max(self.max_poll_gap, now - self._polled_at if self._polled_at else 0.0)
        self._polled_at = now
        self.polls += 1
        if self.polls == 1:
            self.assign(self.log)
        return self.events.pop(0)(self) if self.events else None

    def messages(self, most: int) -> list[Message]:
        found: list[Message] = []
        for place, position in self._next.items():
            if place not in self.paused:
                until = min(self.log[place], position + most - len(found))
                found += [read_message(message_at(place, offset), "t") for offset in range(position, until)]
                self._next[place] = until
        return found

    def poll(self, most: int, seconds: float) -> list[Message]:
        self.next_event()
        self.longest_wait = max(self.longest_wait, seconds)
        time.sleep(min(seconds, 0.002))
        return self.messages(most)

    def pause(self, places: Iterable[Place]) -> None:
        assert set(places) <= set(self._next)
        self.paused |= set(places)
        self.was_paused |= set(places)

    def resume(self, places: Iterable[Place]) -> None:
        assert set(places) <= set(self._next)
        self.paused -= set(places)

    def commit(self, offsets: Mapping[Place, int]) -> None:
        if self.commit_errors:
            raise self.commit_errors.pop(0)
        self.commits.append(dict(offsets))
        self.committed |= offsets

    def highwater(self, place: Place) -> int | None:
        return self.log[place]

    def close(self) -> None:
        self.is_closed = True


class AsyncFakeConsumer:
    """The same for asyncio."""

    def __init__(self, fake: FakeConsumer) -> None:
        self._fake = fake
        self.pause, self.resume, self.highwater = fake.pause, fake.resume, fake.highwater

    async def subscribe(self, topics: Any, assigned: Any, revoked: Any, lost: Any) -> None:
        self._fake.subscribe(topics, assigned, revoked, lost)

    async def poll(self, most: int, seconds: float) -> list[Message]:
        event = self._fake.next_event()
        if event is not None:
            await event
        self._fake.longest_wait = max(self._fake.longest_wait, seconds)
        await asyncio.sleep(min(seconds, 0.002))
        return self._fake.messages(most)

    async def commit(self, offsets: Mapping[Place, int]) -> None:
        self._fake.commit(offsets)

    async def close(self) -> None:
        self._fake.close()


def message_at(place: Place, offset: int) -> ConfluentMessage:
    return ConfluentMessage(topic_=place[0], partition_=place[1], offset_=offset)


class Consumed:
    """Run one of the loops on a fake consumer, in a thread of its own, so that the test can look and stop it.

    Attributes:
        seen: Offsets for which the handler began, by partition.
        order: (partition, offset) in the order in which the handler began.
    """

    def __init__(self, half: str, fake: FakeConsumer, work: Handler, **terms: Any) -> None:
        self.fake = fake
        self.seen: dict[int, list[int]] = defaultdict(list)
        self.order: list[tuple[int, int]] = []
        self.error: BaseException | None = None
        self._work = work
        self._losses = LOSSES.count(PLACE)
        given: dict[str, Any] = {
            "topics": ("t",),
            "group": "g",
            "budget": PollBudget(60_000, 1, settings=BUDGET),
            "put_off_on": (),
            "commit_records": 500,
            "commit_seconds": 0.01,
            "max_records": 10,
            "stop_seconds": None,
            "report_seconds": 60.0,
        }
        self._terms = Terms(**{**given, **terms})
        self._loop: Loop | AsyncLoop
        self._task: asyncio.Task[None] | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        target = self._run_async if half == "async" else self._run
        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    def _note(self, message: Any) -> None:
        self.order.append((message.partition(), message.offset()))
        self.seen[message.partition()].append(message.offset())

    def _run(self) -> None:
        def handle(message: Any) -> Any:
            self._note(message)
            return self._work(message)

        self._loop = Loop(self.fake, handle, self._terms)
        try:
            self._loop.run(threading.Event())
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            self.error = exc

    def _run_async(self) -> None:
        async def handle(message: Any) -> Any:
            self._note(message)
            return await asyncio.to_thread(self._work, message)

        async def main() -> None:
            self._events = asyncio.get_running_loop()
            self._loop = AsyncLoop(AsyncFakeConsumer(self.fake), handle, self._terms)  # type: ignore[arg-type]  # a fake
            self._task = asyncio.create_task(self._loop.run(asyncio.Event()))
            await self._task

        try:
            asyncio.run(main())
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            self.error = exc

    def is_told_lost(self) -> bool:
        """Whether the record in work, in the first partition, was told that it is lost."""
        return LOSSES.count(PLACE) > self._losses

    def is_leaving(self, place: Place) -> bool:
        """Whether the loop knows that a partition is being taken away."""
        return self._loop._consuming.ledger.partitions[place].is_leaving

    def stop(self) -> None:
        """Tell the loop to stop."""
        self._loop.stop()

    def cancel(self) -> None:
        """Cancel the task (asyncio)."""
        assert self._events is not None
        assert self._task is not None
        self._events.call_soon_threadsafe(self._task.cancel)

    def end(self) -> BaseException | None:
        """Wait until the loop has ended; return what it raised."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error
