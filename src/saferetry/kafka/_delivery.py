"""Produce one message and wait for the broker's word that it has it, with the producers of three libraries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from saferetry.errors import ConfigurationError, DeadLetterError
from saferetry.kafka._letter import Letter

_POLL = 0.05  # seconds between two looks at a report, which another thread may have fetched

Deliver = Callable[[Any, str, Letter, float], Any]


def delivery_with(producer: Any) -> Deliver:
    """Return how to deliver with a producer; a coroutine function for aiokafka's.

    Raises:
        ConfigurationError: It is none of the producers that are known.
    """
    for method, deliver in (("send_and_wait", _with_aiokafka), ("produce", _with_confluent), ("send", _with_kafka_python)):
        if callable(getattr(producer, method, None)):
            return deliver
    raise ConfigurationError(
        f"dead_letter: {type(producer).__name__} is no producer of confluent-kafka, kafka-python or aiokafka"
    )


def _with_confluent(producer: Any, topic: str, letter: Letter, timeout: float) -> None:
    reports: list[Any] = []
    deadline = time.monotonic() + timeout
    while True:
        try:
            producer.produce(
                topic,
                letter.message.value,
                key=letter.message.key,
                headers=letter.headers(),
                on_delivery=lambda error, _: reports.append(error),
            )
            break
        except BufferError:  # its queue is full
            if time.monotonic() > deadline:
                raise _undelivered(topic, "the producer's queue stayed full") from None
            producer.poll(_POLL)
        except Exception as exc:  # whatever the library raises: the record is not done
            raise _undelivered(topic, type(exc).__name__) from exc
    while not reports:
        if time.monotonic() > deadline:
            raise _undelivered(topic, f"no report in {timeout:g} s")
        producer.poll(_POLL)
    if reports[0] is not None:
        raise _undelivered(topic, f"error {reports[0].name()}")


def _with_kafka_python(producer: Any, topic: str, letter: Letter, timeout: float) -> None:
    try:
        future = producer.send(topic, value=letter.message.value, key=letter.message.key, headers=letter.headers())
        future.get(timeout=timeout)
    except Exception as exc:  # whatever the library raises: the record is not done
        raise _undelivered(topic, type(exc).__name__) from exc


async def _with_aiokafka(producer: Any, topic: str, letter: Letter, timeout: float) -> None:  # noqa: ASYNC109 - as its twins
    sending: Awaitable[Any] = producer.send_and_wait(
        topic, value=letter.message.value, key=letter.message.key, headers=letter.headers()
    )
    try:
        await asyncio.wait_for(sending, timeout)
    except Exception as exc:  # whatever the library raises: the record is not done
        raise _undelivered(topic, type(exc).__name__) from exc


def _undelivered(topic: str, why: str) -> DeadLetterError:
    return DeadLetterError(
        f"the dead letter for {topic} was not acknowledged ({why}): the record is not done; do not commit its offset"
    )
