"""What older drivers cannot do, so that the tests on them ask for no more."""

from __future__ import annotations

import pymongo
import pytest

# pymongo 4.9, asynchronous/network.py, wait_for_read: `select` for up to 0.5 s at each turn of the event loop, so that
# timers and cancellations come late while any reply is waited for. From 4.10 the loop itself waits (network_layer.py).
BLOCKS_THE_EVENT_LOOP = pymongo.version_tuple[:2] < (4, 10)
PATIENCE = {"socketTimeoutMS": 30_000} if BLOCKS_THE_EVENT_LOOP else {}  # outside records, beside a task that is cancelled
HELD_SECONDS = 3.0 if BLOCKS_THE_EVENT_LOOP else 0.6  # what a server holds for so long a coroutine can have given up before

BINDS_SESSIONS = pymongo.version_tuple[:2] >= (4, 17)
needs_bound_sessions = pytest.mark.skipif(not BINDS_SESSIONS, reason="ClientSession.bind came with PyMongo 4.17")
