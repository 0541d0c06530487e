"""K14: the product keeps what it needs to itself."""

from __future__ import annotations

from dataclasses import dataclass

from bson import ObjectId

from saferetry import record
from tests.support import Mongod
from tests.support.driving import Api, RawClient, done


@dataclass
class StrictModel:
    """A model that cannot be made from a document with a field it does not know."""

    _id: ObjectId
    x: int


async def test_r66_a_document_written_in_a_record_is_loaded_by_a_model_that_forbids_extra_fields(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod
) -> None:
    collection = api.client(mongod.uri)[database_name].c
    with record(("t", 0, 66)):
        result = await done(collection.insert_one({"x": 1}))
        await done(collection.update_one({"_id": result.inserted_id}, {"$inc": {"x": 1}}))
    document = admin[database_name].c.find_one()
    assert document is not None
    assert StrictModel(**document) == StrictModel(result.inserted_id, 2)
