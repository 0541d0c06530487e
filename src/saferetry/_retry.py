"""The loops: driver calls made, waited between and cancelled, once for threads and once for asyncio.

The two halves say the same; tests/unit/test_twins.py compares their syntax trees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

from saferetry._attempts import attempts, attempts_async, more_attempts, more_attempts_async
from saferetry._call import WriteCall
from saferetry._command import Command
from saferetry._execution import JoinedCall, Joining, State
from saferetry._read import ReadCall
from saferetry._seam import CANCEL_SECONDS, cancel, cancel_async, unguarded


def write(call: WriteCall) -> Any:
    """Make a write call: each command until it is settled, or given up.

    Raises:
        Exception: The driver's own last error, unchanged but for a note and ``exc.saferetry``.
    """
    failed: list[BaseException] = []
    try:
        if call.made is None:
            try:
                with call.first_sending():
                    return call.plan.invoke()
            except BaseException as exc:  # noqa: BLE001 - it is judged below
                failed.append(exc)
        for command in call.commands():
            if command.must_look:
                call.take_found(command, _look_for(call, command))
                if command.is_done:
                    continue
            rules = partial(call.controls, command)
            if failed:
                more_attempts(failed, rules, _send, call, command)
            else:
                attempts(rules, _send, call, command)
    except BaseException as exc:
        for address in call.give_up(exc):
            cancel(call.target.client, address)
        raise
    return call.finish()


def _send(call: WriteCall, command: Command) -> None:
    with call.sending(command):
        command.result = command.part.invoke(call.target.owner)


def _look_for(call: WriteCall, command: Command) -> list[Any]:
    ids = list(command.part.made_ids.values())
    find = unguarded(call.target.owner).find
    return find({"_id": {"$in": ids}}, {"_id": 1}, batch_size=len(ids)).to_list()  # type: ignore[no-any-return]


def read(call: ReadCall) -> Any:
    """Make a read call, again while its error is a passing one."""
    return attempts(call.controls, _ask, call)


def _ask(call: ReadCall) -> Any:
    with call.asking():
        return call.invoke()


def join(call: JoinedCall) -> Any:
    """Make a call inside the record's transaction."""
    execution = call.execution
    with execution.lock:
        call.check()
        if execution.state is State.WAITING:
            execution.begin(execution, call.client)
            call.check()
        if execution.lessons and (lesson := call.lesson()) is not None:
            with Joining(call):
                is_there = call.look_up() is not None
            if is_there:
                raise lesson.error
        with Joining(call):
            return call.invoke()


async def write_async(call: WriteCall) -> Any:
    """Make a write call: each command until it is settled, or given up.

    Raises:
        Exception: The driver's own last error, unchanged but for a note and ``exc.saferetry``.
    """
    failed: list[BaseException] = []
    try:
        if call.made is None:
            try:
                with call.first_sending():
                    return await call.plan.invoke()
            except BaseException as exc:  # noqa: BLE001 - it is judged below
                failed.append(exc)
        for command in call.commands():
            if command.must_look:
                call.take_found(command, await _look_for_async(call, command))
                if command.is_done:
                    continue
            rules = partial(call.controls, command)
            if failed:
                await more_attempts_async(failed, rules, _send_async, call, command)
            else:
                await attempts_async(rules, _send_async, call, command)
    except BaseException as exc:
        for address in call.give_up(exc):
            await _shielded(cancel_async, call.target.client, address)
        raise
    return call.finish()


async def _send_async(call: WriteCall, command: Command) -> None:
    with call.sending(command):
        command.result = await command.part.invoke(call.target.owner)


async def _look_for_async(call: WriteCall, command: Command) -> list[Any]:
    ids = list(command.part.made_ids.values())
    find = unguarded(call.target.owner).find
    return await find({"_id": {"$in": ids}}, {"_id": 1}, batch_size=len(ids)).to_list()  # type: ignore[no-any-return]


async def read_async(call: ReadCall) -> Any:
    """Make a read call, again while its error is a passing one."""
    return await attempts_async(call.controls, _ask_async, call)


async def _ask_async(call: ReadCall) -> Any:
    with call.asking():
        return await call.invoke()


async def join_async(call: JoinedCall) -> Any:
    """Make a call inside the record's transaction."""
    execution = call.execution
    async with execution.async_lock:
        call.check()
        if execution.state is State.WAITING:
            await execution.begin(execution, call.client)
            call.check()
        if execution.lessons and (lesson := call.lesson()) is not None:
            with Joining(call):
                is_there = await call.look_up() is not None
            if is_there:
                raise lesson.error
        with Joining(call):
            return await call.invoke()


async def _shielded(fn: Callable[..., Any], *args: Any) -> None:
    """Run to its end although this task may be cancelled again; outside the record, whose time may be up.

    Waited for a little longer than it may take by itself, since it may wait for a lock of the driver's that has no limit.
    """
    task = asyncio.get_running_loop().create_task(fn(*args), context=Context())
    await asyncio.wait({task}, timeout=2 * CANCEL_SECONDS)
