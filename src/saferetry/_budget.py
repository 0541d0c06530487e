"""The time that a record may take."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

from saferetry import _world
from saferetry.errors import ConfigurationError


class Budget:
    """Count down a record's time, from now on.

    Args:
        seconds: Time left, more than 0.
        executions: How often a handler may be executed in it at most, the first counted; None: as the settings say.
        clock: Monotonic clock in seconds.

    Example:
        >>> Budget(30).remaining() <= 30
        True

    Raises:
        ConfigurationError: ``seconds`` is no finite number above 0.
    """

    __slots__ = ("_clock", "_deadline", "executions")

    def __init__(self, seconds: float, *, executions: int | None = None, clock: Callable[[], float] | None = None) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise ConfigurationError(f"budget is a {type(seconds).__name__}: give seconds, a finite number above 0")
        if not 0 < seconds < math.inf:
            raise ConfigurationError(f"budget is {seconds}: give seconds, a finite number above 0")
        self.executions = executions
        self._clock = clock or _world.monotonic
        self._deadline = self._clock() + seconds

    def remaining(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._deadline - self._clock())

    def at_most(self, seconds: float) -> Budget:
        """Return this budget, or one that ends in so many seconds where that is sooner."""
        return self if self.remaining() <= seconds else Budget(seconds, executions=self.executions, clock=self._clock)

    def within(self, outer: Budget | None) -> Budget:
        """Return the budget that ends first, this one or the outer one, with no more executions than either allows."""
        if outer is None:
            return self
        first = outer if outer.remaining() < self.remaining() else self
        fewest = min((some.executions for some in (self, outer) if some.executions is not None), default=None)
        if first.executions == fewest:
            return first
        cut = copy.copy(first)
        cut.executions = fewest
        return cut
