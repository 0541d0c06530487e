"""For Kafka consumers: keys, the time between two polls, partitions that are taken away, dead letters, loops."""

from saferetry.kafka._arun import arun
from saferetry.kafka._dead_letter import dead_letter, dead_letter_collection
from saferetry.kafka._faststream import faststream_middleware
from saferetry.kafka._key import kafka_key
from saferetry.kafka._partitions_lost import apartitions_lost, partitions_lost
from saferetry.kafka._poll_budget import PollBudget
from saferetry.kafka._run import run
from saferetry.kafka._source import run_source

__all__ = [
    "PollBudget",
    "apartitions_lost",
    "arun",
    "dead_letter",
    "dead_letter_collection",
    "faststream_middleware",
    "kafka_key",
    "partitions_lost",
    "run",
    "run_source",
]
