"""The cases run on both halves of PyMongo."""

from tests.support.driving import api, short_heartbeats

__all__ = ["api", "short_heartbeats"]
