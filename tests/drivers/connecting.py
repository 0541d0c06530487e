"""A program that connects: plainly through one address, guarded through another; prints what came of it, as JSON.

`python -m tests.drivers.connecting PLAIN_URI GUARDED_URI`
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import pymongo

import saferetry
from saferetry.errors import DriverMismatchError

_PATIENCE: dict[str, Any] = {"serverSelectionTimeoutMS": 5000}


def _answer(work: Callable[[], Any]) -> str:
    try:
        work()
    except DriverMismatchError as exc:
        return str(exc)
    return "connected"


def _insert(client: Any) -> None:
    with client:
        client.test.c.insert_one({})


async def _insert_async(make: Callable[[], Any]) -> None:
    async with make() as client:
        await client.test.c.insert_one({})


def main(plain: str, guarded: str) -> None:
    """Connect in each way there is."""
    _insert(pymongo.MongoClient(plain, **_PATIENCE))
    asyncio.run(_insert_async(lambda: pymongo.AsyncMongoClient(plain, **_PATIENCE)))
    answers = {
        "MongoClient": _answer(lambda: _insert(saferetry.MongoClient(guarded, **_PATIENCE))),
        "AsyncMongoClient": _answer(
            lambda: asyncio.run(_insert_async(lambda: saferetry.AsyncMongoClient(guarded, **_PATIENCE)))
        ),
        "wrap": _answer(lambda: _insert(saferetry.wrap(pymongo.MongoClient(guarded, connect=False, **_PATIENCE)))),
    }
    json.dump({"file": pymongo.__file__, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
