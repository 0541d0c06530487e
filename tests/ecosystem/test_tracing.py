"""OpenTelemetry's instrumentation of PyMongo sees each command, and nothing of a record in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.instrumentation.pymongo import PymongoInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from saferetry import RecordKey, record
from tests.support import Mongod
from tests.support.driving import Api, ProxyFactory, RawClient, api, done, quick

__all__ = ["api"]

SECRET = "4929-0000-1111-2222"
KEY = RecordKey("orders", 0, 7, group="g", digest=SECRET.encode())


@pytest.fixture(scope="session")
def exporter() -> Iterator[InMemorySpanExporter]:
    """Where the spans go; the instrumentation keeps the first provider that it is given."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    PymongoInstrumentor().instrument(tracer_provider=provider)
    PymongoInstrumentor().uninstrument()
    yield memory
    provider.shutdown()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    """What the instrumentation exports of all clients that are made meanwhile."""
    exporter.clear()
    PymongoInstrumentor().instrument()
    yield exporter
    PymongoInstrumentor().uninstrument()


def told(spans: InMemorySpanExporter, name: str) -> list[tuple[str, bool]]:
    """Return the spans of a database, as collection.command, and whether each failed."""
    found = [(span, dict(span.attributes or {})) for span in spans.get_finished_spans()]
    return [
        (f"{attributes.get('db.mongodb.collection')}.{attributes['db.statement']}", span.status.status_code is StatusCode.ERROR)
        for span, attributes in found
        if attributes["db.name"] == name
    ]


def texts(spans: InMemorySpanExporter) -> str:
    """Return all that the spans say."""
    return "".join(span.to_json() for span in spans.get_finished_spans())


async def test_each_send_of_a_write_is_a_span(
    api: Api, admin: RawClient, name: str, proxy: ProxyFactory, spans: InMemorySpanExporter
) -> None:
    lossy = proxy(command="insert", times=2)
    collection = api.client(lossy.uri())[name].c
    with record(KEY):
        await done(collection.insert_one({"card": SECRET}))
    assert lossy.hits == 2
    assert told(spans, name) == [("c.insert", True), ("c.insert", True), ("c.insert", False)]
    assert admin[name].c.count_documents({"card": SECRET}) == 1
    assert SECRET not in texts(spans)
    assert KEY.hashed() not in texts(spans)


async def test_a_transaction_shows_its_marker_by_name_alone(
    api: Api, admin: RawClient, name: str, mongod: Mongod, spans: InMemorySpanExporter
) -> None:
    client = api.client(mongod.uri, settings=quick(marker_database=name))

    @api.handler(key=KEY, guarantee="transaction", client=client, store_result=True)
    async def on_order(order: int) -> str:
        await done(client[name].c.insert_one({"card": SECRET}))
        return SECRET

    for _ in range(2):
        assert await done(on_order(7)) == SECRET
    written = [span for span in told(spans, name) if not span[0].endswith(("listIndexes", "createIndexes"))]
    assert written == [
        ("saferetry_records.insert", False),
        ("c.insert", False),
        ("saferetry_records.update", False),
        ("saferetry_records.insert", False),  # a duplicate: the record is done
        ("saferetry_records.find", False),
    ]
    assert admin[name].c.count_documents({}) == 1
    for hidden in (SECRET, KEY.stream, "'g'"):
        assert hidden not in texts(spans)


@pytest.mark.parametrize("guarded", [True, False], ids=["saferetry", "pymongo"])
async def test_without_a_record_the_spans_are_those_of_plain_pymongo(
    api: Api, name: str, mongod: Mongod, spans: InMemorySpanExporter, guarded: bool
) -> None:
    make: Any = api.client if guarded else api.raw_client
    collection = make(mongod.uri)[name].c
    await done(collection.insert_many([{"n": 1}, {"n": 2}]))
    await done(collection.update_many({}, {"$inc": {"n": 1}}))
    await done(collection.find_one({"n": 2}))
    assert told(spans, name) == [(f"c.{command}", False) for command in ("insert", "update", "find")]
