"""Guarantee "process": a handler executed again only while it has written nothing."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from saferetry._attempts import attempts, attempts_async
from saferetry._handling import Handling


def handle(handling: Handling, fn: Callable[[], Any]) -> Any:
    """Handle a record.

    Raises:
        Exception: What left the last execution, unless a recoverer took it.
    """
    try:
        return attempts(handling.controls, _execute, handling, fn)
    except Exception as exc:
        recoverer = handling.recoverer_for(exc)
        if recoverer is None:
            raise
        return handling.finished(recoverer(handling.failure(exc)), "recoverer")


def _execute(handling: Handling, fn: Callable[[], Any]) -> Any:
    with handling:
        handling.check_held()
        return handling.finished(fn())


async def handle_async(handling: Handling, fn: Callable[[], Awaitable[Any]]) -> Any:
    """Handle a record.

    Raises:
        Exception: What left the last execution, unless a recoverer took it.
    """
    try:
        return await attempts_async(handling.controls, _execute_async, handling, fn)
    except Exception as exc:
        recoverer = handling.recoverer_for(exc)
        if recoverer is None:
            raise
        return handling.finished(await awaited(recoverer(handling.failure(exc))), "recoverer")


async def _execute_async(handling: Handling, fn: Callable[[], Awaitable[Any]]) -> Any:
    with handling:
        handling.check_held()
        return handling.finished(await fn())


async def awaited(value: Any) -> Any:
    """Return a value that a function of the user's returned or promised."""
    return await value if inspect.isawaitable(value) else value
