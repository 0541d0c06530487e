"""A handler is executed again where that is safe, refused where it is not, and never more often than configured."""

from __future__ import annotations

import time

import pytest
from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError, PyMongoError

from saferetry import Budget, Failure, current_record, handler, record, repeatable
from saferetry.errors import RetryRefusedError
from tests.support import CommandLog, Mongod
from tests.support.driving import Api, ProxyFactory, RawClient, done, quick


class UnavailableError(Exception):
    """Something else than MongoDB fails."""


async def test_an_update_many_whose_reply_is_lost_is_sent_once_and_its_handler_refused(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    admin[database_name].c.insert_many([{"n": 0}, {"n": 0}])
    lossy = proxy(command="update", times=2)
    collection = api.client(lossy.uri(), log=log)[database_name].c

    @api.handler(retry_on=PyMongoError)
    async def on_message(message: str) -> None:
        await done(collection.update_many({}, {"$inc": {"n": 1}}))

    with pytest.raises(RetryRefusedError) as caught:
        await done(on_message("m"))
    assert lossy.hits == 1
    assert log.sends("update") == 1
    assert isinstance(caught.value.__cause__, AutoReconnect)
    assert [document["n"] for document in admin[database_name].c.find()] == [1, 1]


async def test_the_recoverer_is_called_once_for_a_refused_update_many(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    admin[database_name].c.insert_one({"n": 0})
    collection = api.client(proxy(command="update", times=2).uri(), log=log)[database_name].c
    failures: list[Failure] = []

    @api.handler(retry_on=PyMongoError, recoverer=failures.append)
    async def on_message(message: str) -> None:
        await done(collection.update_many({}, {"$inc": {"n": 1}}))

    await done(on_message("m"))
    assert [failure.reason for failure in failures] == ["refused"]
    assert isinstance(failures[0].exception.__cause__, AutoReconnect)
    assert log.sends("update") == 1


async def test_a_handler_that_fails_before_it_writes_is_executed_again(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    collection = api.client(mongod.uri, log=log)[database_name].c
    executions = []

    @api.handler(retry_on=UnavailableError, client=api.client(mongod.uri))
    async def on_message(message: str) -> int:
        current = current_record()
        assert current is not None
        executions.append(current.execution)
        await done(collection.find_one())
        if current.execution < 3:
            raise UnavailableError
        await done(collection.insert_one({"_id": message}))
        return current.execution

    assert await done(on_message("m")) == 3
    assert executions == [1, 2, 3]
    assert log.sends("insert") == 1


async def test_a_handler_that_fails_after_it_wrote_is_refused(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    collection = api.client(mongod.uri, log=log)[database_name].c

    @api.handler(retry_on=UnavailableError)
    async def on_message(message: str) -> None:
        await done(collection.insert_one({"_id": message}))
        raise UnavailableError

    with pytest.raises(RetryRefusedError, match="insert_one") as caught:
        await done(on_message("m"))
    assert isinstance(caught.value.__cause__, UnavailableError)
    assert [view.method for view in caught.value.writes] == ["insert_one"]
    assert log.sends("insert") == 1


async def test_a_handler_whose_only_write_was_refused_by_the_server_is_executed_again(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_one({"_id": "m"})
    client = api.client(mongod.uri, log=log, settings=quick(max_executions=2))

    @api.handler(retry_on=DuplicateKeyError, client=client)
    async def on_message(message: str) -> None:
        await done(client[database_name].c.insert_one({"_id": message}))

    with pytest.raises(DuplicateKeyError):
        await done(on_message("m"))
    assert log.sends("insert") == 2


async def test_a_handler_whose_bulk_was_partly_applied_is_refused(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    admin[database_name].c.insert_one({"_id": 2})
    collection = api.client(mongod.uri, log=log)[database_name].c

    @api.handler(retry_on=BulkWriteError)
    async def on_message(message: str) -> None:
        await done(collection.insert_many([{"_id": 1}, {"_id": 2}, {"_id": 3}]))

    with pytest.raises(RetryRefusedError):
        await done(on_message("m"))
    assert log.sends("insert") == 1


async def test_an_error_that_retry_on_does_not_name_leaves_after_one_execution(api: Api) -> None:
    executions = []

    @api.handler(retry_on=ConnectionError)
    async def on_message(message: str) -> None:
        executions.append(message)
        raise UnavailableError

    with pytest.raises(UnavailableError):
        await done(on_message("m"))
    assert executions == ["m"]


async def test_an_error_that_fatal_names_leaves_after_one_execution_although_retry_on_names_its_base(api: Api) -> None:
    executions = []

    @api.handler(retry_on=Exception, fatal=UnavailableError)
    async def on_message(message: str) -> None:
        executions.append(message)
        raise UnavailableError

    with pytest.raises(UnavailableError):
        await done(on_message("m"))
    assert executions == ["m"]


def test_an_interrupt_leaves_after_one_execution_although_retry_on_names_its_base() -> None:
    executions = []

    @handler(retry_on=BaseException)
    def on_message(message: str) -> None:
        executions.append(message)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_message("m")
    assert executions == ["m"]


async def test_the_last_error_leaves_unchanged_after_the_configured_executions(api: Api, mongod: Mongod) -> None:
    raised: list[UnavailableError] = []

    @api.handler(retry_on=UnavailableError, client=api.client(mongod.uri, settings=quick(max_executions=3)))
    async def on_message(message: str) -> None:
        raised.append(UnavailableError())
        raise raised[-1]

    with pytest.raises(UnavailableError) as caught:
        await done(on_message("m"))
    assert len(raised) == 3
    assert caught.value is raised[-1]


async def test_no_further_execution_starts_without_time_for_one_as_long_as_the_longest(api: Api, mongod: Mongod) -> None:
    executions = []

    @api.handler(
        retry_on=UnavailableError,
        client=api.client(mongod.uri, settings=quick(max_executions=100)),
        budget=lambda _: Budget(0.5),
    )
    async def on_message(message: str) -> None:
        started = time.monotonic()
        while time.monotonic() - started < 0.15:
            pass
        executions.append(message)
        raise UnavailableError

    started = time.monotonic()
    with pytest.raises(UnavailableError):
        await done(on_message("m"))
    assert time.monotonic() - started < 0.5
    assert 1 <= len(executions) <= 3


async def test_a_repeatable_write_does_not_stand_against_another_execution(
    api: Api, admin: RawClient, database_name: str, mongod: Mongod
) -> None:
    admin[database_name].c.insert_many([{"st": "new"}, {"st": "new"}])
    client = api.client(mongod.uri)

    @api.handler(retry_on=UnavailableError, client=client)
    async def on_message(message: str) -> int:
        current = current_record()
        assert current is not None
        with repeatable():
            await done(client[database_name].c.update_many({}, {"$set": {"st": "old"}}))
        if current.execution == 1:
            raise UnavailableError
        return current.execution

    assert await done(on_message("m")) == 2
    assert admin[database_name].c.count_documents({"st": "old"}) == 2


async def test_a_repeatable_update_many_whose_reply_is_lost_is_sent_again(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    admin[database_name].c.insert_one({"st": "new"})
    lossy = proxy(command="update", times=2)
    collection = api.client(lossy.uri(), log=log)[database_name].c
    with record(), repeatable():
        result = await done(collection.update_many({}, {"$set": {"st": "old"}}))
    assert lossy.hits == 2
    assert log.sends("update") == 3
    assert result.matched_count == 1


async def test_a_write_with_a_session_of_the_users_stands_against_another_execution(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    client = api.client(mongod.uri, log=log)

    @api.handler(retry_on=UnavailableError)
    async def on_message(message: str) -> None:
        session = client.start_session()
        await done(client[database_name].c.insert_one({"_id": message}, session=session))
        await done(session.end_session())
        raise UnavailableError

    with pytest.raises(RetryRefusedError, match="session"):
        await done(on_message("m"))
    assert log.sends("insert") == 1


async def test_a_command_of_the_users_stands_against_another_execution(
    api: Api, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    client = api.client(mongod.uri, log=log)

    @api.handler(retry_on=UnavailableError)
    async def on_message(message: str) -> None:
        await done(client[database_name].command("insert", "c", documents=[{"_id": message}]))
        raise UnavailableError

    with pytest.raises(RetryRefusedError):
        await done(on_message("m"))
    assert log.sends("insert") == 1


async def test_executions_stop_at_the_first_one_under_the_kill_switch(api: Api, mongod: Mongod) -> None:
    executions = []

    @api.handler(retry_on=UnavailableError, client=api.client(mongod.uri, settings=quick(disabled=True)))
    async def on_message(message: str) -> None:
        executions.append(message)
        raise UnavailableError

    with pytest.raises(UnavailableError):
        await done(on_message("m"))
    assert executions == ["m"]
