"""Tell the records in work on partitions that were taken away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from saferetry._losses import LOSSES
from saferetry._record import OPEN_RECORDS
from saferetry._seam import cancel, cancel_async, is_async

logger = logging.getLogger("saferetry")


def partitions_lost(partitions: Iterable[Any], group: str = "") -> None:
    """Tell the records in work on these partitions that they are not ours any more.

    Their further writes raise ``PartitionLostError`` before anything is sent, and a transaction is not committed. What the
    server is at work on for them is cancelled. May be called from any thread; records begun later are not concerned. Use
    it as ``on_lost`` of confluent-kafka's ``subscribe``, or in the ``on_partitions_lost`` of a listener.

    Args:
        partitions: Objects with ``topic`` and ``partition``, or pairs of them.
        group: The group in the keys of the records, as ``kafka_key`` was given it.

    Example:
        >>> partitions_lost([("orders", 3)], "orders-consumer")
    """
    for client, address in _orphans(partitions, group):
        if not is_async(client):
            cancel(client, address)


async def apartitions_lost(partitions: Iterable[Any], group: str = "") -> None:
    """Do what ``partitions_lost`` does, for records that write with an ``AsyncMongoClient``.

    Args:
        partitions: Objects with ``topic`` and ``partition``, or pairs of them.
        group: The group in the keys of the records.

    Example:
        >>> import asyncio
        >>> asyncio.run(apartitions_lost([("orders", 3)], "orders-consumer"))
    """
    orphans = _orphans(partitions, group)
    await asyncio.gather(*(cancel_async(client, address) for client, address in orphans if is_async(client)))


def _orphans(partitions: Iterable[Any], group: str) -> list[tuple[Any, Any]]:
    """Take note of the loss; return client and address of what is to be cancelled on the server."""
    orphans = []
    for topic, partition in map(_place_of, partitions):
        LOSSES.note(topic, partition, group)
        records = OPEN_RECORDS.of_partition(topic, partition, group)
        orphans += [orphan for record in records for orphan in record.orphans()]
        if records:
            logger.info("partition %s/%d was taken away with a record in work, which writes no more", topic, partition)
    return orphans


def _place_of(partition: Any) -> tuple[str, int]:
    if type(partition) is tuple:
        topic, number = partition
        return topic, number
    return partition.topic, partition.partition
