"""The Kafka parts on both halves of PyMongo, and a Kafka cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from saferetry.lab.broker import Broker
from tests.support import random_name
from tests.support.driving import api, short_heartbeats
from tests.transaction.conftest import patient, scene, sockets_closed_on_cancellation

__all__ = ["api", "patient", "scene", "short_heartbeats", "sockets_closed_on_cancellation"]


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """librdkafka's mock cluster: one broker, topics of four partitions."""
    with Broker() as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    """The name of a topic of this test's own."""
    return random_name("topic")
