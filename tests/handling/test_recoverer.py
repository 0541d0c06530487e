"""What a handler cannot do is handed to its recoverer, with the reason."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from pymongo.errors import PyMongoError

from saferetry import Failure, MongoClient, Outcome, Record, RecordKey, current_record
from saferetry.errors import ConfigurationError, RetryRefusedError, UnsettledWriteError
from tests.support import Mongod
from tests.support.driving import OPTIONS, Api, ProxyFactory, RawClient, done, quick


class UnavailableError(Exception):
    """Something else than MongoDB fails."""


async def test_an_error_that_is_not_retried_is_handed_over_as_failed(api: Api) -> None:
    failures: list[Failure] = []
    error = UnavailableError()

    @api.handler(key=lambda message: ("t", 0, message), recoverer=failures.append)
    async def on_message(message: int) -> None:
        raise error

    await done(on_message(7))
    (failure,) = failures
    assert (failure.reason, failure.exception, failure.argument, failure.execution, failure.writes) == (
        "failed",
        error,
        7,
        1,
        (),
    )
    assert failure.key == RecordKey("t", 0, 7)


async def test_an_error_that_outlasts_all_executions_is_handed_over_as_exhausted(api: Api, mongod: Mongod) -> None:
    failures: list[Failure] = []

    @api.handler(
        retry_on=UnavailableError,
        recoverer=failures.append,
        client=api.client(mongod.uri, settings=quick(max_executions=2)),
    )
    async def on_message(message: str) -> None:
        raise UnavailableError

    await done(on_message("m"))
    assert [(failure.reason, failure.execution) for failure in failures] == [("exhausted", 2)]


async def test_an_error_after_a_write_is_handed_over_as_refused_with_what_was_written(
    api: Api, database_name: str, mongod: Mongod
) -> None:
    failures: list[Failure] = []
    collection = api.client(mongod.uri)[database_name].c

    @api.handler(retry_on=UnavailableError, recoverer=failures.append)
    async def on_message(message: str) -> None:
        await done(collection.insert_one({"_id": message}))
        raise UnavailableError

    await done(on_message("m"))
    (failure,) = failures
    assert (failure.reason, type(failure.exception)) == ("refused", RetryRefusedError)
    assert [(view.method, view.namespace, view.outcome) for view in failure.writes] == [
        ("insert_one", f"{database_name}.c", Outcome.APPLIED)
    ]


async def test_an_error_after_a_write_in_the_last_execution_is_handed_over_as_exhausted(
    api: Api, database_name: str, mongod: Mongod
) -> None:
    failures: list[Failure] = []
    client = api.client(mongod.uri, settings=quick(max_executions=1))

    @api.handler(retry_on=UnavailableError, recoverer=failures.append, client=client)
    async def on_message(message: str) -> None:
        await done(client[database_name].c.insert_one({"_id": message}))
        raise UnavailableError

    await done(on_message("m"))
    assert [failure.reason for failure in failures] == ["exhausted"]


async def test_a_fatal_error_is_handed_over_as_fatal(api: Api) -> None:
    failures: list[Failure] = []

    @api.handler(retry_on=Exception, fatal=UnavailableError, recoverer=failures.append)
    async def on_message(message: str) -> None:
        raise UnavailableError

    await done(on_message("m"))
    assert [failure.reason for failure in failures] == ["fatal"]


async def test_a_write_of_unknown_outcome_that_was_passed_over_is_handed_over_as_unsettled_under_strict(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory
) -> None:
    admin[database_name].c.insert_one({"n": 0})
    failures: list[Failure] = []
    client = api.client(proxy(command="insert", times=2).uri(), settings=quick(strict=True, max_attempts=1))

    @api.handler(recoverer=failures.append, client=client)
    async def on_message(message: str) -> None:
        with contextlib.suppress(PyMongoError):
            await done(client[database_name].c.insert_one({"_id": message}))

    await done(on_message("m"))
    assert [(failure.reason, type(failure.exception)) for failure in failures] == [("unsettled", UnsettledWriteError)]


async def test_a_write_of_unknown_outcome_that_was_passed_over_is_warned_about(
    api: Api, database_name: str, proxy: ProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    client = api.client(proxy(command="insert", times=2).uri(), settings=quick(max_attempts=1))

    @api.handler(client=client)
    async def on_message(message: str) -> None:
        with contextlib.suppress(PyMongoError):
            await done(client[database_name].c.insert_one({"_id": message}))

    await done(on_message("m"))
    assert ["may or may not have been applied" in message for message in caplog.messages] == [True]


async def test_the_recoverers_result_becomes_the_handlers(api: Api) -> None:
    @api.handler(recoverer=lambda failure: f"{failure.argument} put aside")
    async def on_message(message: str) -> str:
        raise UnavailableError

    assert await done(on_message("m")) == "m put aside"


async def test_an_async_recoverer_is_awaited_for_an_async_handler(api: Api) -> None:
    async def put_aside(failure: Failure) -> str:
        return f"{failure.argument} put aside"

    async def on_message(message: str) -> str:
        raise UnavailableError

    if api.is_async:
        assert await done(api.handler(recoverer=put_aside)(on_message)("m")) == "m put aside"
    else:
        with pytest.raises(ConfigurationError, match="async recoverer"):
            api.handler(recoverer=put_aside)(on_message)


async def test_a_recoverer_that_raises_leaves_chained_to_what_it_was_given(api: Api) -> None:
    error = UnavailableError()

    def give_up(failure: Failure) -> None:
        raise LookupError

    @api.handler(recoverer=give_up)
    async def on_message(message: str) -> None:
        raise error

    with pytest.raises(LookupError) as caught:
        await done(on_message("m"))
    assert caught.value.__context__ is error


async def test_the_recoverer_runs_after_the_record_has_ended_and_may_write(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod
) -> None:
    records: list[Record | None] = []
    with MongoClient[dict[str, Any]](mongod.uri, saferetry=quick(), **OPTIONS) as client:

        def put_aside(failure: Failure) -> None:
            records.append(current_record())
            client[database_name].letters.insert_one({"_id": failure.argument})

        @api.handler(recoverer=put_aside)
        async def on_message(message: str) -> None:
            raise UnavailableError

        await done(on_message("m"))
    assert records == [None]
    assert admin[database_name].letters.find_one() == {"_id": "m"}


async def test_a_configuration_error_is_not_handed_over(api: Api) -> None:
    failures: list[Failure] = []

    @api.handler(key=lambda _: None, recoverer=failures.append)
    async def on_message(message: str) -> None:
        pass

    with pytest.raises(ConfigurationError):
        await done(on_message("m"))
    assert failures == []
