"""The loop around a consumer's records, with threads: one polls, one handles."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from saferetry._handling import Exceptions
from saferetry.kafka._clients import Client, client_of
from saferetry.kafka._consuming import LAST_SECONDS, POLL, Consuming, Terms, record_entered
from saferetry.kafka._ledger import Place
from saferetry.kafka._partitions_lost import partitions_lost
from saferetry.kafka._poll_budget import PollBudget, budget_for
from saferetry.kafka._signals import stopping_on_sigterm

logger = logging.getLogger("saferetry")


def run(
    consumer: Any,
    handler: Callable[[Any], Any],
    *,
    topics: str | Sequence[str],
    group: str = "",
    budget: PollBudget | None = None,
    put_off_on: Exceptions = (),
    commit_records: int = 500,
    commit_seconds: float = 1.0,
    max_records: int = 100,
    stop: threading.Event | None = None,
    stop_seconds: float | None = None,
    report_seconds: float = 60.0,
) -> None:
    """Consume until it is told to stop: poll, handle each message as a record, commit what is done, leave the group.

    The messages of a partition are handled one after another in a thread of their own, while this one goes on polling; each
    has the budget of a poll for itself. An offset is committed only when its record and all before it in the partition are
    done. A record that fails with an error that passes (of the network or the servers, ``TakenOverError``,
    ``DeadLetterError``, ``put_off_on``) and that can be handled again without repeating an effect is put off: its partition is
    paused, its later records wait, the others flow. Any other error that leaves the handler ends the loop: what is done is
    committed, the group is left, and the error is raised.

    SIGTERM (in the main thread) or ``stop`` ends it: no further record begins, the one in work is finished or, when its time
    is up, told that it is lost, what is done is committed, the group is left.

    Args:
        consumer: A ``confluent_kafka.Consumer`` or ``kafka.KafkaConsumer`` that does not commit by itself
            (``enable.auto.commit`` false); it is subscribed and closed here.
        handler: Is called with each message; a ``saferetry.handler`` or a plain function, which is then a record with guarantee
            "process".
        topics: What to subscribe to.
        group: The consumer group, as ``kafka_key`` was given it.
        budget: The consumer's ``PollBudget``; else that of ``max.poll.interval.ms`` 300,000 or its setting.
        put_off_on: More exceptions that pass.
        commit_records: Offsets are committed after so many records,
        commit_seconds: and after so many seconds.
        max_records: Messages that a poll returns at most.
        stop: Set it to stop, from any thread.
        stop_seconds: What the record in work may take at a stop; else what is left of its budget.
        report_seconds: Seconds between two reports of progress and lag in the log.

    Example:
        >>> run(object(), print, topics="orders")
        Traceback (most recent call last):
        ...
        saferetry.errors.ConfigurationError: run: object is no consumer of confluent-kafka or kafka-python

    Raises:
        ConfigurationError: An argument cannot work.
        BaseException: What left the handler and does not pass.
    """
    client = client_of(consumer)
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    terms = Terms(
        names, group, budget or budget_for(consumer), put_off_on, commit_records, commit_seconds, max_records, stop_seconds,
        report_seconds,
    )  # fmt: skip
    loop = Loop(client, handler, terms)
    with stopping_on_sigterm(loop.stop):
        loop.run(stop or threading.Event())


class Loop:
    """Be one run: this thread polls, commits and is told of rebalances, another one handles records."""

    def __init__(
        self,
        client: Client,
        handler: Callable[[Any], Any],
        terms: Terms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._handler = handler
        self._terms = terms
        self._clock = clock
        self._consuming = Consuming(terms, handler, clock)
        self._changed = threading.Condition()
        work = contextvars.copy_context().run
        self._worker = threading.Thread(target=work, args=(self._work,), name="saferetry-records", daemon=True)

    def stop(self) -> None:
        """Begin no further record; may be called from a signal handler, which must not wait for a lock."""
        self._consuming.is_stopping = True

    def run(self, stop: threading.Event) -> None:
        """Consume until told to stop.

        Raises:
            BaseException: What left the handler and does not pass, or the library.
        """
        try:
            self._client.subscribe(self._terms.topics, self._assigned, self._revoked, self._lost)
            self._worker.start()
            while not (self._consuming.is_stopping or stop.is_set()):
                self._turn(POLL)
        finally:
            self._finish()
        if self._consuming.failure is not None:
            raise self._consuming.failure

    def _turn(self, seconds: float) -> None:
        with self._changed:
            if seconds:
                self._changed.wait_for(lambda: not self._consuming.is_full(), seconds)
            most, seconds = self._consuming.appetite(seconds)
            to_pause, to_resume = self._consuming.pauses()
        if to_pause:
            self._client.pause(to_pause)
        if to_resume:
            self._client.resume(to_resume)
        messages = self._client.poll(most, seconds)
        with self._changed:
            if self._consuming.took(messages):
                self._changed.notify_all()
            offsets = self._consuming.due_offsets()
            is_report_due = self._consuming.is_report_due()
        self._commit(offsets)
        if is_report_due:
            self._report()

    def _commit(self, offsets: dict[Place, int]) -> None:
        if not offsets:
            return
        error: Exception | None = None
        try:
            self._client.commit(offsets)
        except Exception as exc:  # noqa: BLE001 - what is done stays done, and comes again at worst
            error = exc
        with self._changed:
            self._consuming.committed(offsets, error)

    def _report(self) -> None:
        with self._changed:
            self._consuming.report(self._client.highwater)

    # the end

    def _finish(self) -> None:
        with self._changed:
            self._consuming.is_stopping = True
            patience = self._consuming.patience()
            self._changed.notify_all()
        if self._worker.ident is not None:
            self._end_work(patience)
        with self._changed:
            offsets = self._consuming.ledger.to_commit()
        self._commit(offsets)
        self._report()
        self._client.close()

    def _end_work(self, patience: float) -> None:
        """Let the record in work end, and go on polling meanwhile; tell it that it is lost when its time is up."""
        if not self._ends_within(patience):
            with self._changed:
                self._consuming.has_given_up = True
                places = list(self._consuming.ledger.partitions)
            partitions_lost(places, self._terms.group)
            if not self._ends_within(LAST_SECONDS):
                logger.error("the handler did not return in its time: its record is not done, and writes no more")

    def _ends_within(self, seconds: float) -> bool:
        deadline = self._clock() + seconds
        while self._worker.is_alive() and self._clock() < deadline:
            self._worker.join(POLL / 2)
            with contextlib.suppress(Exception):  # it may be what ended the loop
                self._turn(0)
        return not self._worker.is_alive()

    # rebalances, told inside poll and close

    def _assigned(self, places: list[Place]) -> None:
        with self._changed:
            self._consuming.assigned(places)

    def _revoked(self, places: list[Place]) -> None:
        """Let the record in work end, since the partition is still ours, and commit what is done."""
        ledger = self._consuming.ledger
        with self._changed:
            ledger.leave(places)
            self._wait_for(places, self._consuming.patience())
            is_in_work = ledger.is_in_work(places)
        if is_in_work:
            partitions_lost(places, self._terms.group)
            with self._changed:
                self._wait_for(places, LAST_SECONDS)
        with self._changed:
            offsets = ledger.to_commit(places)
        self._commit(offsets)
        with self._changed:
            ledger.forget(places)

    def _wait_for(self, places: Iterable[Place], seconds: float) -> None:
        self._changed.wait_for(lambda: not self._consuming.ledger.is_in_work(places), seconds)

    def _lost(self, places: list[Place]) -> None:
        with self._changed:
            self._consuming.ledger.forget(places)
            is_in_work = self._consuming.ledger.is_in_work(places)
        if is_in_work:
            partitions_lost(places, self._terms.group)

    # records, in the other thread

    def _work(self) -> None:
        try:
            self._handle_records()
        except BaseException as exc:  # noqa: BLE001 - raised by the thread that polls
            with self._changed:
                self._consuming.fail(exc)

    def _handle_records(self) -> None:
        while True:
            with self._changed:
                while (taken := self._consuming.take()) is None:
                    if self._consuming.is_stopping:
                        return
                    self._changed.wait(self._consuming.ledger.due_in(self._clock()))
                partition, message = taken
                record = self._consuming.record_of(message)
            error: BaseException | None = None
            try:
                with record_entered(record):
                    self._consuming.check_result(self._handler(message.raw))
            except BaseException as exc:  # noqa: BLE001 - judged, and raised by the thread that polls
                error = exc
            with self._changed:
                self._consuming.settle(partition, message, record, error)
                self._changed.notify_all()
