"""The Kafka parts on both halves of PyMongo."""

from tests.support.driving import api, short_heartbeats
from tests.transaction.conftest import patient, scene, sockets_closed_on_cancellation

__all__ = ["api", "patient", "scene", "short_heartbeats", "sockets_closed_on_cancellation"]
