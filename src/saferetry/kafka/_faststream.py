"""FastStream: a middleware that makes each message a record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from saferetry._handler import handler
from saferetry._handling import Exceptions, Failure
from saferetry._seam import guard_of
from saferetry._settings import Settings
from saferetry.errors import ConfigurationError
from saferetry.kafka._key import kafka_key
from saferetry.kafka._message import read_message
from saferetry.kafka._poll_budget import PollBudget

logger = logging.getLogger("saferetry")

_TOO_EARLY = "ack_first"  # FastStream's default for Kafka: committed before it is done
_IN_SPITE = ("ack", "reject_on_error")  # committed although it failed


def faststream_middleware(
    group: str,
    *,
    epoch: str = "",
    guarantee: Literal["process", "transaction"] = "process",
    client: Any = None,
    budget: PollBudget | None = None,
    retry_on: Exceptions = (),
    fatal: Exceptions = (),
    recoverer: Callable[[Failure], Any] | None = None,
    name: str = "faststream",
) -> Any:
    """Return a middleware for FastStream's Kafka brokers: each message's subscriber runs as a ``saferetry.handler``.

    A record that is not done is never acknowledged, whatever the subscriber's policy, but for ``ACK_FIRST`` (FastStream's
    default for Kafka), with which the offset is committed before: choose ``AckPolicy.NACK_ON_ERROR``. Batches are refused.

    Args:
        group: The consumer group, as ``group_id`` of the subscriber.
        epoch: As for ``kafka_key``.
        guarantee: As for ``handler``.
        client: As for ``handler``; an ``AsyncMongoClient``.
        budget: The consumer's budget; it begins anew with each message.
        retry_on: As for ``handler``.
        fatal: As for ``handler``.
        recoverer: As for ``handler``, as ``dead_letter(producer, topic)``; the failure's argument is FastStream's message.
        name: Names the subscribers in the records' identity; another one for each broker in a group.

    Example:
        >>> middleware = faststream_middleware("orders-consumer")

    Raises:
        ConfigurationError: An argument cannot work; or, under strict, a subscriber acknowledges first.
    """
    from faststream import BaseMiddleware  # noqa: PLC0415 - the extra `faststream` brings it
    from faststream.exceptions import NackMessage  # noqa: PLC0415

    settings = guard_of(client).settings if client is not None else Settings.from_env()
    told: set[str] = set()

    @handler(
        key=kafka_key(group, epoch),
        guarantee=guarantee,
        client=client,
        budget=budget,
        retry_on=retry_on,
        fatal=fatal,
        recoverer=recoverer,
        name=name,
    )
    async def consume(message: Any, call_next: Any) -> Any:
        return await call_next(message)

    class SafeRetryMiddleware(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            policy = _policy_of(self.context)
            if policy == _TOO_EARLY and policy not in told:
                _complain(settings)
                told.add(policy)
            try:
                read_message(msg, "faststream_middleware")
                if budget is not None:
                    budget.start(1)
                return await consume(msg, call_next)
            except Exception as exc:
                if policy not in _IN_SPITE:
                    raise
                logger.error("a record of %s is not done and comes again: %s", name, type(exc).__name__)  # noqa: TRY400 - no contents
                raise NackMessage from exc

    return SafeRetryMiddleware


def _policy_of(context: Any) -> str | None:
    """Return the acknowledgement policy of the subscriber that is at work, or None where it cannot be seen."""
    subscriber = context.get_local("handler_")
    policy = getattr(subscriber, "ack_policy", None)
    return getattr(policy, "value", None)


def _complain(settings: Settings) -> None:
    message = (
        "faststream_middleware: this subscriber acknowledges a message before it is done (ACK_FIRST, the default), so that one "
        "that fails is lost: give the subscriber ack_policy=AckPolicy.NACK_ON_ERROR"
    )
    if settings.strict:
        raise ConfigurationError(message)
    logger.warning(message)
