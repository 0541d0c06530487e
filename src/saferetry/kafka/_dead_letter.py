"""Recoverers that put away what a handler could not do: into a topic, or into a collection."""

from __future__ import annotations

import datetime as dt
import inspect
import logging
from collections.abc import Callable
from typing import Any

from bson.binary import Binary
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.write_concern import WriteConcern

from saferetry._handling import Exceptions, Failure
from saferetry._identity import RecordKey
from saferetry._record import current_record, record
from saferetry.errors import ConfigurationError
from saferetry.kafka._delivery import delivery_with
from saferetry.kafka._letter import Letter, letter_of

logger = logging.getLogger("saferetry")


def dead_letter(
    producer: Any,
    topic: str | Callable[[Failure], str],
    *,
    unless: Exceptions = (),
    timeout: float = 30.0,
) -> Callable[[Failure], Any]:
    """Return a recoverer that produces the failed message to another topic and waits until the broker has it.

    Key, value and headers are the message's own; headers named ``saferetry-...`` say where it came from and what became of
    it: topic, partition, offset, timestamp, group, reason, exception (its class), code, labels, executions and writes. If
    the broker does not acknowledge it, ``DeadLetterError`` leaves and the record is not done. If the offset's commit
    is lost afterwards, the message may be put away twice.

    Args:
        producer: A ``confluent_kafka.Producer``, ``kafka.KafkaProducer`` or ``aiokafka.AIOKafkaProducer``; the latter makes an
            async recoverer, for async handlers. Let it wait for all replicas (``acks=all``).
        topic: The topic, or a callable that returns it.
        unless: Exceptions that are raised again and not put away, as those of an outage.
        timeout: Seconds until the delivery report must be there.

    Example:
        >>> class Producer:
        ...     def produce(self, topic, value, key, headers, on_delivery): ...
        >>> recoverer = dead_letter(Producer(), "orders.dead")

    Raises:
        ConfigurationError: The producer is none; or, at a call, the handler's argument is no message.
        DeadLetterError: At a call: it was not delivered.
    """
    deliver: Any = delivery_with(producer)

    def prepare(failure: Failure) -> tuple[str, Letter]:
        _check(failure, unless)
        return topic if isinstance(topic, str) else topic(failure), letter_of(failure)

    if inspect.iscoroutinefunction(deliver):

        async def recover_async(failure: Failure) -> None:
            name, letter = prepare(failure)
            await deliver(producer, name, letter, timeout)
            _log(letter, name)

        return recover_async

    def recover(failure: Failure) -> None:
        name, letter = prepare(failure)
        deliver(producer, name, letter, timeout)
        _log(letter, name)

    return recover


def dead_letter_collection(collection: Any, *, unless: Exceptions = ()) -> Callable[[Failure], Any]:
    """Return a recoverer that keeps the failed message in a MongoDB collection, acknowledged by a majority.

    The document's ``_id`` is the record's, so that one that is put away again is there once. An async collection makes an
    async recoverer.

    Args:
        collection: A collection of a guarded or a plain client.
        unless: Exceptions that are raised again and not put away.

    Example:
        >>> from saferetry import MongoClient
        >>> client = MongoClient("mongodb://localhost:27017/shop?replicaSet=rs0")
        >>> recoverer = dead_letter_collection(client.shop.dead_letters)

    Raises:
        ConfigurationError: At a call: the handler's argument is no message.
    """
    kept = collection.with_options(write_concern=WriteConcern("majority"))

    def prepare(failure: Failure) -> tuple[Letter, dict[str, Any]]:
        _check(failure, unless)
        letter = letter_of(failure)
        return letter, _document_of(letter, failure.key)

    if isinstance(collection, AsyncCollection):

        async def recover_async(failure: Failure) -> None:
            letter, document = prepare(failure)
            with record(name="dead letter"):
                await kept.replace_one({"_id": document["_id"]}, document, upsert=True)
            _log(letter, collection.full_name)

        return recover_async

    def recover(failure: Failure) -> None:
        letter, document = prepare(failure)
        with record(name="dead letter"):
            kept.replace_one({"_id": document["_id"]}, document, upsert=True)
        _log(letter, collection.full_name)

    return recover


def _check(failure: Failure, unless: Exceptions) -> None:
    """Raise again what is not to be put away, and refuse what another consumer will handle."""
    if isinstance(failure.exception, unless):
        raise failure.exception
    if (around := current_record()) is not None:
        around.check_held()


def _document_of(letter: Letter, key: RecordKey | None) -> dict[str, Any]:
    message = letter.message
    identity = {
        "group": key.group if key is not None else "",
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "epoch": key.epoch if key is not None else "",
    }
    return {
        "_id": identity,
        "at": dt.datetime.now(dt.UTC),
        "key": _stored(message.key),
        "value": _stored(message.value),
        "headers": [{"name": name, "value": _stored(value)} for name, value in message.headers],
        **{name: value for name, value in letter.facts.items() if value is not None and name not in identity},
    }


def _stored(part: Any) -> Any:
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, (bytes, bytearray, memoryview)):
        return Binary(bytes(part))
    raise ConfigurationError(f"dead letter: a header's value is a {type(part).__name__}, which is neither bytes nor text")


def _log(letter: Letter, where: str) -> None:
    message, facts = letter.message, letter.facts
    extra = {name: facts[name] for name in ("topic", "partition", "offset", "reason", "exception", "executions")}
    logger.warning(
        "the message %s/%d/%d went to the dead letters %s: %s, %s",
        message.topic, message.partition, message.offset, where, facts["reason"], facts["exception"],
        extra={"saferetry": {"event": "dead letter", **extra, "where": where}},
    )  # fmt: skip
