"""The loop around a source that is no Kafka consumer: a callable that returns messages, and one that deletes a message."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from saferetry._handling import KeyOf
from saferetry._identity import RecordKey
from saferetry._record import Record
from saferetry._seam import guard_of
from saferetry._settings import Settings
from saferetry.errors import ConfigurationError
from saferetry.kafka._consuming import Consuming, record_entered
from saferetry.kafka._poll_budget import LEAST, PollBudget
from saferetry.kafka._signals import stopping_on_sigterm

logger = logging.getLogger("saferetry")


def run_source(
    receive: Callable[[], Iterable[Any] | None],
    handler: Callable[[Any], Any],
    *,
    delete: Callable[[Any], object],
    visibility_timeout: float,
    key: KeyOf | None = None,
    client: Any = None,
    max_records: int = 10,
    stop: threading.Event | None = None,
) -> None:
    """Consume from a queue that shows a message again unless it is deleted in time, as SQS does.

    Each message is handled as a record; the messages of one ``receive`` share its time, as those of a poll do. One whose
    handler returned is deleted. One whose handler failed, and one that there is no time for, is left: the queue shows it
    again, and after some times puts it away. SIGTERM (in the main thread) or ``stop`` ends it after the message in work.

    Args:
        receive: Returns messages, or nothing; let it wait for them, a second or some.
        handler: Is called with each message; a ``saferetry.handler`` or a plain function.
        delete: Is called with each message that is done.
        visibility_timeout: Seconds after which the queue shows a message again.
        key: Makes a message's key where the handler has none: from the message's id.
        client: The guarded client that the handler writes with: its time limits say how long an execution may take.
        max_records: Messages that ``receive`` returns at most.
        stop: Set it to stop, from any thread.

    Example:
        >>> stop, queue = threading.Event(), ["a"]
        >>> def delete(message):
        ...     queue.remove(message)
        ...     stop.set()
        >>> run_source(lambda: list(queue), print, delete=delete, visibility_timeout=500, stop=stop)
        a

    Raises:
        ConfigurationError: An argument cannot work.
        BaseException: What ``receive`` or ``delete`` raised.
    """
    if isinstance(visibility_timeout, bool) or not isinstance(visibility_timeout, (int, float)) or visibility_timeout <= 0:
        raise ConfigurationError("run_source: visibility_timeout must be a number of seconds above 0")
    settings = guard_of(client).settings if client is not None else Settings.from_env()
    budget = PollBudget(round(visibility_timeout * 1000), max_records, client=client)
    told = stop or threading.Event()
    with stopping_on_sigterm(told.set):
        while not told.is_set():
            messages = list(receive() or ())
            budget.start(messages)
            for message in messages:
                if told.is_set():
                    break
                left = budget(message)
                if left.remaining() <= LEAST:
                    logger.warning("a message was left, since the time of its receive is up; it comes again")
                    continue
                made = key(message) if callable(key) else key
                record = Record(None if made is None else RecordKey.of(made), budget=left, settings=settings, name="consumed")
                if _is_done(handler, message, record):
                    delete(message)


def _is_done(handler: Callable[[Any], Any], message: Any, record: Record) -> bool:
    try:
        with record_entered(record):
            Consuming.check_result(handler(message))
    except ConfigurationError:
        raise
    except Exception as exc:  # noqa: BLE001 - it is not deleted, so it comes again
        logger.error("record %s is not done and comes again: %s", record.label(), type(exc).__name__)  # noqa: TRY400 - no contents
        return False
    return True
