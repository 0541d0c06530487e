"""The time between two polls, shared by the records of one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from saferetry._budget import Budget
from saferetry._limits import DEFAULT_MS
from saferetry._seam import guard_of
from saferetry._settings import Settings
from saferetry.errors import ConfigurationError
from saferetry.kafka._arithmetic import PollArithmetic

logger = logging.getLogger("saferetry")

Library = Literal["confluent-kafka", "kafka-python", "aiokafka"]

MARGIN = 0.1  # of the interval: for the commit, and for what is on its way to the next poll
LEAST = 0.001  # seconds: a record that comes too late still has a budget, which is spent
DEFAULT_INTERVAL_MS = 300_000  # of all three libraries
_DEFAULT_RECORDS: Mapping[Library, int | None] = {"confluent-kafka": 1, "kafka-python": 500, "aiokafka": None}
_SELECTION_MS = 30_000  # the driver's default of serverSelectionTimeoutMS
_SENDS = 2  # of the driver, for one call


class PollBudget:
    """Share the time until the next poll is due among the records of one; give it to ``handler(budget=...)``.

    Call ``start`` when poll() has returned. Each record then gets what is left less a reserve for the records after it: the
    longest execution for each, or, where that is not there, its even share. Thread-safe.

    Args:
        max_poll_interval_ms: The consumer's ``max.poll.interval.ms``; else ``SAFERETRY_MAX_POLL_INTERVAL_MS``.
        max_poll_records: How many records one poll may return: 1 for confluent-kafka's ``poll()``, n for ``consume(n)``, 500
            for kafka-python unless it is told otherwise, what ``getmany(max_records=...)`` was given for aiokafka; else
            ``SAFERETRY_MAX_POLL_RECORDS``.
        client: The guarded client that the handler writes with: its settings and time limits count.
        settings: Settings, where there is no client; else those of the environment.
        clock: Monotonic clock in seconds.

    Attributes:
        executions: How often a handler is executed at most; fewer than ``max_executions`` where those do not fit.

    Example:
        >>> from saferetry import Settings
        >>> budget = PollBudget(300_000, 500, settings=Settings(longest_execution_ms=100, max_executions=2))
        >>> budget.start(500)
        >>> budget("the first of 500 records").remaining() < 300
        True

    Raises:
        ConfigurationError: The interval or the number of records is not known; one execution of ``longest_execution_ms`` does
            not fit; or, under strict, the executions do not fit.
    """

    def __init__(
        self,
        max_poll_interval_ms: int | None = None,
        max_poll_records: int | None = None,
        *,
        client: Any = None,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = _settings_of(client, settings)
        interval = _count("max_poll_interval_ms", max_poll_interval_ms, settings.max_poll_interval_ms)
        records = _count("max_poll_records", max_poll_records, settings.max_poll_records)
        longest = settings.longest_execution_ms or _longest_execution_ms(client, settings)
        terms = PollArithmetic(interval, records, longest, settings.backoff_base_ms, settings.backoff_cap_ms)
        self.executions = _executions_that_fit(terms, settings)
        self._terms = terms
        self._clock = clock
        self._deadline: float | None = None
        self._left = 0
        self._lock = threading.Lock()

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        library: Library | None = None,
        max_poll_records: int | None = None,
        client: Any = None,
        settings: Settings | None = None,
    ) -> Self:
        """Return the budget for a consumer with this configuration.

        Args:
            config: What the consumer was made with: ``max.poll.interval.ms`` or ``max_poll_interval_ms``, and the same for
                ``max.poll.records``; else the library's defaults.
            library: Whose configuration it is; told from names with dots, which are confluent-kafka's.
            max_poll_records: How many records one poll may return, where the configuration does not say.
            client: As above.
            settings: As above.

        Example:
            >>> from saferetry import Settings
            >>> quick = Settings(longest_execution_ms=100)
            >>> PollBudget.from_config({"max.poll.interval.ms": "60000"}, settings=quick).executions
            4

        Raises:
            ConfigurationError: As above, or a value is no whole number; or, under strict, the consumer commits by itself.
        """
        own = _settings_of(client, settings)
        _check_commits(config, own)
        if library is None and any("." in name for name in config):
            library = "confluent-kafka"
        interval = _configured(config, "max_poll_interval_ms") or own.max_poll_interval_ms or DEFAULT_INTERVAL_MS
        records = max_poll_records or _configured(config, "max_poll_records") or own.max_poll_records
        if records is None and library is not None:
            records = _DEFAULT_RECORDS[library]
        return cls(interval, records, client=client, settings=settings)

    def start(self, records: int | list[Any] | tuple[Any, ...] | Mapping[Any, Any] | None = None) -> None:
        """Begin anew: poll() has just returned.

        Args:
            records: What it returned: how many records, the list of them, or kafka-python's and aiokafka's mapping of
                partitions to lists; None: as many as it may.

        Raises:
            ConfigurationError: Anything else.
        """
        number = self._terms.records if records is None else _number_of(records)
        with self._lock:
            self._left = number
            self._deadline = self._clock() + self._terms.interval / 1000 * (1 - MARGIN)

    def __call__(self, argument: Any = None) -> Budget:  # noqa: ARG002 - what handler(budget=...) calls it with
        """Return the next record's budget.

        Raises:
            ConfigurationError: ``start`` was never called.
        """
        with self._lock:
            if self._deadline is None:
                raise ConfigurationError("poll budget: call start() each time when poll() has returned, before the handler")
            self._left = after = max(0, self._left - 1)
            remaining = max(0.0, self._deadline - self._clock())
        reserve = min(after * self._terms.longest / 1000, remaining * after / (after + 1))
        return Budget(max(LEAST, remaining - reserve), executions=self.executions, clock=self._clock)


def _settings_of(client: Any, settings: Settings | None) -> Settings:
    if settings is not None:
        return settings
    return guard_of(client).settings if client is not None else Settings.from_env()


def _count(name: str, given: int | None, setting: int | None) -> int:
    number = setting if given is None else given
    if number is None:
        raise ConfigurationError(
            f"poll budget: {name} is not known: give it, or SAFERETRY_{name.upper()}, or the consumer's configuration to "
            "PollBudget.from_config (aiokafka has no limit of its own for the records of a poll, and must be told one)"
        )
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigurationError(f"poll budget: {name} is {number!r}: give a whole number above 0")
    return number


def _check_commits(config: Mapping[str, Any], settings: Settings) -> None:
    """Complain of a consumer that commits by itself what it has polled, done or not, which is every library's default."""

    def is_on(name: str) -> bool:
        value = config.get(name, config.get(name.replace(".", "_"), True))
        return value.lower() != "false" if isinstance(value, str) else bool(value)

    if not (is_on("enable.auto.commit") and is_on("enable.auto.offset.store")):
        return
    message = (
        "poll budget: this consumer commits by itself what it has polled, so that a record that is not done is lost: set "
        "enable.auto.commit (enable_auto_commit) to False and commit when the handler has returned"
    )
    if settings.strict:
        raise ConfigurationError(message)
    logger.warning(message)


def _configured(config: Mapping[str, Any], name: str) -> int | None:
    for spelling in (name, name.replace("_", ".")):
        if config.get(spelling) is not None:
            try:
                return int(config[spelling])
            except (TypeError, ValueError):
                raise ConfigurationError(f"poll budget: {spelling} of the configuration is no whole number") from None
    return None


def _number_of(records: Any) -> int:
    if isinstance(records, Mapping):
        return sum(len(some) for some in records.values())
    if isinstance(records, (list, tuple)):
        return len(records)
    if isinstance(records, int) and not isinstance(records, bool) and records >= 0:
        return records
    raise ConfigurationError(
        f"poll budget: start() got a {type(records).__name__}: give the number of records that poll() returned, or all of them"
    )


def _longest_execution_ms(client: Any, settings: Settings) -> int:
    """Return the longest that one call takes: the server is looked for, and two sends get no answer."""
    if client is None:
        return _SELECTION_MS + _SENDS * (settings.socket_timeout_ms or settings.max_time_ms or DEFAULT_MS)
    limits = guard_of(client).limits
    selection: int = round(client.options.server_selection_timeout * 1000)
    return selection + _SENDS * (limits.socket_timeout_ms or limits.inside_ms)


def _executions_that_fit(terms: PollArithmetic, settings: Settings) -> int:
    wanted = settings.max_executions
    fitting = terms.most_executions(wanted)
    if fitting == wanted:
        logger.info("poll budget: %s", terms.sum_of(wanted))
        return wanted
    message = f"poll budget: {wanted} executions do not fit: {terms.sum_of(wanted)}. To have them, {terms.remedy(wanted)}. "
    if not fitting:
        message += f"Not even one execution fits: {terms.sum_of(1)}; {terms.remedy(1)}"
        if settings.strict or settings.longest_execution_ms is not None:
            raise ConfigurationError(message)
        logger.warning("%s; a slow record can cost the partition", message)
        return 1
    if settings.strict:
        raise ConfigurationError(message + f"{fitting} would fit")
    logger.warning("%sA handler is executed %d times at most: %s", message, fitting, terms.sum_of(fitting))
    return fitting


def budget_for(consumer: Any) -> PollBudget:
    """Return the budget of a consumer that goes on polling while a record is in work, so that each has the interval."""
    config = getattr(consumer, "config", None)
    known = config if isinstance(config, Mapping) else {}
    return PollBudget.from_config({**known, "enable.auto.commit": False}, max_poll_records=1)  # that was looked at before
