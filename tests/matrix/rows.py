"""The rows: every guarded write method, as calls on a collection that holds STOCK."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import bson
from bson.codec_options import CodecOptions, TypeRegistry
from bson.raw_bson import RawBSONDocument
from pymongo import ReturnDocument
from pymongo.collation import Collation
from pymongo.operations import DeleteMany, DeleteOne, IndexModel, InsertOne, ReplaceOne, UpdateMany, UpdateOne

from tests.matrix.runner import Row

INSERT, UPDATE, DELETE, FIND_AND_MODIFY = ("insert",), ("update",), ("delete",), ("findAndModify",)
BEFORE, AFTER = ReturnDocument.BEFORE, ReturnDocument.AFTER


def raw(document: dict[str, Any]) -> RawBSONDocument:
    """Return a document that cannot be changed."""
    return RawBSONDocument(bson.encode(document))


def merged_operation(database_name: str) -> list[dict[str, Any]]:
    """Return a pipeline on the admin database, without a collection, that writes one document into another database."""
    into = {"into": {"db": database_name, "coll": "copy"}}
    return [
        {"$currentOp": {"localOps": True}},
        {"$limit": 1},
        {"$project": {"_id": {"$literal": 1}}},
        {"$merge": into},
    ]


REMOVE_FIRST: dict[str, Any] = {"findAndModify": "c", "query": {"_id": 1}, "remove": True}


def twice(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one and the same object twice: it gets one `_id`."""
    return [document, document]


def encoded(value: Any) -> Any:
    """Return a Decimal as text, as a user's codec may."""
    return str(value) if isinstance(value, Decimal) else value


WITH_CODEC: CodecOptions[Any] = CodecOptions(type_registry=TypeRegistry(fallback_encoder=encoded))
RAW_DOCUMENTS: CodecOptions[Any] = CodecOptions(document_class=RawBSONDocument)
INC = Row("update_one-inc", lambda c: c.update_one({"_id": 1}, {"$inc": {"n": 1}}), UPDATE)
INSERT_ONE = Row("insert_one", lambda c: c.insert_one({"x": 1}), INSERT)
FIND_ONE_AND_UPDATE = Row(
    "find_one_and_update-before", lambda c: c.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}), FIND_AND_MODIFY
)
ORDERED_BULK = Row(
    "bulk_write-ordered-mixed",
    lambda c: c.bulk_write(
        [
            InsertOne({"x": 1}),
            InsertOne({"_id": 20, "n": 0}),
            UpdateOne({"_id": 20}, {"$inc": {"n": 5}}),
            UpdateOne({"sku": 8}, {"$inc": {"n": 1}}, upsert=True),
            DeleteOne({"_id": 1}),
            InsertOne({"_id": 1, "n": 100}),
            ReplaceOne({"_id": 1}, {"n": 101}),
        ]
    ),
    ("insert", "update", "delete", "insert", "update"),
)

SINGLE = (
    INSERT_ONE,
    Row("insert_one-own_id", lambda c: c.insert_one({"_id": 10, "x": 1}), INSERT),
    Row("insert_one-raw", lambda c: c.insert_one(raw({"x": 1})), INSERT),
    Row("insert_one-raw-own_id", lambda c: c.insert_one(raw({"_id": 10, "x": 1})), INSERT),
    Row("insert_one-codec", lambda c: c.with_options(codec_options=WITH_CODEC).insert_one({"x": Decimal("1.1")}), INSERT),
    Row("insert_one-duplicate_id", lambda c: c.insert_one({"_id": 1}), INSERT),
    Row("insert_one-duplicate_key", lambda c: c.insert_one({"n": 1}), INSERT, unique="n"),
    INC,
    Row("update_one-push", lambda c: c.update_one({"_id": 1}, {"$push": {"tags": "z"}}), UPDATE),
    Row("update_one-upsert", lambda c: c.update_one({"sku": 7}, {"$inc": {"n": 1}}, upsert=True), UPDATE),
    Row("update_one-upsert-own_id", lambda c: c.update_one({"_id": 10}, {"$inc": {"n": 1}}, upsert=True), UPDATE),
    Row("update_one-upsert-matched", lambda c: c.update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True), UPDATE),
    Row(
        "update_one-array_filters",
        lambda c: c.update_one({"_id": 1}, {"$set": {"tags.$[t]": "z"}}, array_filters=[{"t": "a"}]),
        UPDATE,
    ),
    Row(
        "update_one-pipeline",
        lambda c: c.update_one({"_id": 1}, [{"$set": {"n": {"$add": ["$n", 10]}}}]),
        UPDATE,
    ),
    Row(
        "update_one-collation",
        lambda c: c.update_one({"tags": "A"}, {"$inc": {"n": 1}}, collation=Collation("en", strength=1)),
        UPDATE,
    ),
    Row("update_one-nothing_there", lambda c: c.update_one({"_id": 99}, {"$inc": {"n": 1}}), UPDATE),
    Row("update_one-wrong", lambda c: c.update_one({"_id": 1}, {"$inc": {"tags": 1}}), UPDATE),
    Row("replace_one", lambda c: c.replace_one({"_id": 1}, {"new": 1}), UPDATE),
    Row("replace_one-upsert", lambda c: c.replace_one({"sku": 7}, {"new": 1}, upsert=True), UPDATE),
    Row("delete_one", lambda c: c.delete_one({"n": {"$gt": 0}}), DELETE),
    Row("delete_one-nothing_there", lambda c: c.delete_one({"_id": 99}), DELETE),
)
IMAGES = (
    FIND_ONE_AND_UPDATE,
    Row(
        "find_one_and_update-after",
        lambda c: c.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, return_document=AFTER),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_update-upsert-before",
        lambda c: c.find_one_and_update({"sku": 7}, {"$inc": {"n": 1}}, upsert=True),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_update-upsert-after",
        lambda c: c.find_one_and_update({"sku": 7}, {"$inc": {"n": 1}}, upsert=True, return_document=AFTER),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_update-sort",
        lambda c: c.find_one_and_update({}, {"$inc": {"n": -10}}, sort=[("n", -1)], return_document=AFTER),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_update-array_filters",
        lambda c: c.find_one_and_update(
            {"_id": 1}, {"$set": {"tags.$[t]": "z"}}, array_filters=[{"t": "a"}], return_document=AFTER
        ),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_update-raw_documents",
        lambda c: c.with_options(codec_options=RAW_DOCUMENTS).find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_update-nothing_there",
        lambda c: c.find_one_and_update({"_id": 99}, {"$inc": {"n": 1}}),
        FIND_AND_MODIFY,
    ),
    Row("find_one_and_replace-before", lambda c: c.find_one_and_replace({"_id": 1}, {"new": 1}), FIND_AND_MODIFY),
    Row(
        "find_one_and_replace-after",
        lambda c: c.find_one_and_replace({"_id": 1}, {"new": 1}, return_document=AFTER),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_replace-upsert",
        lambda c: c.find_one_and_replace({"sku": 7}, {"new": 1}, upsert=True, return_document=AFTER),
        FIND_AND_MODIFY,
    ),
    Row("find_one_and_delete", lambda c: c.find_one_and_delete({"_id": 1}), FIND_AND_MODIFY),
    Row("find_one_and_delete-sort", lambda c: c.find_one_and_delete({}, sort=[("n", -1)]), FIND_AND_MODIFY),
)
PROJECTED = (
    Row(
        "find_one_and_update-projection",
        lambda c: c.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, projection={"n": 1, "_id": 0}),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_replace-projection",
        lambda c: c.find_one_and_replace({"_id": 1}, {"new": 1, "old": 2}, projection={"old": 0}, return_document=AFTER),
        FIND_AND_MODIFY,
    ),
    Row(
        "find_one_and_delete-projection",
        lambda c: c.find_one_and_delete({"_id": 1}, projection=["n"]),
        FIND_AND_MODIFY,
    ),
)
SEVERAL = (
    Row("insert_many", lambda c: c.insert_many([{"x": 1}, {"_id": 10}, {"x": 3}]), INSERT),
    Row("insert_many-unordered", lambda c: c.insert_many([{"x": 1}, {"_id": 10}, {"x": 3}], ordered=False), INSERT),
    Row("insert_many-generator", lambda c: c.insert_many({"x": x} for x in range(5)), INSERT),
    Row("insert_many-tuple", lambda c: c.insert_many(({"x": 1}, {"x": 2})), INSERT),
    Row("insert_many-raw", lambda c: c.insert_many([{"x": 1}, raw({"x": 2})]), INSERT),
    Row(
        "insert_many-codec",
        lambda c: c.with_options(codec_options=WITH_CODEC).insert_many([{"x": Decimal("1.1")}, {"x": 2}]),
        INSERT,
    ),
    Row("insert_many-positional", lambda c: c.insert_many([{"_id": 1}, {"x": 2}], False), INSERT, loses_errors=True),
    Row("insert_many-same_object_twice", lambda c: c.insert_many(twice({"x": 1})), INSERT),
    Row("insert_many-failing", lambda c: c.insert_many([{"x": 1}, {"x": 2}, {"_id": 1}, {"x": 4}]), INSERT),
    Row(
        "insert_many-unordered-failing",
        lambda c: c.insert_many([{"x": 1}, {"_id": 1}, {"x": 3}, {"_id": 2}, {"x": 5}], ordered=False),
        INSERT,
        loses_errors=True,
    ),
    Row(
        "insert_many-unordered-failing_first",
        lambda c: c.insert_many([{"_id": 3}, {"x": 2}, {"_id": 1}, {"_id": 2}], ordered=False),
        INSERT,
        loses_errors=True,
    ),
    Row("insert_many-all_failing", lambda c: c.insert_many([{"_id": 1}, {"_id": 2}], ordered=False), INSERT),
    ORDERED_BULK,
    Row("bulk_write-one", lambda c: c.bulk_write([UpdateOne({"_id": 1}, {"$inc": {"n": 1}})]), UPDATE),
    Row(
        "bulk_write-options",
        lambda c: c.bulk_write(
            [
                UpdateOne({"tags": "A"}, {"$inc": {"n": 1}}, collation=Collation("en", strength=1)),
                UpdateOne({"_id": 1}, {"$set": {"tags.$[t]": "z"}}, array_filters=[{"t": "a"}]),
                UpdateOne({"_id": 2}, [{"$set": {"n": {"$add": ["$n", 10]}}}], hint="_id_"),
            ]
        ),
        UPDATE,
    ),
    Row("bulk_write-inserts", lambda c: c.bulk_write([InsertOne({"x": 1}), InsertOne({"x": 2})]), INSERT),
    Row(
        "bulk_write-upserts",
        lambda c: c.bulk_write(
            [
                UpdateOne({"sku": 7}, {"$inc": {"n": 1}}, upsert=True),
                UpdateOne({"_id": 2}, {"$inc": {"n": 1}}, upsert=True),
                ReplaceOne({"sku": 8}, {"sku": 8, "new": 1}, upsert=True),
            ]
        ),
        UPDATE,
    ),
    Row(
        "bulk_write-unordered-mixed",
        lambda c: c.bulk_write(
            [
                DeleteOne({"_id": 3}),
                UpdateOne({"sku": 7}, {"$inc": {"n": 1}}, upsert=True),
                InsertOne({"x": 1}),
                UpdateOne({"_id": 1}, {"$inc": {"n": 1}}),
                InsertOne({"_id": 10}),
                ReplaceOne({"_id": 2}, {"new": 1}),
            ],
            ordered=False,
        ),
        ("insert", "update", "delete"),
    ),
    Row(
        "bulk_write-failing",
        lambda c: c.bulk_write(
            [
                UpdateOne({"_id": 1}, {"$inc": {"n": 1}}),
                InsertOne({"x": 1}),
                InsertOne({"_id": 2}),
                InsertOne({"x": 3}),
                DeleteOne({"_id": 3}),
            ]
        ),
        ("update", "insert"),
    ),
    Row(
        "bulk_write-failing_update",
        lambda c: c.bulk_write(
            [
                UpdateOne({"_id": 1}, {"$inc": {"n": 1}}),
                UpdateOne({"_id": 2}, {"$inc": {"tags": 1}}),
                UpdateOne({"_id": 3}, {"$inc": {"n": 1}}),
            ]
        ),
        UPDATE,
    ),
    Row(
        "bulk_write-unordered-failing",
        lambda c: c.bulk_write(
            [
                DeleteOne({"_id": 3}),
                UpdateOne({"_id": 2}, {"$inc": {"tags": 1}}),
                InsertOne({"x": 1}),
                InsertOne({"_id": 1}),
                UpdateOne({"_id": 1}, {"$inc": {"n": 1}}),
                InsertOne({"x": 2}),
            ],
            ordered=False,
        ),
        ("insert", "update", "delete"),
        loses_errors=True,
    ),
    Row(
        "bulk_write-nothing_deleted-insert",
        lambda c: c.bulk_write([DeleteOne({"_id": 10}), InsertOne({"_id": 10})]),
        ("delete", "insert"),
    ),
    Row(
        "bulk_write-update_many-hit_elsewhere",
        lambda c: c.bulk_write(
            [InsertOne({"x": 1}), UpdateMany({}, {"$inc": {"n": 1}}), InsertOne({"x": 2}), DeleteMany({"n": 2})]
        ),
        ("insert", "update", "insert", "delete"),
    ),
)
MULTI_PLACES = {"bulk_write-update_many-hit_elsewhere": {1, 3}}  # those commands cannot be addressed
ADDRESSABLE = (*SINGLE, *IMAGES, *SEVERAL)

NOT_ADDRESSABLE = (
    Row("update_many", lambda c: c.update_many({}, {"$inc": {"n": 1}}), UPDATE),
    Row("update_many-upsert", lambda c: c.update_many({"sku": 7}, {"$inc": {"n": 1}}, upsert=True), UPDATE),
    Row("delete_many", lambda c: c.delete_many({"n": {"$gt": 1}}), DELETE),
    Row("bulk_write-update_many", lambda c: c.bulk_write([UpdateMany({}, {"$inc": {"n": 1}})]), UPDATE),
    Row("bulk_write-delete_many", lambda c: c.bulk_write([DeleteMany({})], ordered=False), DELETE),
    Row("aggregate-out", lambda c: c.aggregate([{"$match": {"n": 1}}, {"$out": "copy"}]), ("aggregate",)),
    Row("aggregate-merge", lambda c: c.aggregate([{"$merge": {"into": "copy"}}]), ("aggregate",)),
    Row("aggregate_raw_batches-merge", lambda c: c.aggregate_raw_batches([{"$merge": {"into": "copy"}}]), ("aggregate",)),
    Row(
        "database-aggregate-merge",
        lambda c: c.database.client.admin.aggregate(merged_operation(c.database.name)),
        ("aggregate",),
    ),
    Row("create_index", lambda c: c.create_index("n"), ("createIndexes",)),
    Row("create_indexes", lambda c: c.create_indexes([IndexModel("n"), IndexModel("tags")]), ("createIndexes",)),
    Row("drop_index", lambda c: c.drop_index("n_1"), ("dropIndexes",), unique="n"),
    Row("drop_indexes", lambda c: c.drop_indexes(), ("dropIndexes",), unique="n"),
    Row("drop", lambda c: c.drop(), ("drop",)),
    Row("rename", lambda c: c.rename("renamed"), ("renameCollection",)),
    Row("create_collection", lambda c: c.database.create_collection("made", capped=True, size=4096), ("create",)),
    Row("drop_collection", lambda c: c.database.drop_collection("c"), ("drop",)),
    Row("drop_database", lambda c: c.database.client.drop_database(c.database.name), ("dropDatabase",)),
    Row("command-insert", lambda c: c.database.command("insert", "c", documents=[{"_id": 10}]), INSERT),
    Row(
        "command-update",
        lambda c: c.database.command({"update": "c", "updates": [{"q": {"_id": 1}, "u": {"$inc": {"n": 1}}}]}),
        UPDATE,
    ),
    Row("command-findAndModify", lambda c: c.database.command(REMOVE_FIRST), FIND_AND_MODIFY),
    Row("command-collMod", lambda c: c.database.command("collMod", "c", validationLevel="off"), ("collMod",)),
)
