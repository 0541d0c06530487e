"""The loops: driver calls made, waited between and cancelled, once for threads and once for asyncio.

The two halves say the same; tests/unit/test_twins.py compares their syntax trees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any

from tenacity import AsyncRetrying, Retrying

from saferetry._call import Command, WriteCall
from saferetry._read import ReadCall
from saferetry._seam import cancel, cancel_async


def write(call: WriteCall) -> Any:
    """Make a write call: each command until it is settled, or given up.

    Raises:
        Exception: The driver's own last error, unchanged but for a note and ``exc.saferetry``.
    """
    try:
        for command in call.commands():
            Retrying(sleep=time.sleep, **call.controls(command))(_send, call, command)
    except BaseException as exc:
        for address in call.give_up(exc):
            cancel(call.target.client, address)
        raise
    return call.finish()


def _send(call: WriteCall, command: Command) -> None:
    with call.sending(command):
        command.result = command.part.invoke(call.target.owner)


def read(call: ReadCall) -> Any:
    """Make a read call, again while its error is a passing one."""
    return Retrying(sleep=time.sleep, **call.controls())(_ask, call)


def _ask(call: ReadCall) -> Any:
    with call.asking():
        return call.invoke()


async def write_async(call: WriteCall) -> Any:
    """Make a write call: each command until it is settled, or given up.

    Raises:
        Exception: The driver's own last error, unchanged but for a note and ``exc.saferetry``.
    """
    try:
        for command in call.commands():
            await AsyncRetrying(sleep=asyncio.sleep, **call.controls(command))(_send_async, call, command)
    except BaseException as exc:
        for address in call.give_up(exc):
            await _shielded(cancel_async, call.target.client, address)
        raise
    return call.finish()


async def _send_async(call: WriteCall, command: Command) -> None:
    with call.sending(command):
        command.result = await command.part.invoke(call.target.owner)


async def read_async(call: ReadCall) -> Any:
    """Make a read call, again while its error is a passing one."""
    return await AsyncRetrying(sleep=asyncio.sleep, **call.controls())(_ask_async, call)


async def _ask_async(call: ReadCall) -> Any:
    with call.asking():
        return await call.invoke()


async def _shielded(fn: Callable[..., Any], *args: Any) -> None:
    """Run to its end although the task may be cancelled again; outside the record, whose time may be up."""
    await asyncio.shield(asyncio.get_running_loop().create_task(fn(*args), context=Context()))
