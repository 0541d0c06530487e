"""Attempts under tenacity's rules; its objects are made only where the first attempt failed, which is rare.

Once for threads and once for asyncio; tests/unit/test_twins.py compares their syntax trees.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tenacity import AsyncRetrying, Retrying

from saferetry import _world

Controls = Callable[[], dict[str, Any]]  # asked for tenacity's rules after the first attempt failed


def attempts(controls: Controls, fn: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns, at the latest attempt that the rules allow.

    Raises:
        BaseException: What the last attempt raised.
    """
    try:
        return fn(*args)
    except BaseException as exc:  # noqa: BLE001 - the rules are asked
        failed = [exc]
    return more_attempts(failed, controls, fn, *args)


def more_attempts(failed: list[BaseException], controls: Controls, fn: Callable[..., Any], *args: Any) -> Any:
    """Return the same after a first attempt, whose only error is taken out of the list.

    Raises:
        BaseException: What the last attempt raised.
    """

    def next_attempt() -> Any:
        if failed:
            raise failed.pop()
        return fn(*args)

    return Retrying(sleep=_world.sleep, **controls())(next_attempt)


async def attempts_async(controls: Controls, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Return what the function returns, at the latest attempt that the rules allow.

    Raises:
        BaseException: What the last attempt raised.
    """
    try:
        return await fn(*args)
    except BaseException as exc:  # noqa: BLE001 - the rules are asked
        failed = [exc]
    return await more_attempts_async(failed, controls, fn, *args)


async def more_attempts_async(
    failed: list[BaseException], controls: Controls, fn: Callable[..., Awaitable[Any]], *args: Any
) -> Any:
    """Return the same after a first attempt, whose only error is taken out of the list.

    Raises:
        BaseException: What the last attempt raised.
    """

    async def next_attempt() -> Any:
        if failed:
            raise failed.pop()
        return await fn(*args)

    return await AsyncRetrying(sleep=_world.sleep_async, **controls())(next_attempt)
