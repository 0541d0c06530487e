"""The time that a record may take."""

from __future__ import annotations

import math
from collections.abc import Callable

from saferetry import _world
from saferetry.errors import ConfigurationError


class Budget:
    """Count down a record's time, from now on.

    Args:
        seconds: Time left, more than 0.
        clock: Monotonic clock in seconds.

    Example:
        >>> Budget(30).remaining() <= 30
        True

    Raises:
        ConfigurationError: ``seconds`` is no finite number above 0.
    """

    __slots__ = ("_clock", "_deadline")

    def __init__(self, seconds: float, *, clock: Callable[[], float] = _world.monotonic) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise ConfigurationError(f"budget is a {type(seconds).__name__}: give seconds, a finite number above 0")
        if not 0 < seconds < math.inf:
            raise ConfigurationError(f"budget is {seconds}: give seconds, a finite number above 0")
        self._clock = clock
        self._deadline = clock() + seconds

    def remaining(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._deadline - self._clock())

    def within(self, outer: Budget | None) -> Budget:
        """Return the budget that ends first, this one or the outer one."""
        return outer if outer is not None and outer.remaining() < self.remaining() else self
