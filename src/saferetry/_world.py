"""The clock, the sleeping and the chance that records are worked by; a test puts its own in their place."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager


class World:
    """Be the real one."""

    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        """Wait, and let other tasks run."""
        await asyncio.sleep(seconds)

    def uniform(self, rng: random.Random, limit: float) -> float:
        """Return some number of seconds up to a limit."""
        return rng.uniform(0, limit)


# Of the process, and not of a context: what a test replaces holds in the threads and tasks that it starts, too.
_WORLDS = [World()]
monotonic = World.monotonic  # seconds that only grow; asked several times a call, hence no function of ours in between


@contextmanager
def replaced(world: World) -> Iterator[None]:
    """Let another one hold, in every thread, until the end of the block."""
    global monotonic  # noqa: PLW0603 - see there
    _WORLDS.append(world)
    monotonic = world.monotonic
    try:
        yield
    finally:
        _WORLDS.remove(world)
        monotonic = _WORLDS[-1].monotonic


def sleep(seconds: float) -> None:
    """Wait."""
    _WORLDS[-1].sleep(seconds)


async def sleep_async(seconds: float) -> None:
    """Wait, and let other tasks run."""
    await _WORLDS[-1].sleep_async(seconds)


def uniform(rng: random.Random, limit: float) -> float:
    """Return some number of seconds up to a limit."""
    return _WORLDS[-1].uniform(rng, limit)
