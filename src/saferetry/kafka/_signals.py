"""SIGTERM, by which whoever runs a consumer asks it to stop."""

from __future__ import annotations

import asyncio
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


@contextlib.contextmanager
def stopping_on_sigterm_in_loop(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at SIGTERM; where the event loop can be told of signals."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    try:
        loop.add_signal_handler(signal.SIGTERM, stop)
    except (NotImplementedError, RuntimeError, ValueError):  # not on this system, or not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
