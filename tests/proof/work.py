"""What the handlers of the proof do, and how often it was done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pymongo

import saferetry
from saferetry.lab.processes import tell

MARKERS = "saferetry_records"
LINES = 3
PAUSE = 0.5  # seconds; long enough to be stopped meanwhile

Database = Any  # a guarded or a plain one
Work = Callable[[Database, int], Any]
RawDatabase = pymongo.database.Database[dict[str, Any]]


def prepare(database: RawDatabase) -> None:
    """Put there what `order` changes."""
    database.create_collection("orders")
    database.stock.insert_one({"_id": "stock", "taken": 0})
    database.lines.insert_many([{"_id": number, "changes": 0} for number in range(LINES)])


def order(database: Database, position: int) -> int:
    """Insert, change and change many: every effect shows when it was there twice."""
    database.orders.insert_one({"position": position})
    database.stock.update_one({"_id": "stock"}, {"$inc": {"taken": 1}})
    database.lines.update_many({}, {"$inc": {"changes": 1}})
    return position


async def order_async(database: Database, position: int) -> int:
    """Do what `order` does, with an async client."""
    await database.orders.insert_one({"position": position})
    await database.stock.update_one({"_id": "stock"}, {"$inc": {"taken": 1}})
    await database.lines.update_many({}, {"$inc": {"changes": 1}})
    return position


def slow_order(database: Database, position: int) -> int:
    """Do what `order` does, but be at work in the server for seconds the first time, until somebody cancels that."""
    record = saferetry.current_record()
    is_first = record is not None and record.execution == 1
    database.orders.insert_one({"position": position})
    tell("half")
    database.stock.update_one({"$where": "sleep(5000)||true"} if is_first else {}, {"$inc": {"taken": 1}})
    database.lines.update_many({}, {"$inc": {"changes": 1}})
    return position


def pausing_order(database: Database, position: int) -> int:
    """Do what `order` does, with a pause in the middle, to be stalled there."""
    database.orders.insert_one({"position": position})
    database.stock.update_one({"_id": "stock"}, {"$inc": {"taken": 1}})
    tell("half")
    time.sleep(PAUSE)
    database.lines.update_many({}, {"$inc": {"changes": 1}})
    return position


def short_pausing_order(database: Database, position: int) -> int:
    """Do what `order` does, long enough for others to be at work on it at the same time."""
    order(database, position)
    time.sleep(PAUSE / 20)
    return position


def pausing_before_commit(database: Database, position: int) -> int:
    """Do what `order` does, with a pause at the end, to be stalled there."""
    order(database, position)
    tell("half")
    time.sleep(PAUSE)
    return position


def effects(database: RawDatabase) -> dict[str, Any]:
    """Return what `order` did, as the majority has it."""
    orders = Counter(document["position"] for document in database.orders.find())
    stock = database.stock.find_one({"_id": "stock"}) or {}
    changes = {document["changes"] for document in database.lines.find()}
    markers = Counter(document["_id"]["position"] for document in database[MARKERS].find())
    return {"orders": dict(orders), "taken": stock.get("taken"), "changes": changes, "markers": dict(markers)}


def once(*positions: int) -> dict[str, Any]:
    """Return the effects of these records done once each."""
    each = dict.fromkeys(positions, 1)
    return {"orders": each, "taken": len(positions), "changes": {len(positions)}, "markers": each}


WORKS: Mapping[str, Callable[[Database, int], Any]] = {
    "order": order,
    "order_async": order_async,
    "slow_order": slow_order,
    "pausing_order": pausing_order,
    "short_pausing_order": short_pausing_order,
    "pausing_before_commit": pausing_before_commit,
}
