"""Wait for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(predicate: Callable[[], T], timeout: float = 10.0, interval: float = 0.01) -> T:
    """Call `predicate` until what it returns is true, and return that.

    Args:
        predicate: looked at every `interval` seconds.
        timeout: seconds after which the test fails.

    Raises:
        AssertionError: it was never true; the last value is in the message.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true after {timeout:g} s, last value {value!r}")
        time.sleep(interval)
