"""The loop around a consumer's records, with asyncio: one task polls, one handles."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from saferetry._handling import Exceptions
from saferetry.kafka._clients import AioKafkaClient, async_client_of
from saferetry.kafka._consuming import LAST_SECONDS, POLL, Consuming, Terms, record_entered
from saferetry.kafka._ledger import Place
from saferetry.kafka._partitions_lost import apartitions_lost
from saferetry.kafka._poll_budget import PollBudget, budget_for
from saferetry.kafka._signals import stopping_on_sigterm_in_loop

logger = logging.getLogger("saferetry")


async def arun(
    consumer: Any,
    handler: Callable[[Any], Awaitable[Any]],
    *,
    topics: str | Sequence[str],
    group: str = "",
    budget: PollBudget | None = None,
    put_off_on: Exceptions = (),
    commit_records: int = 500,
    commit_seconds: float = 1.0,
    max_records: int = 100,
    stop: asyncio.Event | None = None,
    stop_seconds: float | None = None,
    report_seconds: float = 60.0,
) -> None:
    """Do what ``run`` does, with aiokafka and an async handler.

    A cancellation ends it too: the handler is cancelled, what is done is committed, the group is left.

    Args:
        consumer: An ``aiokafka.AIOKafkaConsumer`` made with ``enable_auto_commit=False`` and without topics, not started; it is
            started, subscribed and stopped here.
        handler: Is awaited with each message.
        topics: What to subscribe to.
        group: The consumer group, as ``kafka_key`` was given it.
        budget: As for ``run``.
        put_off_on: As for ``run``.
        commit_records: As for ``run``.
        commit_seconds: As for ``run``.
        max_records: As for ``run``.
        stop: Set it to stop.
        stop_seconds: As for ``run``.
        report_seconds: As for ``run``.

    Example:
        >>> async def on_order(message): ...
        >>> asyncio.run(arun(object(), on_order, topics="orders"))
        Traceback (most recent call last):
        ...
        saferetry.errors.ConfigurationError: arun: object is not aiokafka's consumer: use run(...)

    Raises:
        ConfigurationError: An argument cannot work.
        BaseException: What left the handler and does not pass.
    """
    client = async_client_of(consumer)
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    terms = Terms(
        names, group, budget or budget_for(consumer), put_off_on, commit_records, commit_seconds, max_records, stop_seconds,
        report_seconds,
    )  # fmt: skip
    loop = AsyncLoop(client, handler, terms)
    with stopping_on_sigterm_in_loop(loop.stop):
        await loop.run(stop or asyncio.Event())


class AsyncLoop:
    """Be one run: one task polls and commits, another one handles records; the library tells of rebalances in a third."""

    def __init__(
        self,
        client: AioKafkaClient,
        handler: Callable[[Any], Awaitable[Any]],
        terms: Terms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._handler = handler
        self._terms = terms
        self._clock = clock
        self._consuming = Consuming(terms, handler, clock, is_async=True)
        self._changed = asyncio.Condition()
        self._worker: asyncio.Task[None] | None = None
        self._is_cancelled = False

    def stop(self) -> None:
        """Begin no further record."""
        self._consuming.is_stopping = True

    async def run(self, stop: asyncio.Event) -> None:
        """Consume until told to stop.

        Raises:
            BaseException: What left the handler and does not pass, or the library.
        """
        try:
            await self._client.subscribe(self._terms.topics, self._assigned, self._revoked, self._lost)
            self._worker = asyncio.create_task(self._work(), name="saferetry-records")
            while not (self._consuming.is_stopping or stop.is_set()):
                await self._turn(POLL)
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        finally:
            await self._finish()
        if self._consuming.failure is not None:
            raise self._consuming.failure

    async def _turn(self, seconds: float) -> None:
        if seconds:
            await self._wait_until(lambda: not self._consuming.is_full(), seconds)
        most, seconds = self._consuming.appetite(seconds)
        to_pause, to_resume = self._consuming.pauses()
        if to_pause:
            self._client.pause(to_pause)
        if to_resume:
            self._client.resume(to_resume)
        messages = await self._client.poll(most, seconds)
        async with self._changed:
            if self._consuming.took(messages):
                self._changed.notify_all()
        await self._commit(self._consuming.due_offsets())
        if self._consuming.is_report_due():
            self._consuming.report(self._client.highwater)

    async def _commit(self, offsets: dict[Place, int]) -> None:
        if not offsets:
            return
        error: Exception | None = None
        try:
            await self._client.commit(offsets)
        except Exception as exc:  # noqa: BLE001 - what is done stays done, and comes again at worst
            error = exc
        self._consuming.committed(offsets, error)

    # the end

    async def _finish(self) -> None:
        self._consuming.is_stopping = True
        async with self._changed:
            self._changed.notify_all()
        try:
            if self._worker is not None:
                await self._end_work(self._worker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_SECONDS):
                    await self._commit(self._consuming.ledger.to_commit())
            self._consuming.report(self._client.highwater)
        finally:
            await self._client.close()

    async def _end_work(self, worker: asyncio.Task[None]) -> None:
        """Let the record in work end, and go on polling meanwhile; tell it that it is lost when its time is up."""
        if not self._is_cancelled and await self._ends_within(worker, self._consuming.patience()):
            return
        self._consuming.has_given_up = True
        await apartitions_lost(list(self._consuming.ledger.partitions), self._terms.group)
        if not self._is_cancelled and await self._ends_within(worker, LAST_SECONDS):
            return
        worker.cancel()
        await asyncio.wait({worker}, timeout=2 * LAST_SECONDS)  # what was sent is cancelled on the server meanwhile
        if not worker.done():
            logger.error("the handler did not end although cancelled: its record is not done, and writes no more")

    async def _ends_within(self, worker: asyncio.Task[None], seconds: float) -> bool:
        deadline = self._clock() + seconds
        while not worker.done() and self._clock() < deadline:
            await asyncio.wait({worker}, timeout=POLL / 2)
            with contextlib.suppress(Exception):  # it may be what ended the loop
                await self._turn(0)
        return worker.done()

    # rebalances

    def _assigned(self, places: list[Place]) -> None:
        self._consuming.assigned(places)

    async def _revoked(self, places: list[Place]) -> None:
        """Let the record in work end, since the partition is still ours, and commit what is done."""
        ledger = self._consuming.ledger
        ledger.leave(places)
        await self._wait_for(places, self._consuming.patience())
        if ledger.is_in_work(places):
            await apartitions_lost(places, self._terms.group)
            await self._wait_for(places, LAST_SECONDS)
        await self._commit(ledger.to_commit(places))
        ledger.forget(places)

    async def _wait_for(self, places: Iterable[Place], seconds: float) -> None:
        await self._wait_until(lambda: not self._consuming.ledger.is_in_work(places), seconds)

    async def _wait_until(self, predicate: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(predicate)

    async def _lost(self, places: list[Place]) -> None:
        self._consuming.ledger.forget(places)
        if self._consuming.ledger.is_in_work(places):
            await apartitions_lost(places, self._terms.group)

    # records, in the other task

    async def _work(self) -> None:
        try:
            await self._handle_records()
        except Exception as exc:  # noqa: BLE001 - raised by the task that polls
            self._consuming.fail(exc)

    async def _handle_records(self) -> None:
        while True:
            async with self._changed:
                while (taken := self._consuming.take()) is None:
                    if self._consuming.is_stopping:
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._consuming.ledger.due_in(self._clock())):
                            await self._changed.wait()
            partition, message = taken
            record = self._consuming.record_of(message)
            error: BaseException | None = None
            try:
                with record_entered(record):
                    self._consuming.check_result(await self._handler(message.raw))
            except BaseException as exc:  # noqa: BLE001 - judged, and raised by the task that polls
                error = exc
            self._consuming.settle(partition, message, record, error)
            async with self._changed:
                self._changed.notify_all()
