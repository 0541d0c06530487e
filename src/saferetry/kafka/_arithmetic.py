"""What fits between two polls: facts in, numbers and sentences out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PollArithmetic:
    """Hold the terms of ``records x (longest execution x executions + waits) < interval``; times in milliseconds.

    Attributes:
        interval: ``max.poll.interval.ms``.
        records: Records that one poll may return.
        longest: The longest that one execution takes.
        first_wait: Upper limit of the wait before the second execution; it doubles with each.
        longest_wait: Upper limit of every wait.
    """

    interval: int
    records: int
    longest: int
    first_wait: int
    longest_wait: int

    def waits(self, executions: int) -> int:
        """Return the upper limit of the waits between so many executions."""
        return sum(min(self.longest_wait, self.first_wait * 2**place) for place in range(executions - 1))

    def needed(self, executions: int) -> int:
        """Return the longest that a poll's records take, each executed so often."""
        return self.records * (self.longest * executions + self.waits(executions))

    def fits(self, executions: int) -> bool:
        """Whether a poll's records, each executed so often, are done before the next poll is due."""
        return self.needed(executions) < self.interval

    def most_executions(self, wanted: int) -> int:
        """Return how many of the wanted executions fit; 0: not even one."""
        return max((executions for executions in range(1, wanted + 1) if self.fits(executions)), default=0)

    def sum_of(self, executions: int) -> str:
        """Return the sum, to be read."""
        return (
            f"{self.records:,} records x ({self.longest:,} ms x {executions} executions + {self.waits(executions):,} ms of "
            f"waits) = {self.needed(executions):,} ms, max.poll.interval.ms {self.interval:,}"
        )

    def remedy(self, executions: int) -> str:
        """Return what would make so many executions fit."""
        records = (self.interval - 1) // (self.longest * executions + self.waits(executions))
        fewer = f"let a poll return {records:,} records at most, " if records else ""
        return f"{fewer}raise max.poll.interval.ms above {self.needed(executions):,}, or shorten the client's time limits"
