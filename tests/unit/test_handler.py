"""The decorator: on whatever is callable, what it refuses, when it runs a handler again, and who takes over."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest
from pymongo.errors import AutoReconnect

from saferetry import (
    Budget,
    Failure,
    MongoClient,
    Outcome,
    Record,
    RecordKey,
    Settings,
    WriteView,
    current_record,
    handler,
    record,
)
from saferetry.errors import (
    ConfigurationError,
    KeyReusedError,
    PartitionLostError,
    RetryRefusedError,
    TakenOverError,
    UnprotectedWriteError,
    UnsettledWriteError,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, no_variables: None) -> None:
    monkeypatch.setenv("SAFERETRY_BACKOFF_BASE_MS", "1")
    monkeypatch.setenv("SAFERETRY_BACKOFF_CAP_MS", "1")


loose: Any = handler  # for functions that come as Any, and for what the types would refuse


class FakeWrite:
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.repeatable = self.is_foreign = False

    def orphan(self) -> None:
        return None

    def view(self) -> WriteView:
        return WriteView("insert_one", "shop.orders", self.outcome, 1, 1)


def here() -> Record:
    current = current_record()
    assert current is not None
    return current


def write(outcome: Outcome = Outcome.APPLIED) -> None:
    here().add(FakeWrite(outcome))


class Failing:
    """A handler that fails a number of times, or always."""

    def __init__(self, *errors: BaseException, write: Outcome | None = None) -> None:
        self.errors = list(errors)
        self.write = write
        self.seen: list[int] = []

    def __call__(self, argument: Any = None) -> str:
        self.seen.append(here().execution)
        if self.write is not None:
            write(self.write)
        if self.errors:
            raise self.errors.pop(0)
        return f"done {argument}"


# --- what can be decorated -------------------------------------------------------------------------------------------------


@handler
def bare(value: int, *, factor: int = 2) -> int:
    """Multiply."""
    assert current_record() is not None
    return value * factor


@handler(retry_on=KeyError)
def with_arguments(value: int, *, factor: int = 2) -> int:
    """Multiply."""
    assert current_record() is not None
    return value * factor


@handler()
async def of_asyncio(value: int, *, factor: int = 2) -> int:
    """Multiply."""
    await asyncio.sleep(0)
    assert current_record() is not None
    return value * factor


class Consumer:
    """Handlers as methods of every kind."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @handler
    def method(self, value: int) -> int:
        assert current_record() is not None
        return value * self.factor

    @handler
    async def of_asyncio(self, value: int) -> int:
        await asyncio.sleep(0)
        assert current_record() is not None
        return value * self.factor

    @classmethod
    @handler
    def class_inside(cls, value: int) -> tuple[str, int]:
        assert current_record() is not None
        return cls.__name__, value

    @handler
    @classmethod
    def class_outside(cls, value: int) -> tuple[str, int]:
        assert current_record() is not None
        return cls.__name__, value

    @staticmethod
    @handler
    def static_inside(value: int) -> int:
        assert current_record() is not None
        return value

    @handler
    @staticmethod
    def static_outside(value: int) -> int:
        assert current_record() is not None
        return value

    @handler
    @classmethod
    async def class_of_asyncio(cls, value: int) -> tuple[str, int]:
        await asyncio.sleep(0)
        assert current_record() is not None
        return cls.__name__, value

    @staticmethod
    @handler
    async def static_of_asyncio(value: int) -> int:
        await asyncio.sleep(0)
        assert current_record() is not None
        return value


class SpecialConsumer(Consumer):
    """A class that inherits handlers."""


CALLS: Mapping[str, tuple[Callable[[], Any], Any]] = {
    "bare": (lambda: bare(3), 6),
    "with arguments": (lambda: with_arguments(3, factor=4), 12),
    "method": (lambda: Consumer(5).method(3), 15),
    "method of the class": (lambda: Consumer.method(Consumer(5), 3), 15),
    "inherited method": (lambda: SpecialConsumer(5).method(3), 15),
    "class method, decorator inside": (lambda: Consumer.class_inside(3), ("Consumer", 3)),
    "class method of an instance": (lambda: Consumer(5).class_inside(3), ("Consumer", 3)),
    "inherited class method": (lambda: SpecialConsumer.class_inside(3), ("SpecialConsumer", 3)),
    "class method, decorator outside": (lambda: Consumer.class_outside(3), ("Consumer", 3)),
    "inherited, decorator outside": (lambda: SpecialConsumer.class_outside(3), ("SpecialConsumer", 3)),
    "static method, decorator inside": (lambda: Consumer.static_inside(3), 3),
    "static method of an instance": (lambda: Consumer(5).static_inside(3), 3),
    "static method, decorator outside": (lambda: Consumer.static_outside(3), 3),
    "static of an instance, decorator outside": (lambda: Consumer(5).static_outside(3), 3),
}
ASYNC_CALLS: Mapping[str, tuple[Callable[[], Any], Any]] = {
    "function": (lambda: of_asyncio(3, factor=4), 12),
    "method": (lambda: Consumer(5).of_asyncio(3), 15),
    "class method": (lambda: Consumer.class_of_asyncio(3), ("Consumer", 3)),
    "static method": (lambda: Consumer.static_of_asyncio(3), 3),
}


@pytest.mark.parametrize(("call", "result"), CALLS.values(), ids=CALLS.keys())
def test_a_handler_runs_in_a_record_and_returns_its_result(call: Callable[[], Any], result: Any) -> None:
    assert call() == result
    assert current_record() is None


@pytest.mark.parametrize(("call", "result"), ASYNC_CALLS.values(), ids=ASYNC_CALLS.keys())
async def test_an_async_handler_runs_in_a_record_and_returns_its_result(call: Callable[[], Any], result: Any) -> None:
    assert await call() == result
    assert current_record() is None


@pytest.mark.parametrize("decorated", [bare, with_arguments, of_asyncio])
def test_name_signature_and_docstring_are_kept(decorated: Any) -> None:
    assert str(inspect.signature(decorated)) == "(value: 'int', *, factor: 'int' = 2) -> 'int'"
    assert decorated.__doc__ == "Multiply."
    assert decorated.__module__ == __name__
    assert decorated.__wrapped__.__name__ == decorated.__name__


def test_the_signature_of_a_method_is_kept_without_self() -> None:
    assert str(inspect.signature(Consumer(5).method)) == "(value: 'int') -> 'int'"


@pytest.mark.parametrize(
    "decorated",
    [of_asyncio, Consumer(5).of_asyncio, Consumer.of_asyncio, Consumer.class_of_asyncio, Consumer.static_of_asyncio],
)
def test_a_coroutine_function_stays_one(decorated: Any) -> None:
    assert inspect.iscoroutinefunction(decorated)
    assert asyncio.iscoroutinefunction(decorated)


@pytest.mark.parametrize("decorated", [bare, Consumer(5).method, Consumer.static_inside])
def test_a_plain_function_stays_one(decorated: Any) -> None:
    assert not inspect.iscoroutinefunction(decorated)


def test_wrong_arguments_are_the_functions_own_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        bare(3, colour="red")  # type: ignore[call-arg]  # that is the test


def test_a_partial_can_be_a_handler() -> None:
    assert handler(functools.partial(lambda value, factor: value * factor, factor=4))(3) == 12


def test_an_object_with_call_can_be_a_handler() -> None:
    assert handler(Failing())("x") == "done x"


def test_every_call_is_a_record_of_its_own() -> None:
    records = [handler(here)() for _ in range(2)]
    assert records[0] is not records[1]
    assert all(one.ended for one in records)


def test_a_handler_inside_a_handler_has_a_record_inside_the_other() -> None:
    @handler
    def inner() -> Record:
        return here()

    @handler
    def outer() -> tuple[Record, Record]:
        return here(), inner()

    around, inside = outer()
    assert around is not inside


async def test_handlers_run_side_by_side() -> None:
    @handler
    async def work(number: int) -> tuple[int, int]:
        before = here()
        await asyncio.sleep(0)
        assert here() is before
        return number, id(before)

    results = await asyncio.gather(*(work(number) for number in range(10)))
    assert [number for number, _ in results] == list(range(10))


# --- what cannot be decorated ----------------------------------------------------------------------------------------------


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [generator, async_generator], ids=["generator", "async generator"])
def test_a_generator_function_is_refused(function: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"handler: {function.__name__} is a generator function, whose work runs after the call: "
    ):
        handler(function)


@pytest.mark.parametrize("wrapper", [staticmethod, classmethod, functools.partial])
def test_a_generator_function_is_refused_behind_a_wrapper(wrapper: Any) -> None:
    with pytest.raises(ConfigurationError, match="is a generator function"):
        handler(wrapper(generator))


@pytest.mark.parametrize("thing", ["a text", 7, Budget(1)])
def test_what_cannot_be_called_is_refused(thing: Any) -> None:
    with pytest.raises(ConfigurationError, match="handler: decorate a function, not "):
        handler(thing)


def returned_generator() -> Any:
    return generator()


def returned_coroutine() -> Any:
    return of_asyncio(3)


def returned_async_generator() -> Any:
    return async_generator()


@pytest.mark.parametrize(
    ("function", "kind"),
    [(returned_generator, "generator"), (returned_coroutine, "coroutine"), (returned_async_generator, "async_generator")],
)
def test_a_result_that_is_work_still_to_be_done_is_refused(function: Any, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"returned a {kind}, whose work would run after the record has ended: ") as c:
        loose(function)()
    assert f"{__name__}.{function.__name__}" in str(c.value)


@pytest.mark.parametrize("function", [returned_generator, returned_coroutine, returned_async_generator])
async def test_an_async_handler_may_not_return_it_either(function: Any) -> None:
    async def work() -> Any:
        return function()

    with pytest.raises(ConfigurationError, match="whose work would run after the record has ended"):
        await handler(work)()


def test_an_object_whose_call_is_async_is_refused_when_it_is_called() -> None:
    class Asynchronous:
        async def __call__(self) -> None: ...

    with pytest.raises(ConfigurationError, match="returned a coroutine"):
        loose(Asynchronous())()


# --- arguments of the decorator --------------------------------------------------------------------------------------------


def do_nothing(_: Any = None) -> None: ...


async def do_nothing_async(_: Any = None) -> None: ...


WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "transaction without a key": ({"guarantee": "transaction"}, 'guarantee "transaction" needs key='),
    "an unknown guarantee": (
        {"guarantee": "exactly-once"},
        r"""guarantee is 'exactly-once': give "process" or "transaction\"""",
    ),
    "digest": ({"digest": lambda _: b""}, 'digest and store_result need guarantee="transaction"'),
    "store_result": ({"store_result": True}, 'digest and store_result need guarantee="transaction"'),
    "derive_ids without a key": ({"derive_ids": True}, 'derive_ids is for guarantee "process" with key='),
    "a budget made at import": (
        {"budget": Budget(30)},
        "a Budget counts from its making, here once for all records: give seconds",
    ),
    "a raw client": ({"client": "mongodb://"}, "client= must be a saferetry.MongoClient, AsyncMongoClient or a wrapped client"),
    "retry_on an instance": ({"retry_on": KeyError("x")}, "retry_on must be an exception class or a tuple of them"),
    "retry_on a list": ({"retry_on": [KeyError]}, "retry_on must be an exception class or a tuple of them"),
    "retry_on a type that is none": ({"retry_on": (KeyError, int)}, "retry_on must be an exception class"),
    "fatal a text": ({"fatal": "KeyError"}, "fatal must be an exception class or a tuple of them"),
    "a key that is none": ({"key": 7}, "record key: got int; give a RecordKey, a text, or"),
    "an async recoverer": ({"recoverer": do_nothing_async}, "an async recoverer needs an async handler: give a plain function"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_refused_where_it_is_given(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        handler(**arguments)(do_nothing)


def test_an_async_recoverer_goes_with_an_async_handler() -> None:
    handler(recoverer=do_nothing_async)(do_nothing_async)


def test_a_plain_recoverer_goes_with_an_async_handler() -> None:
    handler(recoverer=do_nothing)(do_nothing_async)


@pytest.mark.parametrize("retry_on", [KeyError, (KeyError, ValueError), (), KeyboardInterrupt])
def test_retry_on_may_be_any_exception_or_none(retry_on: Any) -> None:
    handler(retry_on=retry_on)(do_nothing)


# --- names -----------------------------------------------------------------------------------------------------------------


def name_of(**arguments: Any) -> str:
    """Return the name that a record of a handler gets."""

    def local(_: Any) -> str:
        return here().name

    return str(loose(**arguments)(local)("x"))


def module_level(_: Any) -> str:
    return here().name


def test_a_handler_is_named_by_module_and_qualified_name() -> None:
    assert handler(module_level)("x") == f"{__name__}.module_level"


def test_a_given_name_is_used() -> None:
    assert name_of(name="orders") == "orders"


@pytest.mark.parametrize("function", [lambda _: None, functools.partial(lambda _: None)], ids=["lambda", "partial"])
def test_without_a_key_any_name_will_do(function: Any) -> None:
    loose(function)("x")


def test_with_a_key_a_lambda_needs_a_name() -> None:
    with pytest.raises(ConfigurationError, match=r"<lambda> is not the same name in every process, .*: give name="):
        handler(key="k")(lambda _: None)


def test_with_a_key_a_function_in_a_function_needs_a_name() -> None:
    with pytest.raises(ConfigurationError, match=r"<locals>\.local is not the same name in every process"):
        name_of(key="k")


def test_with_a_key_and_a_name_both_are_fine() -> None:
    handler(key="k", name="n")(lambda _: None)("x")
    assert name_of(key="k", name="n") == "n"


@pytest.mark.parametrize("name", ["", 7])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        handler(key="k", name=name)(lambda _: None)


def test_with_a_key_a_function_of_main_needs_a_name() -> None:
    script = "import saferetry\n@saferetry.handler(key='k')\ndef work(_): pass"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", script], check=False, env=environment, capture_output=True, text=True)
    assert "ConfigurationError: handler: __main__.work is not the same name in every process" in ran.stderr


# --- keys ------------------------------------------------------------------------------------------------------------------


def key_of(made: Any, *args: Any, **kwargs: Any) -> RecordKey | None:
    """Return the key of the record that a call of a handler opens."""

    def look(*_: Any, **__: Any) -> RecordKey | None:
        return here().key

    return handler(key=made, name="n")(look)(*args, **kwargs)


@pytest.mark.parametrize(
    "made",
    ["orders", ("orders", 0, 17), RecordKey("orders", 0, 17)],
)
def test_a_key_may_be_given_or_made(made: Any) -> None:
    assert key_of(made, "x") == key_of(lambda _: made, "x") == RecordKey.of(made)


def test_a_key_is_made_from_the_first_argument() -> None:
    assert key_of(lambda argument: argument["id"], {"id": "a"}, "b") == RecordKey("a")


def test_a_key_is_made_from_the_first_keyword_argument_where_there_is_no_other() -> None:
    assert key_of(lambda argument: argument, message="a", other="b") == RecordKey("a")


def test_the_first_argument_of_a_method_is_the_one_after_self() -> None:
    class Keyed:
        @handler(key=lambda argument: argument, name="n")
        def method(self, message: str) -> RecordKey | None:
            return here().key

        @classmethod
        @handler(key=lambda argument: argument, name="n")
        def of_the_class(cls, message: str) -> RecordKey | None:
            return here().key

        @staticmethod
        @handler(key=lambda argument: argument, name="n")
        def static(message: str) -> RecordKey | None:
            return here().key

    found = [Keyed().method("a"), Keyed.method(Keyed(), "a"), Keyed.of_the_class("a"), Keyed.static("a")]
    assert found == [RecordKey("a")] * 4


@pytest.mark.parametrize(("made", "what"), [(None, "None"), (["a"], "a list")])
def test_a_key_callable_that_returns_none_or_a_list_is_refused(made: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the key callable returned {what}; it must return a RecordKey, a text or"):
        key_of(lambda _: made, "x")


@pytest.mark.parametrize("args", [(None,), ([1, 2],), ()], ids=["None", "a list", "nothing"])
def test_a_key_callable_is_not_given_none_or_a_list(args: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"key= was to be made from (None|a list): call the handler with one record"):
        key_of(lambda _: "k", *args)


def test_a_key_callable_that_fails_is_heard() -> None:
    with pytest.raises(ZeroDivisionError):
        key_of(lambda _: 1 / 0, "x")


# --- budgets and settings --------------------------------------------------------------------------------------------------


def seconds_of(budget: Any, argument: Any = "x") -> float:
    def look(_: Any) -> float:
        return here().remaining()

    return handler(budget=budget)(look)(argument)


@pytest.mark.parametrize(
    "budget", [5, 5.0, lambda _: 5, lambda _: 5.0, lambda _: Budget(5), lambda argument: len(argument) * 5]
)
def test_a_budget_is_seconds_or_made_from_the_argument(budget: Any) -> None:
    assert 4.5 < seconds_of(budget) <= 5


def test_the_budget_comes_from_the_settings_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_BUDGET_MS", "7000")
    assert 6.5 < seconds_of(None) <= 7


def test_a_budget_callable_may_leave_it_to_the_settings() -> None:
    assert 59 < seconds_of(lambda _: None) <= 60


@pytest.mark.parametrize("budget", [0, -1, True, "5", float("inf"), lambda _: 0, lambda _: "5"])
def test_a_wrong_budget_is_refused(budget: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"budget is .*: give seconds, a finite number above 0"):
        seconds_of(budget)


def test_a_budget_callable_that_gives_the_message_itself_does_not_put_it_into_the_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        seconds_of(lambda argument: argument, {"card": "4111 1111"})
    assert "4111" not in str(caught.value)


def test_the_budget_of_a_record_around_only_shortens() -> None:
    with record("outer", budget=3):
        assert seconds_of(30) <= 3
        assert seconds_of(1) <= 1


def test_the_settings_of_a_client_hold_for_executions_and_budget() -> None:
    settings = Settings(max_executions=2, budget_ms=5_000, backoff_base_ms=1, backoff_cap_ms=1)
    failing = Failing(*[KeyError("x")] * 5)
    with MongoClient[dict[str, Any]](connect=False, saferetry=settings) as client, pytest.raises(KeyError):
        handler(client=client, retry_on=KeyError)(failing)()
    assert failing.seen == [1, 2]


def test_without_a_client_the_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(*[KeyError("x")] * 5)
    decorated = handler(retry_on=KeyError)(failing)
    monkeypatch.setenv("SAFERETRY_MAX_EXECUTIONS", "3")
    with pytest.raises(KeyError):
        decorated()
    assert failing.seen == [1, 2, 3]


# --- executed again --------------------------------------------------------------------------------------------------------


def test_a_handler_is_executed_again_for_the_exceptions_named() -> None:
    failing = Failing(KeyError("x"), ValueError("y"))
    assert handler(retry_on=(KeyError, ValueError))(failing)("z") == "done z"
    assert failing.seen == [1, 2, 3]


async def test_an_async_handler_is_executed_again_for_the_exceptions_named() -> None:
    failing = Failing(KeyError("x"), ValueError("y"))

    async def work() -> str:
        await asyncio.sleep(0)
        return failing("z")

    assert await handler(retry_on=(KeyError, ValueError))(work)() == "done z"
    assert failing.seen == [1, 2, 3]


def test_without_retry_on_nothing_is_executed_again() -> None:
    failing = Failing(AutoReconnect("x"))
    with pytest.raises(AutoReconnect):
        handler(failing)()
    assert failing.seen == [1]


def test_another_exception_is_not_retried() -> None:
    failing = Failing(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        handler(retry_on=KeyError)(failing)()
    assert failing.seen == [1]


def test_at_most_max_executions_and_the_last_error_leaves_unchanged() -> None:
    errors = [KeyError(number) for number in range(9)]
    failing = Failing(*errors)
    with pytest.raises(KeyError) as caught:
        handler(retry_on=KeyError)(failing)()
    assert failing.seen == [1, 2, 3, 4]
    assert caught.value is errors[3]
    assert not hasattr(caught.value, "__notes__")


def test_each_execution_is_a_new_record_with_the_same_key_and_budget() -> None:
    records: list[Record] = []

    @handler(key="k", name="n", retry_on=KeyError)
    def work(_: Any) -> None:
        records.append(here())
        if len(records) < 3:
            raise KeyError

    work("x")
    assert [one.execution for one in records] == [1, 2, 3]
    assert len({id(one) for one in records}) == 3
    assert len({id(one.budget) for one in records}) == 1
    assert {one.key for one in records} == {RecordKey("k")}
    assert [one.tag and one.tag["saferetry"]["execution"] for one in records] == [1, 2, 3]


def test_no_execution_starts_that_would_not_fit_into_the_budget() -> None:
    failing = Failing(*[KeyError("x")] * 9)
    with pytest.raises(KeyError):
        handler(retry_on=KeyError, budget=0.05)(failing)()  # less than the least that an execution is taken to need
    assert failing.seen == [1]


def test_the_first_execution_always_runs() -> None:
    spent = Budget(1e-9)
    assert handler(budget=lambda _: spent)(Failing())("x") == "done x"


def test_fatal_goes_before_retry_on() -> None:
    failing = Failing(KeyError("x"))
    with pytest.raises(KeyError):
        handler(retry_on=Exception, fatal=KeyError)(failing)()
    assert failing.seen == [1]


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("x"),
        RetryRefusedError("x"),
        UnsettledWriteError("x"),
        UnprotectedWriteError("x"),
        TakenOverError("x"),
    ],
)
def test_our_own_errors_never_match_retry_on(error: Exception) -> None:
    failing = Failing(error)
    with pytest.raises(type(error)) as caught:
        handler(retry_on=BaseException)(failing)()
    assert caught.value is error
    assert failing.seen == [1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError(), GeneratorExit()])
def test_an_interruption_passes_through_and_asks_no_recoverer(error: BaseException) -> None:
    failing, told = Failing(error), Told()
    with pytest.raises(type(error)):
        handler(retry_on=Exception, recoverer=told)(failing)()
    assert failing.seen == [1]
    assert told.failures == []
    assert current_record() is None


def test_disabled_executes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_DISABLED", "1")
    failing = Failing(KeyError("x"))
    with pytest.raises(KeyError):
        handler(retry_on=KeyError)(failing)()
    assert failing.seen == [1]


# --- refused ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.APPLIED, Outcome.UNKNOWN, Outcome.UNVERIFIABLE])
def test_a_handler_that_had_an_effect_is_not_executed_again(outcome: Outcome) -> None:
    error = KeyError("x")
    failing = Failing(error, write=outcome)
    with pytest.raises(RetryRefusedError) as caught:
        handler(retry_on=KeyError, name="on_order")(failing)()
    assert failing.seen == [1]
    assert caught.value.__cause__ is error
    assert caught.value.reason == f"insert_one on shop.orders is {outcome.value}"
    assert [view.outcome for view in caught.value.writes] == [outcome]
    assert str(caught.value).startswith(
        f"the handler on_order was not executed again: insert_one on shop.orders is {outcome.value}, and would be repeated. "
    )
    assert 'use guarantee "transaction"' in str(caught.value)


@pytest.mark.parametrize("outcome", [Outcome.NOT_SENT, Outcome.NOT_APPLIED])
def test_a_write_that_had_no_effect_does_not_stand_against_it(outcome: Outcome) -> None:
    failing = Failing(KeyError("x"), write=outcome)
    assert handler(retry_on=KeyError)(failing)("z") == "done z"
    assert failing.seen == [1, 2]


def test_an_error_that_nobody_asked_to_retry_is_not_refused_but_leaves() -> None:
    error = ValueError("x")
    with pytest.raises(ValueError, match="x") as caught:
        handler(retry_on=KeyError)(Failing(error, write=Outcome.APPLIED))()
    assert caught.value is error


def test_the_last_execution_is_not_refused_since_nobody_asks_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_MAX_EXECUTIONS", "1")
    with pytest.raises(KeyError):
        handler(retry_on=KeyError)(Failing(KeyError("x"), write=Outcome.APPLIED))()


def test_only_the_last_executions_writes_count() -> None:
    failing = Failing(KeyError("x"), KeyError("y"))

    @handler(retry_on=KeyError)
    def work() -> str:
        if len(failing.seen) == 1:
            write(Outcome.APPLIED)
        return failing()

    with pytest.raises(RetryRefusedError) as caught:
        work()
    assert failing.seen == [1, 2]
    assert len(caught.value.writes) == 1


# --- the recoverer ---------------------------------------------------------------------------------------------------------


class Told:
    """A recoverer that remembers what it was told."""

    def __init__(self, result: Any = "recovered", error: Exception | None = None) -> None:
        self.failures: list[Failure] = []
        self.records: list[Record | None] = []
        self.result = result
        self.error = error

    def __call__(self, failure: Failure) -> Any:
        self.failures.append(failure)
        self.records.append(current_record())
        if self.error is not None:
            raise self.error
        return self.result


REASONS: Mapping[str, tuple[Exception, dict[str, Any], Outcome | None, str, int]] = {
    # error, the handler's arguments, what it writes: reason, executions
    "an error that is not retried": (ValueError("x"), {}, None, "failed", 1),
    "an error that is not retried, after a write": (ValueError("x"), {}, Outcome.APPLIED, "failed", 1),
    "executions spent": (KeyError("x"), {"retry_on": KeyError}, None, "exhausted", 4),
    "budget spent": (KeyError("x"), {"retry_on": KeyError, "budget": 0.05}, None, "exhausted", 1),
    "refused": (KeyError("x"), {"retry_on": KeyError}, Outcome.APPLIED, "refused", 1),
    "refused inside": (RetryRefusedError("x"), {"retry_on": Exception}, None, "refused", 1),
    "fatal": (KeyError("x"), {"retry_on": Exception, "fatal": KeyError}, None, "fatal", 1),
    "unsettled": (UnsettledWriteError("x"), {}, None, "unsettled", 1),
    "key reused": (KeyReusedError("x"), {}, None, "key_reused", 1),
    "unprotected": (UnprotectedWriteError("x"), {}, None, "failed", 1),
}


@pytest.mark.parametrize(("error", "arguments", "outcome", "reason", "executions"), REASONS.values(), ids=REASONS.keys())
def test_a_recoverer_is_told(
    error: Exception, arguments: dict[str, Any], outcome: Outcome | None, reason: str, executions: int
) -> None:
    told = Told()
    failing = Failing(*[error] * 9, write=outcome)
    assert handler(recoverer=told, key="k", name="n", **arguments)(failing)("x") == "recovered"
    (failure,) = told.failures
    assert (failure.key, failure.argument, failure.reason) == (RecordKey("k"), "x", reason)
    assert failure.execution == executions == len(failing.seen)
    assert [view.outcome for view in failure.writes] == ([outcome] if outcome else [])
    if reason != "refused" or isinstance(error, RetryRefusedError):
        assert failure.exception is error
    else:
        assert isinstance(failure.exception, RetryRefusedError)
        assert failure.exception.__cause__ is error


@pytest.mark.parametrize("error", [ConfigurationError("x"), TakenOverError("x"), PartitionLostError("x")])
def test_a_recoverer_is_not_called_for(error: Exception) -> None:
    told = Told()
    with pytest.raises(type(error)) as caught:
        handler(recoverer=told)(Failing(error))()
    assert caught.value is error
    assert told.failures == []


def test_a_result_that_is_refused_is_no_matter_for_a_recoverer() -> None:
    told = Told()
    with pytest.raises(ConfigurationError, match="returned a generator"):
        handler(recoverer=told)(returned_generator)()
    assert told.failures == []


def test_a_recoverer_is_not_called_when_all_goes_well() -> None:
    told = Told()
    assert handler(recoverer=told)(Failing())("x") == "done x"
    assert told.failures == []


def test_a_recoverer_runs_after_the_record_has_ended() -> None:
    told = Told()
    handler(recoverer=told)(Failing(KeyError("x")))()
    assert told.records == [None]


def test_a_recoverer_that_raises_is_heard_with_what_it_could_not_mend() -> None:
    error, own = KeyError("x"), ValueError("dead letters are full")
    with pytest.raises(ValueError, match="full") as caught:
        handler(recoverer=Told(error=own))(Failing(error))()
    assert caught.value is own
    assert caught.value.__context__ is error


def test_a_recoverer_may_return_none() -> None:
    assert handler(recoverer=Told(None))(Failing(KeyError("x")))() is None


async def test_an_async_recoverer_is_awaited() -> None:
    told = Told()

    async def recover(failure: Failure) -> str:
        await asyncio.sleep(0)
        told(failure)
        return "recovered later"

    async def work(_: str) -> str:
        raise KeyError

    assert await handler(recoverer=recover)(work)("x") == "recovered later"
    assert told.failures[0].argument == "x"
    assert told.records == [None]


async def test_an_async_recoverer_that_is_an_object_is_awaited() -> None:
    class Recoverer:
        async def __call__(self, failure: Failure) -> str:
            await asyncio.sleep(0)
            return failure.reason

    async def work() -> str:
        raise KeyError

    assert await handler(recoverer=Recoverer())(work)() == "failed"


class AsyncRecoverer:
    """A recoverer whose call is a coroutine: a plain handler cannot await it."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    async def __call__(self, failure: Failure) -> None:
        self.failures.append(failure)


@pytest.mark.parametrize("hidden_in", ["an object", "a lambda", "a partial"])
def test_a_record_is_not_lost_because_a_recoverers_coroutine_is_never_awaited(hidden_in: str) -> None:
    recoverer = AsyncRecoverer()
    hidden: dict[str, Callable[[Failure], Any]] = {
        "an object": recoverer,
        "a lambda": lambda failure: recoverer(failure),  # noqa: PLW0108 - the lambda is the test
        "a partial": functools.partial(recoverer.__call__),
    }
    result: Any = None
    with contextlib.suppress(ConfigurationError, KeyError):
        result = handler(recoverer=hidden[hidden_in])(Failing(KeyError("x")))("x")
    is_lost = inspect.iscoroutine(result)
    if is_lost:
        result.close()
    assert not is_lost, "it looks like a result: the offset is committed, and nobody has recovered the record"


async def test_a_plain_recoverer_of_an_async_handler_gives_its_result() -> None:
    async def work() -> str:
        raise KeyError

    assert await handler(recoverer=Told("plain"))(work)() == "plain"


async def test_an_async_recoverer_that_raises_is_heard() -> None:
    async def work() -> str:
        raise KeyError

    async def recover(_: Failure) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full") as caught:
        await handler(recoverer=recover)(work)()
    assert isinstance(caught.value.__context__, KeyError)


def test_a_failure_is_frozen() -> None:
    told = Told()
    handler(recoverer=told)(Failing(KeyError("x")))()
    with pytest.raises(AttributeError):
        told.failures[0].reason = "fatal"  # type: ignore[misc]  # that is the test


def test_an_unsettled_write_under_strict_reaches_the_recoverer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_STRICT", "1")
    told = Told()
    handler(recoverer=told)(Failing(write=Outcome.UNKNOWN))("x")
    assert told.failures[0].reason == "unsettled"
    assert isinstance(told.failures[0].exception, UnsettledWriteError)
