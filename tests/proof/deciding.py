"""Handlers whose reads decide what they write: run again after half of them took effect they would do something else.

Their documents have no random part, so that two databases can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymongo import DeleteOne, InsertOne, UpdateMany, UpdateOne
from pymongo.errors import DuplicateKeyError

from tests.proof.work import MARKERS, Database, RawDatabase, Work

RECORDS = 12
IN_STOCK = 8


def prepare(database: RawDatabase) -> None:
    """Put there what the handlers read and change."""
    database.stock.insert_one({"_id": "stock", "left": IN_STOCK})
    database.parents.insert_many([{"_id": number, "versions": 0} for number in range(2)])
    database.levels.insert_one({"_id": "level", "value": 10, "changes": 0})
    database.jobs.insert_many([{"_id": number, "state": "new"} for number in range(RECORDS)])
    database.sheets.insert_one({"_id": "sheet", "lines": []})
    database.names.create_index("name", unique=True)


def take_from_stock(database: Database, position: int) -> None:
    """Take one while there are some; the last records find none."""
    taken = database.stock.update_one({"_id": "stock", "left": {"$gt": 0}}, {"$inc": {"left": -1}})
    database.orders.insert_one({"_id": position, "is_taken": bool(taken.modified_count)})


def replace_children(database: Database, position: int) -> None:
    """Delete the children and insert new ones: half of it loses them, a swallowed insert does too."""
    parent = position % 2
    database.children.delete_many({"parent": parent})
    database.children.insert_many([{"_id": f"{position}-{number}", "parent": parent} for number in range(3)])
    version = database.parents.find_one_and_update({"_id": parent}, {"$inc": {"versions": 1}})
    database.versions.insert_one({"_id": position, "before": version["versions"]})


def set_levels(database: Database, position: int) -> None:
    """Set a value to what it is already (the server remembers no such write), then to another."""
    before = database.levels.find_one({"_id": "level"})["value"]
    database.levels.update_one({"_id": "level"}, {"$set": {"value": before}})
    database.levels.update_one({"_id": "level"}, {"$set": {"value": 10}})
    database.levels.update_one({"_id": "level", "value": 10}, {"$set": {"value": 10 + position % 3}, "$inc": {"changes": 1}})
    database.history.insert_one({"_id": position, "before": before})


def name_once(database: Database, position: int) -> None:
    """Insert a name that another record may have inserted, and count it in that case."""
    name = f"name {position // 3}"
    try:
        database.names.insert_one({"_id": position, "name": name, "count": 1})
    except DuplicateKeyError:
        database.names.update_one({"name": name}, {"$inc": {"count": 1}})
    database.calls.insert_one({"_id": position, "name": name})


def claim_job(database: Database, position: int) -> None:
    """Claim the next job and work on it."""
    job = database.jobs.find_one_and_update({"state": "new"}, {"$set": {"state": "claimed"}}, sort=[("_id", 1)])
    database.results.insert_one({"_id": position, "job": job and job["_id"]})
    if job is not None:
        database.jobs.update_one({"_id": job["_id"]}, {"$set": {"state": "done", "by": position}})


def rewrite_sheet(database: Database, position: int) -> None:
    """Read, compute and replace; then a bulk whose members depend on one another."""
    sheet = database.sheets.find_one({"_id": "sheet"})
    database.sheets.replace_one({"_id": "sheet"}, {"lines": [*sheet["lines"], position]})
    database.rows.bulk_write(
        [
            DeleteOne({"_id": position - 2}),
            InsertOne({"_id": position, "sum": 0}),
            UpdateMany({}, {"$inc": {"sum": position}}),
            UpdateOne({"_id": position}, {"$set": {"count": len(sheet["lines"])}}),
        ]
    )


DECIDING: Mapping[str, Work] = {
    function.__name__: function
    for function in (take_from_stock, replace_children, set_levels, name_once, claim_job, rewrite_sheet)
}


def contents(database: RawDatabase) -> dict[str, list[Any]]:
    """Return all documents but the markers, sorted."""
    names = sorted(set(database.list_collection_names()) - {MARKERS})
    return {name: sorted(database[name].find(), key=lambda document: str(document["_id"])) for name in names}
