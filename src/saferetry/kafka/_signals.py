"""SIGTERM, by which whoever runs a consumer asks it to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stopping_on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at SIGTERM; signals belong to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
