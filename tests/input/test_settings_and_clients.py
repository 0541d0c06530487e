"""Bad settings, clients and URIs are refused where they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pymongo
import pytest
from pymongo.errors import PyMongoError

import saferetry
from saferetry import AsyncMongoClient, MongoClient, Settings, handler, record, wrap
from saferetry._seam import guard_of
from saferetry.errors import ConfigurationError
from tests.input.conftest import CANARY, refused

NOWHERE = f"mongodb://user:{CANARY}@127.0.0.1:1/?serverSelectionTimeoutMS=50&connect=false"
CLIENTS = pytest.mark.parametrize("make", [MongoClient, AsyncMongoClient], ids=["sync", "async"])
RAW = pytest.mark.parametrize("make", [pymongo.MongoClient, pymongo.AsyncMongoClient], ids=["sync", "async"])


def socket_timeout_of(client: Any) -> float | None:
    seconds: float | None = client.options.pool_options.socket_timeout
    return seconds


# --- settings --------------------------------------------------------------------------------------------------------------


def new_client() -> Any:
    return MongoClient(NOWHERE)


def new_async_client() -> Any:
    return AsyncMongoClient(NOWHERE)


def wrapped_client() -> Any:
    return wrap(pymongo.MongoClient(NOWHERE))


def new_record() -> Any:
    return record("r")


def handled() -> Any:
    return handler(lambda: None)()


READERS = pytest.mark.parametrize(
    "read", [new_client, new_async_client, wrapped_client, new_record, handled, Settings.from_env]
)


@READERS
async def test_an_unknown_variable_names_the_nearest(read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_MAX_TRIES", "3")
    with refused(ConfigurationError, "unknown variable SAFERETRY_MAX_TRIES: did you mean SAFERETRY_MAX_"):
        read()


@READERS
async def test_a_negative_time_in_a_variable(read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_BUDGET_MS", "-1")
    with refused(ConfigurationError, "budget_ms is -1: give 1 to 86400000 (ms)"):
        read()


def test_a_negative_time_in_an_argument() -> None:
    with refused(ConfigurationError, "max_time_ms is -5: give 1 to 86400000 (ms)"):
        Settings(max_time_ms=-5)


@CLIENTS
@pytest.mark.parametrize("settings", [{"strict": True}, "strict", Settings, 7])
async def test_settings_that_are_none(settings: Any, make: Any) -> None:
    with refused(ConfigurationError, "settings must be a saferetry.Settings, not "):
        make(NOWHERE, saferetry=settings)


# --- socket timeouts -------------------------------------------------------------------------------------------------------


STRICT = Settings(strict=True)
SHORT = pytest.mark.parametrize("milliseconds", [1, 100, 149])


@CLIENTS
@pytest.mark.parametrize("how", ["URI", "argument"])
@SHORT
async def test_strict_refuses_a_socket_timeout_below_150_ms(milliseconds: int, how: str, make: Any) -> None:
    given = f"{NOWHERE}&socketTimeoutMS={milliseconds}" if how == "URI" else NOWHERE
    arguments = {"socketTimeoutMS": milliseconds} if how == "argument" else {}
    with refused(ConfigurationError, f"socketTimeoutMS is {milliseconds}: give 150 or more"):
        make(given, saferetry=STRICT, **arguments)


@RAW
async def test_strict_refuses_a_socket_timeout_below_150_ms_in_a_wrapped_client(make: Any) -> None:
    client = make(NOWHERE, socketTimeoutMS=100)
    with refused(ConfigurationError, "socketTimeoutMS is 100: give 150 or more"):
        wrap(client, STRICT)
    assert type(client) is make


@CLIENTS
@SHORT
async def test_one_warning_tells_of_a_socket_timeout_below_150_ms(
    milliseconds: int, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert socket_timeout_of(make(NOWHERE, socketTimeoutMS=milliseconds)) == milliseconds / 1000
    (warning,) = [entry for entry in caplog.records if entry.levelname == "WARNING"]
    assert f"socketTimeoutMS is {milliseconds}: give 150 or more" in warning.getMessage()


@CLIENTS
@pytest.mark.parametrize("timeout_ms", [0, 50, 10_000])
async def test_with_a_timeout_of_the_drivers_own_the_socket_timeout_does_not_matter(timeout_ms: int, make: Any) -> None:
    client = make(NOWHERE, socketTimeoutMS=1, timeoutMS=timeout_ms, saferetry=STRICT)
    assert client.options.timeout == timeout_ms / 1000


@CLIENTS
@pytest.mark.parametrize("milliseconds", [150, 151, 10_000])
async def test_a_socket_timeout_from_150_ms_on_is_fine(milliseconds: int, make: Any) -> None:
    assert socket_timeout_of(make(NOWHERE, socketTimeoutMS=milliseconds)) == milliseconds / 1000


@CLIENTS
async def test_disabled_says_nothing_about_it(make: Any) -> None:
    make(NOWHERE, socketTimeoutMS=100, saferetry=Settings(disabled=True))


@CLIENTS
@pytest.mark.parametrize(
    ("uri_options", "arguments", "seconds"),
    [
        ("", {}, 9.0),
        ("&socketTimeoutMS=5000", {}, 5.0),
        ("&sockettimeoutms=5000", {}, 5.0),
        ("", {"socketTimeoutMS": 5_000}, 5.0),
        ("", {"sockettimeoutms": 5_000}, 5.0),
        ("", {"socketTimeoutMS": None}, None),  # he wants none
        ("&connectTimeoutMS=5000", {}, 9.0),
    ],
)
async def test_the_variable_is_the_socket_timeout_of_a_new_client_unless_uri_or_argument_give_one(
    uri_options: str, arguments: dict[str, Any], seconds: float | None, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFERETRY_SOCKET_TIMEOUT_MS", "9000")
    client = make(NOWHERE + uri_options, **arguments)
    assert socket_timeout_of(client) == seconds
    assert guard_of(client).limits.socket_timeout_ms == (None if seconds is None else seconds * 1000)


@CLIENTS
async def test_the_variable_holds_for_hosts_given_by_name_and_for_the_default_one(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFERETRY_SOCKET_TIMEOUT_MS", "9000")
    for arguments in ({"host": "127.0.0.1", "port": 1}, {"host": ["127.0.0.1:1"]}, {}):
        assert socket_timeout_of(make(**arguments, connect=False)) == 9.0
    assert socket_timeout_of(make(host=f"{NOWHERE}&socketTimeoutMS=5000")) == 5.0
    assert socket_timeout_of(make(["127.0.0.1:1", f"{NOWHERE}&socketTimeoutMS=5000"])) == 5.0


@CLIENTS
async def test_the_setting_given_to_a_client_holds_as_the_variable_does(make: Any) -> None:
    assert socket_timeout_of(make(NOWHERE, saferetry=Settings(socket_timeout_ms=9_000))) == 9.0


@RAW
async def test_a_wrapped_client_keeps_its_own(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_SOCKET_TIMEOUT_MS", "9000")
    assert socket_timeout_of(wrap(make(NOWHERE))) is None


@CLIENTS
async def test_max_time_ms_that_cannot_strike_is_warned_about(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = make(NOWHERE, socketTimeoutMS=3_000, saferetry=Settings(max_time_ms=3_000))
    assert [entry.getMessage() for entry in caplog.records if entry.name == "saferetry"] == [
        "max_time_ms 3000 is not below socketTimeoutMS 3000: 2000 is used; give a lower max_time_ms or a higher socketTimeoutMS"
    ]
    assert guard_of(client).limits.inside_ms == 2_000


@CLIENTS
async def test_max_time_ms_that_cannot_strike_is_an_error_under_strict(make: Any) -> None:
    with refused(ConfigurationError, "max_time_ms 4000 is not below socketTimeoutMS 3000", "give a lower max_time_ms"):
        make(NOWHERE, socketTimeoutMS=3_000, saferetry=Settings(max_time_ms=4_000, strict=True))


def test_a_client_that_is_refused_is_closed_again() -> None:
    closed: list[Any] = []

    class Noticing(MongoClient[dict[str, Any]]):
        def close(self) -> None:
            closed.append(self)
            super().close()

    with refused(ConfigurationError, "socketTimeoutMS is 100"):
        Noticing(NOWHERE, socketTimeoutMS=100, saferetry=STRICT)
    assert len(closed) == 1


# --- wrap ------------------------------------------------------------------------------------------------------------------


class NotAClient:
    """Something that answers to every name, as mocks do."""

    def __getattr__(self, name: str) -> Any:
        return NotAClient()


@pytest.mark.parametrize(
    "thing", [None, 7, NOWHERE, NotAClient(), pymongo.MongoClient], ids=["None", "a number", "a URI", "a mock", "a class"]
)
def test_wrapping_what_is_no_client(thing: Any) -> None:
    with refused(ConfigurationError, "wrap: ", " is not a PyMongo client; give a pymongo.MongoClient"):
        wrap(thing)


@RAW
async def test_wrapping_a_database_or_collection(make: Any) -> None:
    client = make(NOWHERE)
    for thing in (client["d"], client["d"]["c"]):
        with refused(ConfigurationError, f"wrap: {type(thing).__name__} is not a PyMongo client"):
            wrap(thing)


@RAW
async def test_wrapping_twice_gives_the_same_client(make: Any) -> None:
    client = make(NOWHERE)
    assert wrap(client) is client
    first = guard_of(client)
    assert wrap(client) is client
    assert wrap(client, Settings()) is client
    assert guard_of(client) is first


@RAW
async def test_wrapping_twice_with_other_settings(make: Any) -> None:
    client = wrap(make(NOWHERE))
    with refused(ConfigurationError, "wrap: this client is guarded already; give its settings when it is made"):
        wrap(client, Settings(strict=True))


@CLIENTS
async def test_wrapping_a_client_of_ours_gives_it_back(make: Any) -> None:
    client = make(NOWHERE)
    assert wrap(client) is client
    assert type(client) is make


@RAW
async def test_wrapping_with_settings_that_are_none(make: Any) -> None:
    client = make(NOWHERE)
    with refused(ConfigurationError, "settings must be a saferetry.Settings, not str"):
        wrap(client, "strict")  # type: ignore[arg-type]  # that is the test
    assert type(client) is make


async def test_a_wrapped_client_is_one_of_ours_at_every_level() -> None:
    client = wrap(pymongo.MongoClient[dict[str, Any]](NOWHERE))
    assert type(client) is MongoClient
    assert type(client["d"]).__module__ == "saferetry._collections"
    assert type(client["d"]["c"]["sub"]).__module__ == "saferetry._collections"
    asynchronous = wrap(pymongo.AsyncMongoClient[dict[str, Any]](NOWHERE))
    assert type(asynchronous) is AsyncMongoClient
    assert type(asynchronous["d"]["c"]).__module__ == "saferetry._collections"


class OwnClient(pymongo.MongoClient[dict[str, Any]]):
    """A user's subclass with a method of its own, one that overrides a guarded one, and one that makes databases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["calls"] = []
        super().__init__(*args, **kwargs)

    def drop_database(self, name_or_database: Any, **kwargs: Any) -> None:  # type: ignore[override]  # a user's own way
        self.__dict__["calls"].append(f"drop {name_or_database}")

    def __getitem__(self, name: str) -> Any:
        self.__dict__["calls"].append(f"get {name}")
        return super().__getitem__(name)

    def own(self) -> str:
        return "own"


class OwnAsyncClient(pymongo.AsyncMongoClient[dict[str, Any]]):
    """The same for asyncio."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["calls"] = []
        super().__init__(*args, **kwargs)

    async def drop_database(self, name_or_database: Any, **kwargs: Any) -> None:  # type: ignore[override]  # a user's own way
        await asyncio.sleep(0)
        self.__dict__["calls"].append(f"drop {name_or_database}")

    def __getitem__(self, name: str) -> Any:
        self.__dict__["calls"].append(f"get {name}")
        return super().__getitem__(name)

    def own(self) -> str:
        return "own"


@pytest.fixture(params=[OwnClient, OwnAsyncClient], ids=["sync", "async"])
async def own(request: pytest.FixtureRequest) -> Any:
    return wrap(request.param(NOWHERE))


async def test_a_users_subclass_keeps_its_name_and_its_own_methods(own: Any) -> None:
    assert isinstance(own, (OwnClient, OwnAsyncClient))
    assert type(own).__name__ in ("OwnClient", "OwnAsyncClient")
    assert own.own() == "own"


async def test_a_users_override_is_still_called_and_guarded(own: Any) -> None:
    with record("r") as current:
        dropped = own.drop_database("d")
        if isinstance(own, OwnAsyncClient):
            await dropped
    assert own.calls == ["drop d"]
    assert [write.method for write in current.writes] == ["drop_database"]


async def test_a_users_way_to_make_databases_is_still_used_and_gives_guarded_ones(own: Any) -> None:
    assert type(own["d"]).__module__ == type(own.d["c"]).__module__ == "saferetry._collections"
    assert own.calls == ["get d", "get d"]


async def test_a_users_subclass_refuses_what_ours_refuses(own: Any) -> None:
    with record("r"), refused(ConfigurationError, "MongoClient.bulk_write cannot be protected in a record"):
        refusing = own.bulk_write([])
        if isinstance(own, OwnAsyncClient):
            await refusing


def test_two_clients_of_one_subclass_get_the_same_class() -> None:
    assert type(wrap(OwnClient(NOWHERE))) is type(wrap(OwnClient(NOWHERE)))


def test_a_subclass_of_ours_needs_no_wrapping() -> None:
    class Special(MongoClient[dict[str, Any]]):
        pass

    with Special(NOWHERE) as client, record("r"), refused(ConfigurationError, "MongoClient.bulk_write cannot be protected"):
        client.bulk_write([])


# --- handlers and records --------------------------------------------------------------------------------------------------


def generator(message: Any) -> Iterator[Any]:
    yield message


MESSAGE = {"card": CANARY}


def test_a_generator_function_as_a_handler() -> None:
    with refused(ConfigurationError, "generator is a generator function", "decorate a function that does the work"):
        handler(generator)


@pytest.mark.parametrize(("made", "what"), [(None, "None"), ([MESSAGE], "a list")])
def test_a_key_callable_that_returns(made: Any, what: str) -> None:
    with refused(ConfigurationError, f"the key callable returned {what}", "it must return a RecordKey, a text or"):
        handler(key=lambda _: made, name="n")(lambda _: None)(MESSAGE)


def test_a_key_callable_that_returns_the_message_itself() -> None:
    with refused(ConfigurationError, "record key: got dict; give a RecordKey, a text, or"):
        handler(key=lambda message: message, name="n")(lambda _: None)(MESSAGE)


def test_a_key_callable_that_gets_a_list() -> None:
    with refused(ConfigurationError, "key= was to be made from a list: call the handler with one record"):
        handler(key=lambda _: "k", name="n")(lambda _: None)([MESSAGE, MESSAGE])


def test_a_budget_callable_that_returns_the_message_itself() -> None:
    with refused(ConfigurationError, "budget is ", "give seconds, a finite number above 0"):
        handler(budget=lambda message: message)(lambda _: None)(MESSAGE)


def test_guarantee_transaction_without_a_key() -> None:
    with refused(ConfigurationError, 'guarantee "transaction" needs key=', "names the record in every process"):
        handler(guarantee="transaction")


async def test_a_client_for_a_handler_that_is_not_guarded() -> None:
    clients: tuple[Any, ...] = (pymongo.MongoClient(NOWHERE), pymongo.AsyncMongoClient(NOWHERE), NotAClient(), NOWHERE)
    for client in clients:
        with refused(ConfigurationError, "client= must be a saferetry.MongoClient, AsyncMongoClient or a wrapped client"):
            handler(client=client)


def test_our_errors_are_not_the_drivers() -> None:
    assert not issubclass(saferetry.errors.SafeRetryError, PyMongoError)
