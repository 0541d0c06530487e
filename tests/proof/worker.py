"""A consumer in a process of its own, to be killed or stopped: `python -m tests.proof.worker PLAN` (see `main`)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pymongo import common

import saferetry
from saferetry import _transaction_handling
from saferetry.lab.processes import tell
from tests.proof.consuming import Consumer, Subscription, wait_until
from tests.proof.deciding import DECIDING
from tests.proof.transfers import transfer
from tests.proof.work import WORKS


def set_clock(*, offset: float = 0.0, frozen: float | None = None) -> None:
    """Let saferetry's wall clock go wrong, or stand still."""

    def now() -> float:
        return frozen if frozen is not None else time.time() + offset

    mock.patch.object(_transaction_handling, "time", SimpleNamespace(time=now, monotonic=time.monotonic)).start()


def main() -> None:
    """Handle the records of a plan: it holds the arguments of `Consumer`, the positions, and what else is to be so.

    It tells "execution" for each execution, "done" for each record, "failed" where an error left the handler.
    """
    plan: dict[str, Any] = json.loads(sys.argv[1])
    common.MIN_HEARTBEAT_INTERVAL = 0.02  # a lost server is looked at again at once
    set_clock(**plan.pop("clock", {}))
    positions: list[int] = plan.pop("positions")
    start_at: float | None = plan.pop("start_at", None)
    work = {**WORKS, **DECIDING, "transfer": transfer}[plan.pop("work", "order")]
    subscription = Subscription(**plan.pop("subscription", {}))
    settings = saferetry.Settings(**plan.pop("settings", {}))
    consumer = Consumer(
        **plan,
        work=work,
        subscription=subscription,
        settings=settings,
        on_execution=lambda position: tell("execution", position=position),
    )
    tell("ready")
    if start_at is not None:
        consumer.client.admin.command("ping")
        wait_until(start_at)
    if plan.get("is_async"):
        asyncio.run(_handle_async(consumer, positions))
    else:
        _handle(consumer, positions)
    tell("end")


def _handle(consumer: Consumer, positions: list[int]) -> None:
    with consumer:
        for position in positions:
            begin = time.monotonic()
            try:
                result = consumer.handle(position)
            except Exception as exc:  # noqa: BLE001 - the parent judges
                tell("failed", position=position, error=type(exc).__name__, text=str(exc))
            else:
                tell("done", position=position, result=result, seconds=time.monotonic() - begin)


async def _handle_async(consumer: Consumer, positions: list[int]) -> None:
    for position in positions:
        begin = time.monotonic()
        try:
            result = await consumer.handle(position)
        except Exception as exc:  # noqa: BLE001 - the parent judges
            tell("failed", position=position, error=type(exc).__name__, text=str(exc))
        else:
            tell("done", position=position, result=result, seconds=time.monotonic() - begin)
    await consumer.client.close()


if __name__ == "__main__":
    main()
