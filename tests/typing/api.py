"""What the public names are to a type checker. Checked by mypy --strict and by pyright, never run.

A wrong use must be an error: each one is silenced, and both checkers report a comment that silences nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypedDict, assert_type

import pymongo
from bson.raw_bson import RawBSONDocument
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.cursor import AsyncCursor
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.collection import Collection
from pymongo.cursor import Cursor
from pymongo.database import Database
from pymongo.operations import InsertOne
from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

import saferetry
from saferetry import (
    AsyncMongoClient,
    Budget,
    CallReport,
    Failure,
    MongoClient,
    Outcome,
    Record,
    RecordKey,
    Settings,
    WriteView,
    current_record,
    handler,
    prepare_gridfs,
    propagate,
    record,
    repeatable,
    testing,
    wrap,
)

Document = dict[str, Any]


class Order(TypedDict):
    """A typed document."""

    order: str
    left: int


# clients


def a_client_has_the_type_of_its_documents() -> None:
    client: MongoClient[Document] = MongoClient()
    assert_type(client["shop"], Database[Document])
    assert_type(client.shop, Database[Document])
    assert_type(client.get_database("shop"), Database[Document])
    assert_type(client["shop"]["orders"], Collection[Document])
    assert_type(client.shop.orders, Collection[Document])
    assert_type(client.shop.orders.find_one(), Document | None)
    typed: MongoClient[Order] = MongoClient("mongodb://localhost", 27017, saferetry=Settings(strict=True))
    assert_type(typed.shop.orders.find({}), Cursor[Order])
    assert_type(MongoClient(document_class=RawBSONDocument), MongoClient[RawBSONDocument])
    assert_type(MongoClient[Order](["a", "b"], tz_aware=True, w="majority"), MongoClient[Order])


def a_client_is_a_context_manager_of_its_own_type() -> None:
    with MongoClient[Order]() as client:
        assert_type(client, MongoClient[Order])
    with wrap(pymongo.MongoClient[Order]()) as wrapped:
        assert_type(wrapped, pymongo.MongoClient[Order])


def results_are_the_drivers(client: MongoClient[Document]) -> None:
    orders = client.shop.orders
    assert_type(orders.insert_one({"left": 1}), InsertOneResult)
    assert_type(orders.insert_many([{"left": 1}]), InsertManyResult)
    assert_type(orders.update_one({}, {"$inc": {"left": 1}}), UpdateResult)
    assert_type(orders.delete_many({}), DeleteResult)
    assert_type(orders.bulk_write([InsertOne({"left": 1})]), BulkWriteResult)
    assert_type(orders.count_documents({}), int)
    assert_type(orders.find({}).to_list(), list[Document])
    assert_type([document["left"] for document in orders.find({})], list[Any])


class OwnClient(MongoClient[Document]):
    """A user's subclass."""

    def orders(self) -> Collection[Document]:
        return self.shop.orders


def a_subclass_stays_itself() -> None:
    with OwnClient() as client:
        assert_type(client, OwnClient)
        assert_type(client.orders(), Collection[Document])


async def the_same_for_asyncio() -> None:
    async with AsyncMongoClient[Order]() as client:
        assert_type(client, AsyncMongoClient[Order])
        assert_type(client.shop, AsyncDatabase[Order])
        assert_type(client["shop"]["orders"], AsyncCollection[Order])
        assert_type(client.shop.orders.find({}), AsyncCursor[Order])
        assert_type(await client.shop.orders.find_one(), Order | None)
        assert_type(await client.shop.orders.insert_one({"order": "A-1", "left": 1}), InsertOneResult)
        assert_type([one["left"] async for one in client.shop.orders.find()], list[int])
    assert_type(AsyncMongoClient(document_class=RawBSONDocument), AsyncMongoClient[RawBSONDocument])


def what_takes_a_driver_client_takes_ours(client: MongoClient[Document], asynchronous: AsyncMongoClient[Document]) -> None:
    def needs_a_client(client: pymongo.MongoClient[Document]) -> None: ...
    def needs_an_async_client(client: pymongo.AsyncMongoClient[Document]) -> None: ...

    needs_a_client(client)
    needs_an_async_client(asynchronous)
    needs_a_client(asynchronous)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def wrong_uses_of_clients(client: MongoClient[Order], raw: pymongo.MongoClient[Document]) -> None:
    MongoClient[Document](port="27017")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    MongoClient[Document](saferetry={"strict": True})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AsyncMongoClient[Document](saferetry=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    MongoClient[int]()  # type: ignore[type-var]  # pyright: ignore[reportInvalidTypeArguments]
    client.shop.orders.insert_one({"order": 1})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    client.shop.orders.insert_many(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    wrap(raw, "strict")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Settings(max_attempts="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Settings(attempts=4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# handlers


def to_dead_letters(failure: Failure) -> int:
    assert_type(failure.key, RecordKey | None)
    assert_type(failure.exception, Exception)
    assert_type(failure.writes, tuple[WriteView, ...])
    return len(failure.writes)


async def to_dead_letters_later(failure: Failure) -> int:
    return len(failure.writes)


@handler
def bare(order: str, left: int = 1, *, loud: bool = False) -> int:
    return left if loud else len(order)


@handler(key="orders", retry_on=(ConnectionError, TimeoutError), fatal=KeyError, recoverer=to_dead_letters, budget=30.0)
def with_arguments(order: str, left: int = 1, *, loud: bool = False) -> int:
    return left if loud else len(order)


@handler(guarantee="transaction", key=lambda order: ("orders", 0, len(order)), name="x", recoverer=to_dead_letters_later)
async def later(order: str, left: int = 1, *, loud: bool = False) -> int:
    await asyncio.sleep(0)
    return left if loud else len(order)


@handler(digest=str.encode, store_result=True, budget=lambda order: Budget(len(order)))
async def bare_later(order: str) -> bytes:
    await asyncio.sleep(0)
    return order.encode()


async def handlers_keep_their_signatures() -> None:
    same: Callable[[str], int] = bare
    also_same: Callable[[str, int], int] = with_arguments
    assert_type(same("A-1") + also_same("A-1", 1), int)
    assert_type(bare("A-1", 2, loud=True), int)
    assert_type(with_arguments("A-1", left=2), int)
    assert_type(await later("A-1", loud=True), int)
    assert_type(await bare_later(order="A-1"), bytes)
    awaited: Callable[[str], Coroutine[Any, Any, bytes]] = bare_later
    assert_type(await awaited("A-1"), bytes)
    bare(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bare("A-1", 1, True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with_arguments("A-1", quiet=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with_arguments()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await later(b"A-1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await bare("A-1")  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]


class Consumer:
    """A class with handlers of every kind."""

    @handler
    def method(self, order: str) -> int:
        return len(order)

    @handler(recoverer=to_dead_letters)
    async def later(self, order: str) -> int:
        return len(order)

    @staticmethod
    @handler
    def static(order: str) -> int:
        return len(order)

    @handler(name="outer")
    @staticmethod
    def static_inside(order: str) -> int:
        return len(order)

    @classmethod
    @handler
    def of_class(cls, order: str) -> int:
        return len(order)

    @handler(name="of-class")
    @classmethod
    def of_class_inside(cls, order: str) -> int:
        return len(order)


async def methods_keep_their_signatures(consumer: Consumer) -> None:
    assert_type(consumer.method("A-1"), int)
    assert_type(Consumer.method(consumer, "A-1"), int)
    assert_type(await consumer.later("A-1"), int)
    assert_type(Consumer.static("A-1") + consumer.static("A-1"), int)
    assert_type(Consumer.static_inside("A-1") + consumer.static_inside("A-1"), int)
    assert_type(Consumer.of_class("A-1") + consumer.of_class("A-1"), int)
    assert_type(Consumer.of_class_inside("A-1") + consumer.of_class_inside("A-1"), int)
    consumer.method(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Consumer.static(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Consumer.of_class_inside()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def takes_no_failure(number: int) -> None: ...


def wrong_uses_of_the_decorator() -> None:
    handler(recoverer=takes_no_failure)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    handler(guarantee="once")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    handler(retry_on=1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    handler(key=1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    handler(retries=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    handler(7)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    handler()(7)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]


# records


async def records() -> None:
    with record(("orders", 0, 17), budget=30, name="x") as current:
        assert_type(current, Record)
        assert_type(current.writes, tuple[WriteView, ...])
        assert_type(current.writes[0].outcome, Outcome)
    async with record(RecordKey("orders", group="billing"), budget=Budget(30)) as current:
        assert_type(current.key, RecordKey | None)
        assert_type(current.execution, int)
    assert_type(current_record(), Record | None)
    with repeatable():
        pass
    record(17)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def propagated_functions_keep_their_signatures(lengths: Sequence[int]) -> None:
    def add(left: int, right: int = 0) -> int:
        return left + right

    bound = propagate(add)
    assert_type(bound(1, right=lengths[0]), int)
    bound("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def gridfs(client: MongoClient[Document], asynchronous: AsyncMongoClient[Document]) -> None:
    prepare_gridfs(client.shop, "fs")
    assert_type(await prepare_gridfs(asynchronous.shop), None)
    prepare_gridfs(client)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def errors(exc: saferetry.errors.SafeRetryError) -> None:
    if isinstance(exc, saferetry.errors.RetryRefusedError):
        assert_type(exc.reason, str)
        assert_type(exc.writes, tuple[WriteView, ...])
    report: CallReport | None = getattr(exc, "saferetry", None)
    if report is not None:
        assert_type(report.waits, tuple[float, ...])


# testing


def tests_of_users(raw: pymongo.MongoClient[Document]) -> None:
    client = testing.mock_client("mongodb://localhost/shop", Settings(), tz_aware=True)
    testing.faults(client).lose_reply("insert_one", collection="orders", times=2, after=1)
    assert_type(testing.faults(client).pending, int)
    with testing.fixed_time(seed=1) as clock:
        assert_type(clock, testing.Clock)
        assert_type(clock.waits, list[float])
    with testing.recorded() as recorder:
        assert_type(recorder.of("resent"), list[testing.Decided])
    with testing.fake_record(("orders", 0, 17), execution=2, writes=()) as current:
        assert_type(current, Record)
    recorder.of("sent")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    testing.faults(client).lose_reply(times="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    testing.fake_record(17)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    testing.mock_client(settings={})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
