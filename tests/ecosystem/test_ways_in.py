"""What a library made before its client was guarded, or makes later than it should, is told apart and not passed over."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import flask
import flask_pymongo
import mongoengine
import pytest
from apscheduler.jobstores.mongodb import MongoDBJobStore
from apscheduler.schedulers.background import BackgroundScheduler

import saferetry
from saferetry import RecordKey, handler, wrap
from saferetry.errors import ConfigurationError
from tests.ecosystem.libraries import LATER, Order, job
from tests.support import CommandLog, Mongod
from tests.support.driving import OPTIONS, RawClient, quick

KEY = RecordKey("orders", 0, 7, group="g", digest=b"content")


@pytest.fixture
def early(mongod: Mongod, name: str) -> Iterator[Any]:
    """A Flask-PyMongo whose database was made before its client was guarded."""
    mongo: Any = flask_pymongo.PyMongo(flask.Flask("shop"), mongod.uri.replace("/?", f"/{name}?"), **OPTIONS)
    wrap(mongo.cx, quick(marker_database=name))
    yield mongo
    mongo.cx.close()


def test_a_flask_database_from_before_the_guard_is_refused_in_a_transaction(early: Any, admin: RawClient, name: str) -> None:
    @handler(key=KEY, guarantee="transaction", client=early.cx, name="on_order")
    def on_order(order: int) -> None:
        early.db.orders.insert_one({"item": "a"})

    with pytest.raises(ConfigurationError, match=r"past the guarded methods.*after wrap\(\)"):
        on_order(7)
    assert admin[name].orders.count_documents({}) == 0


def test_a_flask_database_from_before_the_guard_reads_what_the_transaction_wrote(early: Any, name: str) -> None:
    @handler(key=KEY, guarantee="transaction", client=early.cx, name="on_order")
    def on_order(order: int) -> None:
        early.cx[name].orders.insert_one({"item": "a"})
        assert early.db.orders.find_one_or_404({"item": "a"})
        with pytest.raises(ConfigurationError, match="beside the record's transaction it would not see"):
            early.db.orders.count_documents({})

    on_order(7)


def test_a_model_whose_indexes_are_not_made_yet_is_refused_in_a_transaction(mongod: Mongod, name: str, log: CommandLog) -> None:
    client = mongoengine.connect(
        name,
        host=mongod.uri,
        mongo_client_class=saferetry.MongoClient,
        uuidRepresentation="standard",
        saferetry=quick(marker_database=name),
        event_listeners=[log],
    )
    Order._collection = None

    @handler(key=KEY, guarantee="transaction", client=client, name="on_order")
    def on_order(order: int) -> None:
        Order(item="a").save()

    try:
        with pytest.raises(ConfigurationError, match="create_index on .*orders cannot join"):
            on_order(7)
        Order.ensure_indexes()
        on_order(7)
        assert Order.objects.count() == 1
    finally:
        mongoengine.disconnect()


def test_a_job_added_in_a_transaction_is_seen_by_the_scheduler_once_it_is_woken(
    mongod: Mongod, name: str, admin: RawClient
) -> None:
    client = saferetry.MongoClient[dict[str, Any]](mongod.uri, saferetry=quick(marker_database=name), **OPTIONS)
    scheduler = BackgroundScheduler(jobstores={"default": MongoDBJobStore(name, "jobs", client)}, timezone=dt.UTC)
    scheduler.start()

    @handler(key=KEY, guarantee="transaction", client=client, name="on_order")
    def on_order(order: int) -> None:
        scheduler.add_job(job, "date", run_date=LATER, id="a")

    for _ in range(2):
        on_order(7)
        scheduler.wakeup()
    assert [found.id for found in scheduler.get_jobs()] == ["a"]
    assert admin[name].jobs.count_documents({}) == 1
    scheduler.shutdown()
