"""A consumer: a client, a handler with guarantee "transaction", and what became of its records."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import saferetry
from saferetry import Failure, RecordKey, Settings
from tests.proof.work import Database, Work

OPTIONS: dict[str, Any] = {
    "heartbeatFrequencyMS": 500,
    "serverMonitoringMode": "poll",
    "serverSelectionTimeoutMS": 10_000,
    "socketTimeoutMS": 10_000,
    "retryWrites": True,
}


@dataclass(frozen=True)
class Subscription:
    """Where a consumer's records come from."""

    topic: str = "orders"
    partition: int = 0
    group: str = "proof"
    has_positions: bool = True  # else each record is a stream of its own

    def key(self, position: int) -> RecordKey:
        """Return the key of a record."""
        digest = b"%d" % position
        if not self.has_positions:
            return RecordKey(f"{self.topic}-{position}", group=self.group, digest=digest)
        return RecordKey(self.topic, self.partition, position, group=self.group, digest=digest)


class Consumer:
    """Handle records, given their positions; from one thread or several.

    Attributes:
        client: the guarded client.
        executions: the positions for which the handler's body was started, in that order.
        failures: what the recoverer was given.
    """

    def __init__(
        self,
        uri: str,
        database: str,
        work: Work,
        *,
        subscription: Subscription | None = None,
        budget: float = 30.0,
        settings: Settings | None = None,
        is_async: bool = False,
        on_execution: Callable[[int], object] = lambda _: None,
        **options: Any,
    ) -> None:
        self.executions: list[int] = []
        self.failures: list[Failure] = []
        self._lock = threading.Lock()
        self._is_async = is_async
        settings = replace(settings or Settings(backoff_base_ms=5, backoff_cap_ms=100), marker_database=database)
        make: Any = saferetry.AsyncMongoClient if is_async else saferetry.MongoClient
        self.client = make(uri, saferetry=settings, **{**OPTIONS, **options})

        def begin(position: int) -> Database:
            with self._lock:
                self.executions.append(position)
            on_execution(position)
            return self.client[database]

        def keep(failure: Failure) -> str:
            self.failures.append(failure)
            return f"recovered: {failure.reason}"

        def handle(position: int) -> Any:
            return work(begin(position), position)

        async def handle_async(position: int) -> Any:
            return await work(begin(position), position)

        self.handle: Callable[[int], Any] = saferetry.handler(
            key=(subscription or Subscription()).key,
            guarantee="transaction",
            client=self.client,
            name="proof",
            budget=budget,
            recoverer=keep,
        )(handle_async if inspect.iscoroutinefunction(work) else handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_async:  # else whoever has the event loop closes it
            self.client.close()


def wait_until(moment: float) -> None:
    """Wait until the wall clock shows this time (seconds since 1970); the last of it awake, to be on time."""
    time.sleep(max(0.0, moment - time.time() - 0.01))
    while time.time() < moment:
        pass
