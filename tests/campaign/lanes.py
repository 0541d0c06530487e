"""Lanes: consumers in this process and in others, each behind a proxy of its own, that are handed deliveries."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from saferetry.lab.processes import ProcessError, TellingProcess
from tests.campaign.faults import Actors, Observed
from tests.campaign.grounds import Ground
from tests.campaign.handling import Handler, Told, connect
from tests.campaign.schedule import Fault, Lane, Plan
from tests.campaign.sends import Sends
from tests.support import random_name
from tests.support.driving import run_without_waiting

ROOT = Path(__file__).parents[2]
_PATIENCE = 90.0  # seconds for one delivery


class RunningLane:
    """A lane at work: `deliver` may be called from several threads.

    Attributes:
        app_name: of its clients.
        sends: what its clients sent; nothing for a process of its own.
    """

    def __init__(self, lane: Lane, ground: Ground, database: str, mutant: str) -> None:
        self.lane = lane
        self.app_name = random_name("app")
        self.sends = Sends()
        self.database = database
        self.mutant = mutant
        self.options = ground.options
        self._attached = ground.attached()
        self._free = threading.Semaphore(lane.at_once)

    def __enter__(self) -> Self:
        self.script, self.uri = self._attached.__enter__()
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._attached.__exit__(None, None, None)

    def open(self) -> None:
        """Connect."""

    def close(self) -> None:
        """Close what was opened."""

    def deliver(self, plan: Plan, faults: tuple[Fault, ...]) -> tuple[Told, Observed]:
        """Hand a record over; return what is told, and the faults that took place."""
        with self._free, self.script.reserved(faults):
            told = self._handle(plan, faults)
            return told, self.script.end(plan.owner, self.app_name)

    def _handle(self, plan: Plan, faults: tuple[Fault, ...]) -> Told:
        raise NotImplementedError

    def _connect(self) -> Any:
        return connect(self.lane, self.uri, self.app_name, self.database, event_listeners=[self.sends], **self.options)


class SyncLane(RunningLane):
    """A sync client, used by one thread or several."""

    def open(self) -> None:
        self._client = self._connect()
        self._client.admin.command("ping")

    def close(self) -> None:
        self._client.close()

    def _handle(self, plan: Plan, faults: tuple[Fault, ...]) -> Told:
        handler = Handler(plan, self._client, self.database)
        handle = handler.decorated(lambda argument: run_without_waiting(handler.work(argument)))
        self.script.begin(plan.owner, faults, Actors(self.app_name, handler.where))
        try:
            return handler.done(handle(plan))
        except Exception as exc:  # noqa: BLE001 - the oracle judges
            return handler.failed(exc)


class AsyncLane(RunningLane):
    """An async client in an event loop of its own, which handles several records at a time."""

    def open(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.lane.name, daemon=True)
        self._thread.start()
        self._client = self._connect()
        asyncio.run_coroutine_threadsafe(self._client.admin.command("ping"), self._loop).result(_PATIENCE)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(_PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _handle(self, plan: Plan, faults: tuple[Fault, ...]) -> Told:
        handler = Handler(plan, self._client, self.database)

        async def work(argument: Plan) -> Any:
            return await handler.work(argument)

        async def handle() -> Told:
            task = asyncio.current_task()
            assert task is not None
            cancel = task.cancel
            self.script.begin(
                plan.owner, faults, Actors(self.app_name, handler.where, cancel=lambda: self._loop.call_soon_threadsafe(cancel))
            )
            try:
                return handler.done(await handler.decorated(work)(plan))
            except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001 - the oracle judges
                return handler.failed(exc)

        try:
            return asyncio.run_coroutine_threadsafe(handle(), self._loop).result(_PATIENCE)
        except CancelledError as exc:  # it came when the handler had ended
            return handler.failed(exc)


class ProcessLane(RunningLane):
    """A process of its own, that may be killed; the next delivery then gets another one."""

    def open(self) -> None:
        self._process: TellingProcess | None = None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _handle(self, plan: Plan, faults: tuple[Fault, ...]) -> Told:
        process = self._process = self._process or self._start()

        def pause(seconds: float) -> None:
            process.pause()
            threading.Timer(seconds, process.resume).start()

        self.script.begin(plan.owner, faults, Actors(self.app_name, kill=process.kill, pause=pause))
        process.ask(**plan.as_json())
        try:
            told = process.wait_for("told", _PATIENCE)
        except ProcessError:
            process.resume()
            if process.finish() >= 0:
                raise
            self.close()
            return Told(is_killed=True)
        return Told(**{name: value for name, value in told.items() if name != "event"})

    def _start(self) -> TellingProcess:
        plan = {"lane": asdict(self.lane), "uri": self.uri, "app_name": self.app_name, "options": self.options}
        plan |= {"database": self.database, "mutant": self.mutant}
        process = TellingProcess("tests.campaign.worker", plan, folder=ROOT)
        process.wait_for("ready")
        return process


_KINDS: dict[str, type[RunningLane]] = {"sync": SyncLane, "threads": SyncLane, "async": AsyncLane, "process": ProcessLane}


def running(lane: Lane, ground: Ground, database: str, mutant: str) -> RunningLane:
    """Return a lane, not yet at work."""
    return _KINDS[lane.kind](lane, ground, database, mutant)
