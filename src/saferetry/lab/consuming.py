"""The two ways a consumer handles one message: raw PyMongo with the retry people write, and saferetry.

Both get the same handler body, the same connection options and may execute the handler four times. What differs is the
import and the decorator.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pymongo
from pymongo.collection import Collection
from pymongo.errors import PyMongoError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

import saferetry
from saferetry.lab.commands import CommandLog

EXECUTIONS = 4  # the first one and the three of FixedBackOff(0, 3)

Write = Callable[[Collection[dict[str, Any]]], object]


class Way(enum.Enum):
    """With what a consumer handles its messages."""

    RAW = "raw"
    SAFERETRY = "saferetry"


@dataclass(frozen=True, slots=True)
class Message:
    """One message and what its handler does.

    Attributes:
        uri: of the server, or of the proxy before it.
        options: of the client, as a consumer would give them.
        database: name of the database written to.
        collection: name of the collection written to.
        write: the handler's body; it makes its documents anew in every execution, as a handler does that builds them
            from the message.
        log: hears the client's commands.
        budget: seconds the consumer may take for it. The raw one knows no such thing.
        elsewhere: handles it in processes that can be killed, given the way; None: it is handled here.
    """

    uri: str
    options: dict[str, Any]
    database: str
    collection: str
    write: Write
    log: CommandLog
    budget: float
    elsewhere: Callable[[Way], Ending] | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How the handling of one message ended.

    Attributes:
        executions: times the handler's body was started.
        seconds: from the message's arrival until the consumer went on.
        seen: what the consumer saw, for people: "done", the name of the error, the recoverer's reason.
        left_group: whether the consumer was taken for dead meanwhile; None: it was in no group.
    """

    executions: int
    seconds: float
    seen: str
    left_group: bool | None = None


def retry_of_the_handler(pause: float = 0.0) -> Retrying:
    """Return the retry people write: of the handler, with the same pause each time, in seconds, on any driver error."""
    return Retrying(
        stop=stop_after_attempt(EXECUTIONS),
        wait=wait_fixed(pause),
        retry=retry_if_exception_type(PyMongoError),
        reraise=True,
    )


def consume_raw(message: Message) -> Ending:
    """Handle the message with `pymongo.MongoClient` and a retry of the handler, without pause, on any driver error."""
    if message.elsewhere is not None:
        return message.elsewhere(Way.RAW)
    executions = 0
    seen = "done"
    with pymongo.MongoClient[dict[str, Any]](message.uri, event_listeners=[message.log], **message.options) as client:

        def on_message() -> None:
            nonlocal executions
            executions += 1
            message.write(client[message.database][message.collection])

        begin = time.monotonic()
        try:
            retry_of_the_handler()(on_message)
        except PyMongoError as exc:
            seen = type(exc).__name__
        return Ending(executions, time.monotonic() - begin, seen)


def consume_guarded(message: Message) -> Ending:
    """Handle the message with `saferetry.MongoClient` and `@handler`.

    The attempts of one call are limited by the message's budget alone, since the lab chooses how long a fault lasts.
    """
    if message.elsewhere is not None:
        return message.elsewhere(Way.SAFERETRY)
    executions = 0
    seen = "done"
    settings = saferetry.Settings(max_attempts=100, max_executions=EXECUTIONS, backoff_cap_ms=1000)
    with saferetry.MongoClient[dict[str, Any]](
        message.uri, event_listeners=[message.log], saferetry=settings, **message.options
    ) as client:

        def dead_letter(failure: saferetry.Failure) -> None:
            nonlocal seen
            seen = f"{failure.reason}: {type(failure.exception).__name__}"

        @saferetry.handler(
            key=lambda _argument: ("lab", 0, 0),
            name="lab",
            client=client,
            budget=message.budget,
            retry_on=(PyMongoError,),
            recoverer=dead_letter,
        )
        def on_message(_argument: Message) -> None:
            nonlocal executions
            executions += 1
            message.write(client[message.database][message.collection])

        begin = time.monotonic()
        on_message(message)
        return Ending(executions, time.monotonic() - begin, seen)
