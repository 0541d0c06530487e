"""For Kafka consumers: what names a message's record, and the time that it may take."""

from saferetry.kafka._key import kafka_key
from saferetry.kafka._poll_budget import PollBudget

__all__ = ["PollBudget", "kafka_key"]
