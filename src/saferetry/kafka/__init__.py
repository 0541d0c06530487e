"""For Kafka consumers: what names a message's record, the time that it may take, and partitions that are taken away."""

from saferetry.kafka._key import kafka_key
from saferetry.kafka._partitions_lost import apartitions_lost, partitions_lost
from saferetry.kafka._poll_budget import PollBudget

__all__ = ["PollBudget", "apartitions_lost", "kafka_key", "partitions_lost"]
