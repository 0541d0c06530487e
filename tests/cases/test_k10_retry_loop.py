"""K10: the retry loop is bounded, its waits are spread, and an error says what it is."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
from pymongo.errors import ServerSelectionTimeoutError
from pymongo.monitoring import ServerHeartbeatFailedEvent, ServerHeartbeatListener
from tenacity import RetryCallState, Retrying

from saferetry import Outcome, Settings, record
from saferetry._policy import FullJitter
from tests.support import CommandLog, Proxy
from tests.support.driving import Api, ProxyFactory, RawClient, done, quick

NOBODY = "mongodb://127.0.0.1:1/"


async def test_r46_an_unreachable_server_ends_the_call_after_the_configured_attempts(api: Api) -> None:
    collection = api.client(NOBODY, settings=quick(max_attempts=3), serverSelectionTimeoutMS=200).d.c
    started = time.monotonic()
    with record(("t", 0, 46)) as current, pytest.raises(ServerSelectionTimeoutError):
        await done(collection.insert_one({}))
    assert 0.6 <= time.monotonic() - started < 3 * 0.5
    assert [(view.outcome, view.calls, view.sends) for view in current.writes] == [(Outcome.NOT_SENT, 3, 0)]


async def test_r46_an_unreachable_server_ends_the_call_within_the_records_budget(api: Api) -> None:
    collection = api.client(NOBODY, settings=quick(max_attempts=100), serverSelectionTimeoutMS=200).d.c
    started = time.monotonic()
    with record(("t", 0, 46), budget=0.7) as current, pytest.raises(ServerSelectionTimeoutError) as caught:
        await done(collection.insert_one({}))
    assert time.monotonic() - started < 0.7 + 0.2  # it may overshoot by one server selection
    error: Any = caught.value
    assert error.saferetry.decision == "budget"
    assert 1 < current.writes[0].calls < 4


def first_waits(settings: Settings, client: int) -> list[float]:
    """Return what one of many clients waits before its second, third and fourth attempt."""
    wait = FullJitter(settings, random.Random(client))
    state = RetryCallState(Retrying(), None, (), {})
    waits = []
    for attempt in (1, 2, 3):
        state.attempt_number = attempt
        waits.append(wait(state))
    return waits


def test_r49_a_thousand_clients_do_not_come_back_at_the_same_moment() -> None:
    waits = [first_waits(Settings(), client) for client in range(1_000)]
    same_as_neighbour = sum(one == other for one, other in itertools.pairwise(waits))
    firsts = [client[0] for client in waits]
    assert same_as_neighbour <= 10
    assert max(firsts) / min(firsts) >= 2


def test_r49_no_wait_is_longer_than_its_limit_or_the_cap() -> None:
    settings = Settings(backoff_base_ms=100, backoff_cap_ms=250)
    for client in range(1_000):
        for wait, limit in zip(first_waits(settings, client), (0.1, 0.2, 0.25), strict=True):
            assert 0 <= wait <= limit


def test_r49_a_fixed_seed_repeats_the_waits() -> None:
    assert first_waits(Settings(), 7) == first_waits(Settings(), 7)


def mute(proxy: ProxyFactory) -> Proxy:
    """Return a proxy that accepts connections and answers no hello."""
    return proxy(mode="refuse_hello")


async def test_r51_a_connection_that_cannot_be_opened_is_tried_again_and_keeps_its_error(
    api: Api, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    collection = api.client(
        mute(proxy).uri(),
        log=log,
        settings=quick(max_attempts=3),
        connectTimeoutMS=300,
        serverSelectionTimeoutMS=100,
    )[database_name].c
    with record(("t", 0, 51)) as current, pytest.raises(ServerSelectionTimeoutError):
        await done(collection.update_many({}, {"$inc": {"n": 1}}))
    assert [(view.outcome, view.calls, view.sends) for view in current.writes] == [(Outcome.NOT_SENT, 3, 0)]
    assert log.sends("update") == 0


class Recovering(ServerHeartbeatListener):
    """Let the proxy answer again once the driver has failed to open a connection."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def started(self, event: object) -> None:
        pass

    def succeeded(self, event: object) -> None:
        pass

    def failed(self, event: ServerHeartbeatFailedEvent) -> None:
        self._proxy.recover()


async def test_r51_an_update_many_that_could_not_be_sent_is_applied_once_when_the_server_answers_again(
    api: Api, admin: RawClient, database_name: str, proxy: ProxyFactory, log: CommandLog
) -> None:
    admin[database_name].c.insert_one({"_id": 1, "n": 0})
    dumb = mute(proxy)
    collection = api.client(
        dumb.uri(),
        settings=quick(max_attempts=100),
        connectTimeoutMS=300,
        serverSelectionTimeoutMS=100,
        event_listeners=[log, Recovering(dumb)],
    )[database_name].c
    with record(("t", 0, 51)) as current:
        await done(collection.update_many({}, {"$inc": {"n": 1}}))
    assert current.writes[0].calls > 1
    assert log.sends("update") == 1
    assert admin[database_name].c.find_one() == {"_id": 1, "n": 1}
