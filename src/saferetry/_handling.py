"""The handling of one record by a handler: its executions, one after another, and what is told to a recoverer."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import AsyncGeneratorType, CoroutineType, GeneratorType, TracebackType
from typing import Any, Literal

from tenacity import RetryCallState, retry_if_exception

from saferetry import _world
from saferetry._budget import Budget
from saferetry._decisions import tell
from saferetry._identity import DerivedIds, RecordKey
from saferetry._losses import LOSSES
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

Reason = Literal["failed", "exhausted", "refused", "unsettled", "fatal", "key_reused"]
Exceptions = type[BaseException] | tuple[type[BaseException], ...]
BudgetOf = float | Callable[[Any], "Budget | float"]
KeyOf = RecordKey | str | tuple[Any, ...] | Callable[[Any], Any]

_UNFINISHED = (GeneratorType, AsyncGeneratorType, CoroutineType)
_NOT_RECOVERED = (ConfigurationError, TakenOverError, PartitionLostError)


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
class Rules:
    """Hold what the decorator was given."""

    key: KeyOf | None
    client: Any
    budget: BudgetOf | None
    retry_on: Exceptions
    fatal: Exceptions
    recoverer: Callable[[Failure], Any] | None
    name: str
    digest: Callable[[Any], bytes] | None = None
    store_result: bool = False
    is_named: bool = False
    derive_ids: bool = False

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings for executions, waits and budget, as they are at the first call."""
        return guard_of(self.client).settings if self.client is not None else Settings.from_env()


class Handling:
    """Be the handling of one record: its executions, one after another.

    Args:
        rules: Those of the handler.
        args: Of its call, without ``self``.
        kwargs: The same.

    Attributes:
        argument: The first one.
        outer: The record in which it is made.
    """

    record: Record | None = None
    execution: Any = None  # the transaction of one
    executions = 0
    longest = 0.0  # seconds
    reason: Reason = "failed"
    _started = 0.0

    def __init__(self, rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rules = rules
        self.settings = settings = rules.settings
        self.argument = args[0] if args else next(iter(kwargs.values()), None)
        key = _key_of(rules.key, self.argument)
        if key is not None and (settings.group or settings.epoch):
            key = replace(key, group=key.group or settings.group, epoch=key.epoch or settings.epoch)
        self.key = key
        self.losses = LOSSES.count(key)  # of its partition, before it began
        self.outer = current_record()
        self.budget = _budget_of(rules, settings, self.argument, self.outer)

    @property
    def most_executions(self) -> int:
        """How often the handler may be executed, the first counted: as the settings say, or fewer where the budget says so."""
        allowed = self.budget.executions
        return self.settings.max_executions if allowed is None else min(allowed, self.settings.max_executions)

    @functools.cached_property
    def rng(self) -> random.Random:
        """The jitter of its waits."""
        return random.Random(self.settings.seed)  # noqa: S311 - jitter, no secret

    def controls(self) -> dict[str, Any]:
        """Return tenacity's rules for the executions."""
        return {
            "retry": retry_if_exception(self._is_followed),
            "stop": self._stop,
            "wait": self._wait,
            "reraise": True,
        }

    def _wait(self, state: RetryCallState) -> float:
        return FullJitter(self.settings, self.rng)(state)

    def __enter__(self) -> None:
        """Begin an execution."""
        self.executions += 1
        record = self.record = self.new_record()
        record.transaction = self.execution
        if self.rules.derive_ids and self.key is not None:
            record.derived_ids = DerivedIds(self.key, self.rules.name, lambda: dt.datetime.now(dt.UTC))
        self._started = _world.monotonic()
        record.enter()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        """End it.

        Raises:
            RetryRefusedError: Another one was asked for, and could repeat an effect.
        """
        assert self.record is not None  # noqa: S101 - for the type checker
        try:
            self.record.leave(exc)
            if exc is not None and self._is_to_be_refused(exc) and (effect := self.record.effect()):
                raise self._refusal(self.record, effect) from exc
        finally:
            self.longest = max(self.longest, _world.monotonic() - self._started)

    def check_held(self) -> None:
        """Refuse to begin, or to commit, after the partition was taken away.

        Raises:
            PartitionLostError: It was; nothing is sent, or committed.
        """
        if LOSSES.counts and self.record is not None:
            self.record.check_held()

    def _is_to_be_refused(self, exc: BaseException) -> bool:
        """Whether another execution was asked for that must not repeat an effect."""
        return self.executions < self.most_executions and self.asks_again(exc)

    def new_record(self) -> Record:
        """Return the record of the execution that is beginning."""
        return Record(
            self.key,
            budget=self.budget,
            settings=self.settings,
            name=self.rules.name,
            execution=self.executions,
            losses=self.losses,
        )

    def asks_again(self, exc: BaseException) -> bool:
        """Whether the user named this exception as one after which to execute again; a cancellation never is."""
        if not isinstance(exc, Exception) or self.settings.disabled:
            return False
        return isinstance(exc, self.rules.retry_on) and not isinstance(exc, (SafeRetryError, *as_tuple(self.rules.fatal)))

    def _refusal(self, record: Record, effect: str) -> RetryRefusedError:
        tell("refused", self.rules.name, effect)
        return RetryRefusedError(
            f"the handler {record.label()} was not executed again: {effect}, and would be repeated. Let its writes be "
            'repeatable() where they are, write only at its end, or use guarantee "transaction"',
            writes=record.writes,
            reason=effect,
        )

    def _stop(self, state: RetryCallState) -> bool:
        spent = self._is_spent()
        if spent or not enough_time(self.budget.remaining(), state.upcoming_sleep, self.longest):
            self.reason = "exhausted"
            tell("given up", self.rules.name, "executions" if spent else "budget")
            return True
        tell("executed again", self.rules.name, wait=state.upcoming_sleep)
        return False

    def _is_followed(self, exc: BaseException) -> bool:
        """Whether another execution may follow one that ended so."""
        return self.asks_again(exc)

    def _is_spent(self) -> bool:
        """Whether there were as many executions as there may be."""
        return self.executions >= self.most_executions

    def failure(self, exc: Exception) -> Failure:
        """Return what the recoverer is told."""
        reason = self._reason_of(exc)
        tell("recovered", self.rules.name, reason)
        return Failure(
            self.key,
            self.argument,
            exc,
            reason,
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

    def finished(self, result: Any, whose: str = "handler") -> Any:
        """Return a result that is one, and not work still to be done after the record has ended.

        Raises:
            ConfigurationError: It is a generator or a coroutine.
        """
        if isinstance(result, _UNFINISHED):
            if not isinstance(result, AsyncGeneratorType):
                result.close()
            raise ConfigurationError(
                f"the {whose} {self.rules.name} returned a {type(result).__name__}, whose work would run after the record has "
                "ended: return a finished value, and declare a coroutine function with async def"
            )
        return result

    def recoverer_for(self, exc: Exception) -> Callable[[Failure], Any] | None:
        """Return who takes over, if anybody; not inside a transaction that fails, or is executed again, as a whole."""
        outer = self.outer
        if outer is not None and outer.transaction is not None and outer.transaction.doomed is not None:
            return None
        return None if isinstance(exc, _NOT_RECOVERED) else self.rules.recoverer


def as_tuple(kinds: Any) -> tuple[Any, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


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
    if isinstance(made, RecordKey):
        return made
    if made is None or isinstance(made, list):
        raise ConfigurationError(
            f"handler: the key callable returned {'None' if made is None else 'a list'}; it must return a RecordKey, a text or "
            "(stream, partition, position)"
        )
    return RecordKey.of(made)


def _budget_of(rules: Rules, settings: Settings, argument: Any, outer: Record | None) -> Budget:
    given = rules.budget(argument) if callable(rules.budget) else rules.budget
    if not isinstance(given, Budget):
        given = Budget(settings.budget_ms / 1000 if given is None else given)
    return given if outer is None else given.within(outer.budget)
