"""FastStream: each message is a record, and one that is not done is not acknowledged."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.kafka import KafkaBroker

from saferetry import Settings, current_record
from saferetry.errors import ConfigurationError
from saferetry.kafka import PollBudget, faststream_middleware
from saferetry.kafka._faststream import _complain
from saferetry.lab.broker import Broker
from tests.kafka.loops import BUDGET

WAIT = 20
Seen = list[tuple[str, int, int]]

pytestmark = pytest.mark.filterwarnings("ignore:AckPolicy.REJECT_ON_ERROR has the same effect:UserWarning")


async def consumed(broker: Broker, topic: str, until: int, policy: Any, **options: Any) -> Seen:
    """Consume until so many executions; the second one fails passingly, the fourth one for good."""
    seen: Seen = []
    enough = asyncio.Event()
    stream = KafkaBroker(broker.address, middlewares=[faststream_middleware(topic, retry_on=ConnectionError, **options)])
    given = {} if policy is None else {"ack_policy": policy}

    @stream.subscriber(topic, group_id=topic, auto_offset_reset="earliest", **given)  # type: ignore[untyped-decorator]  # without aiokafka's types
    async def on_order(body: str) -> None:
        record = current_record()
        assert record is not None
        assert record.key is not None
        seen.append((body, record.key.position or 0, record.execution))
        if len(seen) >= until:
            enough.set()
        if len(seen) == 2:
            raise ConnectionError
        if len(seen) == 4:
            raise ValueError

    async with stream:
        await stream.start()
        async with asyncio.timeout(WAIT):
            await enough.wait()
    return seen[:until]


@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.REJECT_ON_ERROR])
async def test_a_record_that_is_not_done_comes_again_whatever_the_policy(broker: Broker, topic: str, policy: Any) -> None:
    broker.produce_many(topic, (b"order %d" % number for number in range(4)))
    budget = PollBudget(60_000, 1, settings=BUDGET)
    seen = await consumed(broker, topic, 6, policy, budget=budget)
    assert seen == [
        ("order 0", 0, 1),
        ("order 1", 1, 1),
        ("order 1", 1, 2),  # executed again at once
        ("order 2", 2, 1),
        ("order 2", 2, 1),  # redelivered
        ("order 3", 3, 1),
    ]


async def test_an_acknowledgement_before_the_work_is_warned_of(
    broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker.produce_many(topic, (b"order %d" % number for number in range(4)))
    await consumed(broker, topic, 3, None)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING and record.name == "saferetry"]
    assert [text[:76] for text in told] == ["faststream_middleware: this subscriber acknowledges a message before it is d"]


def test_strict_refuses_it() -> None:
    with pytest.raises(ConfigurationError, match="ACK_FIRST"):
        _complain(Settings(strict=True))
