"""A consumer's process is killed before and after each command it sends; the record is redelivered: effects once."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from typing import Any, Literal

import pytest

from saferetry.lab.processes import TellingProcess
from tests.proof import work
from tests.proof.conftest import Ground
from tests.proof.work import Work
from tests.support import CommandLog

When = Literal["before", "after"]
WORKS: dict[str, Work] = {"sync": work.order, "async": work.order_async}


def handle(ground: Ground, way: str, **arguments: Any) -> list[int]:
    """Handle record 1 in this process; return the executions."""
    consumer = ground.consumer(WORKS[way], is_async=way == "async", **arguments)
    if way == "sync":
        with consumer:
            assert consumer.handle(1) in (1, None)
        return consumer.executions

    async def handle_async() -> None:
        assert await consumer.handle(1) in (1, None)
        await consumer.client.close()

    asyncio.run(handle_async())
    return consumer.executions


def killed_at(ground: Ground, way: str, place: int, when: When) -> bool:
    """Let a worker handle record 1 and kill it at its `place`-th command; whether there was one."""

    def kill() -> None:
        worker.kill()

    proxy = ground.proxy(mode="cut" if when == "before" else "close", skip=place, on_hit=kill)
    worker: TellingProcess = ground.worker(1, uri=proxy.uri(), work=WORKS[way].__name__, is_async=way == "async")
    code = worker.finish()
    assert code == (-signal.SIGKILL if proxy.hits else 0), worker.trace()
    return bool(proxy.hits)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_killed_at_every_command(way: str, when: When, ground: Ground, show: Callable[[str], None]) -> None:
    log = CommandLog()
    ground.database.create_collection(work.MARKERS)  # so that every command succeeds, the first listIndexes too
    handle(ground, way, event_listeners=[log])
    commands = log.names()
    assert commands.index("commitTransaction") >= 4
    executed_again = []
    for place in itertools.count():
        ground.start_anew()
        ground.database.create_collection(work.MARKERS)
        if not killed_at(ground, way, place, when):
            break
        executed_again.append(len(handle(ground, way)))
        assert ground.effects() == work.once(1), f"killed {when} {commands[place]} ({place})"
    show(f"{way}: killed {when} each of {len(executed_again)} commands: {' '.join(commands)}")
    assert len(executed_again) == len(commands)
    commit = commands.index("commitTransaction") + (1 if when == "before" else 0)
    assert executed_again == [1] * commit + [0] * (len(commands) - commit)
