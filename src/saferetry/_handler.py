"""The decorator that runs a handler as a record, again where that is safe, and hands over what it cannot do."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar, overload

import wrapt
from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception

from saferetry._budget import Budget
from saferetry._identity import RecordKey
from saferetry._outcomes import WriteView
from saferetry._policy import FullJitter, enough_time
from saferetry._record import Record, current_record
from saferetry._seam import guard_of
from saferetry._settings import Settings
from saferetry.errors import (
    ConfigurationError,
    KeyReusedError,
    PartitionLostError,
    RetryRefusedError,
    SafeRetryError,
    TakenOverError,
    UnsettledWriteError,
)

logger = logging.getLogger("saferetry")

P = ParamSpec("P")
R = TypeVar("R")
Reason = Literal["failed", "exhausted", "refused", "unsettled", "fatal", "key_reused"]
Exceptions = type[BaseException] | tuple[type[BaseException], ...]
BudgetOf = float | Callable[[Any], "Budget | float"]
KeyOf = RecordKey | str | tuple[Any, ...] | Callable[[Any], Any]

_NOT_RECOVERED = (ConfigurationError, TakenOverError, PartitionLostError)
_NAMELESS = ("__main__", "<locals>", "<lambda>")


@dataclass(frozen=True)
class Failure:
    """Tell a recoverer what a handler could not do.

    Attributes:
        key: The record's key.
        argument: The handler's first argument (after ``self``).
        exception: What left the record.
        reason: "failed" (an error that is not retried), "exhausted" (executions or budget spent), "refused" (another execution
            could repeat an effect), "unsettled" (strict: a write of unknown outcome was passed over), "fatal" (named so),
            "key_reused".
        execution: Number of the last execution, the first is 1.
        writes: What the last execution wrote, oldest first.
    """

    key: RecordKey | None
    argument: Any
    exception: Exception
    reason: Reason
    execution: int
    writes: tuple[WriteView, ...]


@dataclass(frozen=True)
class _Rules:
    """Hold what the decorator was given."""

    key: KeyOf | None
    client: Any
    budget: BudgetOf | None
    retry_on: Exceptions
    fatal: Exceptions
    recoverer: Callable[[Failure], Any] | None
    name: str

    def settings(self) -> Settings:
        """Return the settings for executions, waits and budget."""
        return guard_of(self.client).settings if self.client is not None else Settings.from_env()


@dataclass
class _Handling:
    """Be the handling of one record: its executions, one after another."""

    rules: _Rules
    settings: Settings
    key: RecordKey | None
    argument: Any
    budget: Budget
    record: Record | None = None
    executions: int = 0
    longest: float = 0.0  # seconds
    reason: Reason = "failed"
    rng: random.Random = field(default_factory=random.Random)

    @classmethod
    def of(cls, rules: _Rules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Handling:
        """Return the handling of a call; the argument is the first one after self."""
        settings = rules.settings()
        argument = args[0] if args else next(iter(kwargs.values()), None)
        handling = cls(rules, settings, _key_of(rules.key, argument), argument, _budget_of(rules, settings, argument))
        handling.rng.seed(settings.seed)
        return handling

    def controls(self) -> dict[str, Any]:
        """Return tenacity's rules for the executions."""
        return {
            "retry": retry_if_exception(self._asks_again),
            "stop": self._stop,
            "wait": FullJitter(self.settings, self.rng),
            "reraise": True,
        }

    @contextmanager
    def execution(self) -> Iterator[None]:
        """Be one execution."""
        self.executions += 1
        self.record = Record(
            self.key, budget=self.budget, settings=self.settings, name=self.rules.name, execution=self.executions
        )
        started = time.monotonic()
        self.record.enter()
        try:
            yield
        except BaseException as exc:
            self.record.leave(exc)
            is_last = self.executions >= self.settings.max_executions
            if not is_last and self._asks_again(exc) and (effect := self.record.effect()):
                raise self._refusal(self.record, effect) from exc
            raise
        else:
            self.record.leave(None)
        finally:
            self.longest = max(self.longest, time.monotonic() - started)

    def _asks_again(self, exc: BaseException) -> bool:
        if isinstance(exc, (SafeRetryError, *_as_tuple(self.rules.fatal))) or self.settings.disabled:
            return False
        return isinstance(exc, self.rules.retry_on)

    def _refusal(self, record: Record, effect: str) -> RetryRefusedError:
        return RetryRefusedError(
            f"the handler {record.label()} was not executed again: {effect}, and would be repeated. Let its writes be "
            'repeatable() where they are, write only at its end, or use guarantee "transaction"',
            writes=record.writes,
            reason=effect,
        )

    def _stop(self, state: RetryCallState) -> bool:
        spent = self.executions >= self.settings.max_executions
        if spent or not enough_time(self.budget.remaining(), state.upcoming_sleep, self.longest):
            self.reason = "exhausted"
            return True
        logger.debug("%s: executed again in %.3f s", self.rules.name, state.upcoming_sleep)
        return False

    def failure(self, exc: Exception) -> Failure:
        """Return what the recoverer is told."""
        return Failure(
            self.key,
            self.argument,
            exc,
            self._reason_of(exc),
            self.executions,
            self.record.writes if self.record is not None else (),
        )

    def _reason_of(self, exc: Exception) -> Reason:
        match exc:
            case RetryRefusedError():
                return "refused"
            case UnsettledWriteError():
                return "unsettled"
            case KeyReusedError():
                return "key_reused"
        return "fatal" if isinstance(exc, self.rules.fatal) else self.reason

    def recoverer_for(self, exc: Exception) -> Callable[[Failure], Any] | None:
        """Return who takes over, if anybody."""
        return None if isinstance(exc, _NOT_RECOVERED) else self.rules.recoverer


# the loops


def _handle(handling: _Handling, fn: Callable[[], Any]) -> Any:
    try:
        return Retrying(sleep=time.sleep, **handling.controls())(_execute, handling, fn)
    except Exception as exc:
        recoverer = handling.recoverer_for(exc)
        if recoverer is None:
            raise
        return _finished(handling, recoverer(handling.failure(exc)), "recoverer")


def _execute(handling: _Handling, fn: Callable[[], Any]) -> Any:
    with handling.execution():
        return _finished(handling, fn())


async def _handle_async(handling: _Handling, fn: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await AsyncRetrying(sleep=asyncio.sleep, **handling.controls())(_execute_async, handling, fn)
    except Exception as exc:
        recoverer = handling.recoverer_for(exc)
        if recoverer is None:
            raise
        return _finished(handling, await _awaited(recoverer(handling.failure(exc))), "recoverer")


async def _execute_async(handling: _Handling, fn: Callable[[], Awaitable[Any]]) -> Any:
    with handling.execution():
        return _finished(handling, await fn())


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _finished(handling: _Handling, result: Any, whose: str = "handler") -> Any:
    """Return a result that is one, and not work still to be done after the record has ended.

    Raises:
        ConfigurationError: It is a generator or a coroutine.
    """
    if inspect.isgenerator(result) or inspect.isasyncgen(result) or inspect.iscoroutine(result):
        if not inspect.isasyncgen(result):
            result.close()
        raise ConfigurationError(
            f"the {whose} {handling.rules.name} returned a {type(result).__name__}, whose work would run after the record has "
            "ended: return a finished value, and declare a coroutine function with async def"
        )
    return result


# the decorator


@overload
def handler(fn: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def handler(
    fn: None = None,
    *,
    key: KeyOf | None = None,
    guarantee: Literal["process", "transaction"] = "process",
    client: Any = None,
    budget: BudgetOf | None = None,
    retry_on: Exceptions = (),
    fatal: Exceptions = (),
    recoverer: Callable[[Failure], Any] | None = None,
    digest: Callable[[Any], bytes] | None = None,
    store_result: bool = False,
    derive_ids: bool = False,
    name: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def handler(
    fn: Any = None,
    *,
    key: KeyOf | None = None,
    guarantee: Literal["process", "transaction"] = "process",
    client: Any = None,
    budget: BudgetOf | None = None,
    retry_on: Exceptions = (),
    fatal: Exceptions = (),
    recoverer: Callable[[Failure], Any] | None = None,
    digest: Callable[[Any], bytes] | None = None,
    store_result: bool = False,
    derive_ids: bool = False,
    name: str | None = None,
) -> Any:
    """Run every call of a function as a record.

    Works on functions, coroutine functions, methods, class and static methods, with or without arguments.

    Args:
        fn: The function, where the decorator is used bare.
        key: A key, or a callable that makes it from the handler's first argument (after ``self``).
        guarantee: "process": executed again only while nothing was written. "transaction" is not in this release.
        client: A guarded client whose settings hold for executions, waits and budget; else ``SAFERETRY_*``.
        budget: Seconds, or a callable from the first argument to seconds or a ``Budget``.
        retry_on: Exceptions after which the handler is executed again, if that is safe.
        fatal: Exceptions after which it never is.
        recoverer: Is given a ``Failure`` for every exception that leaves the record; its result becomes the handler's.
        digest: With guarantee "transaction".
        store_result: With guarantee "transaction".
        derive_ids: Not in this release.
        name: Names the handler in identities and messages; else ``module.qualname``.

    Example:
        >>> @handler(retry_on=ConnectionError)
        ... def on_order(order: dict[str, int]) -> int:
        ...     return order["left"]
        >>> on_order({"left": 3})
        3

    Raises:
        ConfigurationError: An argument or the function cannot work; or, at a call, its key, budget or result.
    """
    if guarantee != "process" or digest is not None or store_result or derive_ids:
        raise ConfigurationError(_unavailable(guarantee))
    if isinstance(budget, Budget):
        raise ConfigurationError(
            "handler: a Budget counts from its making, here once for all records: give seconds, or a callable that makes one"
        )
    if client is not None and "_saferetry_guard" not in getattr(client, "__dict__", {}):
        raise ConfigurationError("handler: client= must be a saferetry.MongoClient, AsyncMongoClient or a wrapped client")
    if not (key is None or callable(key)):
        key = RecordKey.of(key)
    for argument, given in (("retry_on", retry_on), ("fatal", fatal)):
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in _as_tuple(given)):
            raise ConfigurationError(f"handler: {argument} must be an exception class or a tuple of them")

    def decorate(function: Any) -> Any:
        plain = getattr(function, "__func__", function)
        if inspect.iscoroutinefunction(recoverer) and not inspect.iscoroutinefunction(plain):
            raise ConfigurationError("handler: an async recoverer needs an async handler: give a plain function")
        rules = _Rules(key, client, budget, retry_on, fatal, recoverer, _name_of(plain, name, has_key=key is not None))
        if inspect.iscoroutinefunction(plain):

            async def run_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - wrapt's signature
                return await _handle_async(_Handling.of(rules, args, kwargs), lambda: wrapped(*args, **kwargs))

            return wrapt.FunctionWrapper(function, run_async)

        def run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - wrapt's signature
            return _handle(_Handling.of(rules, args, kwargs), lambda: wrapped(*args, **kwargs))

        return wrapt.FunctionWrapper(function, run)

    return decorate if fn is None else decorate(fn)


def _unavailable(guarantee: str) -> str:
    if guarantee not in ("process", "transaction"):
        return f'handler: guarantee is {guarantee!r}: give "process"'
    return (
        'handler: guarantee "transaction", digest, store_result and derive_ids are not in this release; use guarantee "process"'
    )


def _as_tuple(kinds: Any) -> tuple[Any, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _name_of(function: Any, given: str | None, *, has_key: bool) -> str:
    if not callable(function):
        raise ConfigurationError(f"handler: decorate a function, not {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"handler: {getattr(function, '__qualname__', 'this')} is a generator function, whose work runs after the call: "
            "decorate a function that does the work, or open a record inside with 'with record(...)'"
        )
    if given is not None and not (isinstance(given, str) and given):
        raise ConfigurationError("handler: name must be text that is not empty")
    name = given or f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    if given is None and has_key and any(part in name for part in _NAMELESS):
        raise ConfigurationError(
            f"handler: {name} is not the same name in every process, and it is part of the record's identity: give name="
        )
    return name


def _key_of(key: KeyOf | None, argument: Any) -> RecordKey | None:
    if key is None:
        return None
    if not callable(key):
        return RecordKey.of(key)
    if argument is None or isinstance(argument, list):
        raise ConfigurationError(
            f"handler: key= was to be made from {'None' if argument is None else 'a list'}: call the handler with one record"
        )
    made = key(argument)
    if made is None or isinstance(made, list):
        raise ConfigurationError(
            f"handler: the key callable returned {'None' if made is None else 'a list'}; it must return a RecordKey, a text or "
            "(stream, partition, position)"
        )
    return RecordKey.of(made)


def _budget_of(rules: _Rules, settings: Settings, argument: Any) -> Budget:
    given = rules.budget(argument) if callable(rules.budget) else rules.budget
    if not isinstance(given, Budget):
        given = Budget(settings.budget_ms / 1000 if given is None else given)
    outer = current_record()
    return given if outer is None else given.within(outer.budget)
