"""Tests of your own handlers: no waits, failures on demand, and what was decided; see docs/testing.md.

Nothing here needs a server. ``mock_client`` and ``faults`` need mongomock: ``pip install 'saferetry[testing]'``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from saferetry import _decisions, _world
from saferetry._budget import Budget
from saferetry._collections import wrap
from saferetry._decisions import Decided, What
from saferetry._faults import Faults
from saferetry._identity import RecordKey
from saferetry._outcomes import Outcome, WriteView
from saferetry._record import Record
from saferetry._seam import guarded_client
from saferetry._settings import Settings
from saferetry._stand_ins import StandInClient
from saferetry.errors import ConfigurationError

__all__ = ["Clock", "Decided", "Faults", "Recorder", "fake_record", "faults", "fixed_time", "mock_client", "recorded"]


SHORTEST_WAIT = 0.01  # seconds of the test's time, so that what never succeeds comes to the end of its budget


class Clock(_world.World):
    """Be the time of a test: it stands still, but for waits, which take none of yours.

    Attributes:
        now: Seconds since the test began.
        waits: Every wait so far, in seconds, oldest first.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._chance = random.Random(seed)  # noqa: S311 - jitter, no secret

    def advance(self, seconds: float) -> None:
        """Let time go by, as a slow handler does.

        Raises:
            ConfigurationError: It would go back.
        """
        if seconds < 0:
            raise ConfigurationError(f"advance: seconds is {seconds}: time does not go back")
        self.now += seconds

    def monotonic(self) -> float:
        """Return ``now``."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Be over at once."""
        self.waits.append(seconds)
        self.advance(max(seconds, SHORTEST_WAIT))

    async def sleep_async(self, seconds: float) -> None:
        """Be over at once."""
        self.sleep(seconds)

    def uniform(self, rng: random.Random, limit: float) -> float:  # noqa: ARG002 - a client's own is left as it is
        """Return the same numbers in every test."""
        return self._chance.uniform(0, limit)


@contextmanager
def fixed_time(seed: int = 0) -> Iterator[Clock]:
    """Let saferetry neither sleep nor look at the clock, and draw the same waits every time; in all threads and tasks.

    Budgets are of this time as well. What MongoDB itself does, and PyMongo's own waits, are not changed.

    Args:
        seed: Which waits.

    Example:
        >>> from saferetry import Budget
        >>> with fixed_time() as clock:
        ...     budget = Budget(30)
        ...     clock.advance(10)
        ...     budget.remaining()
        20.0
    """
    clock = Clock(seed)
    with _world.replaced(clock):
        yield clock


class Recorder(logging.Handler):
    """Remember what was decided inside its ``with`` block, in every thread.

    Attributes:
        decisions: All of it, oldest first.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.decisions: list[Decided] = []
        self._level_before = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        """Take in what the log is told."""
        decided = getattr(record, _decisions.ATTRIBUTE, None)
        if decided is not None:
            self.decisions.append(decided)

    def of(self, what: What) -> list[Decided]:
        """Return the decisions of one kind."""
        return [decided for decided in self.decisions if decided.what == what]

    def __enter__(self) -> Recorder:
        """Begin."""
        self._level_before = _decisions.logger.level
        _decisions.logger.setLevel(logging.DEBUG)
        _decisions.logger.addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        """End."""
        _decisions.logger.removeHandler(self)
        _decisions.logger.setLevel(self._level_before)


def recorded() -> Recorder:
    """Return a recorder of decisions, to be used in a ``with`` statement.

    Example:
        >>> with recorded() as recorder:
        ...     pass
        >>> recorder.of("resent")
        []
    """
    return Recorder()


@dataclass
class _Written:
    """Be a write that a fake record is said to have made."""

    _view: WriteView
    repeatable: bool = False
    is_foreign: bool = False

    @property
    def outcome(self) -> Outcome:
        return self._view.outcome

    def view(self) -> WriteView:
        return self._view

    def orphan(self) -> None:
        """Return None: no server is at work on it."""


@contextmanager
def fake_record(
    key: RecordKey | str | tuple[Any, ...] | None = "test",
    *,
    execution: int = 1,
    skipped: bool = False,
    writes: Sequence[WriteView] = (),
    budget: float = 60.0,
    name: str = "test",
    settings: Settings | None = None,
) -> Iterator[Record]:
    """Be in a record, for code that asks ``saferetry.current_record()``; no handler runs.

    Args:
        key: As for ``record``.
        execution: Its number, the first is 1.
        skipped: Whether it is said to have been done before.
        writes: What it is said to have written already.
        budget: Seconds.
        name: The handler's name.
        settings: Its settings; not those of the environment.

    Example:
        >>> from saferetry import current_record
        >>> with fake_record(("orders", 0, 17), execution=2):
        ...     current_record().execution
        2

    Raises:
        ConfigurationError: A wrong key or budget.
    """
    record = Record(
        None if key is None else RecordKey.of(key),
        budget=Budget(budget),
        settings=settings or Settings(),
        name=name,
        execution=execution,
    )
    record.skipped = skipped
    for view in writes:
        record.add(_Written(view))
    record.enter()
    try:
        yield record
    except BaseException as exc:
        record.leave(exc)
        raise
    else:
        record.leave(None)


def mock_client(host: str = "mongodb://localhost/test", settings: Settings | None = None, **options: Any) -> Any:
    """Return a guarded client of a new server in memory: ``wrap(mongomock.MongoClient(host, ...))``.

    Args:
        host: Its URI; the database it names is where markers go.
        settings: As for ``wrap``; not those of the environment.
        **options: As ``mongomock.MongoClient``.

    Example:
        >>> client = mock_client()
        >>> client.test.orders.insert_one({"left": 3}).acknowledged
        True

    Raises:
        ConfigurationError: mongomock is not installed.
    """
    try:
        import mongomock  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigurationError("mock_client needs mongomock: pip install 'saferetry[testing]'") from exc
    return wrap(mongomock.MongoClient(host, **options), settings or Settings())


def faults(client: Any) -> Faults:
    """Return what makes calls of a guarded mongomock client fail: the same object for the same client.

    Example:
        >>> client = mock_client()
        >>> faults(client).lose_reply("insert_one")
        >>> client.test.orders.insert_one({"left": 3})
        Traceback (most recent call last):
        pymongo.errors.AutoReconnect: connection closed (a test lost the reply)
        >>> client.test.orders.count_documents({})
        1

    Raises:
        ConfigurationError: It is another client.
    """
    stand_in = guarded_client(client)
    if not isinstance(stand_in, StandInClient):
        raise ConfigurationError("faults: give a mongomock client after wrap(), or one made by mock_client()")
    return stand_in._saferetry_faults
