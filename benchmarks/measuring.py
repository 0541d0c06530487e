"""Rounds in which every way handles as many records, in random order, so that a busy machine disturbs all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.ways import Way


@dataclass(frozen=True)
class Cost:
    """What a round of one way took, in seconds."""

    wall: float
    cpu: float  # of this process


@dataclass(frozen=True)
class Ratio:
    """A ratio with its noise: the median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """Return the ratio of some rounds, at least two."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


class Rounds:
    """The rounds of all ways, side by side."""

    def __init__(self, names: Sequence[str]) -> None:
        self._costs: dict[str, list[Cost]] = {name: [] for name in names}

    def add(self, name: str, cost: Cost) -> None:
        """Add a way's part of the current round."""
        self._costs[name].append(cost)

    def speed(self, name: str, baseline: str) -> Ratio:
        """Return how many records a way handles for one of the baseline, compared round by round."""
        pairs = zip(self._costs[name], self._costs[baseline], strict=True)
        return Ratio.of([other.wall / own.wall for own, other in pairs])

    def cpu(self, name: str, baseline: str) -> Ratio:
        """Return how much of the client's processor time a way takes for that of the baseline."""
        pairs = zip(self._costs[name], self._costs[baseline], strict=True)
        return Ratio.of([own.cpu / other.cpu for own, other in pairs])

    def milliseconds(self, name: str, records: int) -> float:
        """Return what one record took, at the median."""
        return statistics.median(cost.wall for cost in self._costs[name]) / records * 1000


def measure(ways: Sequence[Way], *, rounds: int, records: int, threads: int, rng: random.Random) -> Rounds:
    """Return the rounds of all ways; one more, at first, warms up."""
    result = Rounds([way.name for way in ways])
    with ThreadPoolExecutor(threads) as pool:
        for number in range(rounds + 1):
            for way in rng.sample(ways, len(ways)):
                cost = _round(way, pool, records, threads)
                if number:
                    result.add(way.name, cost)
    return result


def _round(way: Way, pool: ThreadPoolExecutor, records: int, threads: int) -> Cost:
    def handle(count: int) -> None:
        for _ in range(count):
            way.handle(way.take())

    wall, cpu = time.perf_counter(), time.process_time()
    for done in [pool.submit(handle, records // threads) for _ in range(threads)]:
        done.result()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)
