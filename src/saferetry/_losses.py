"""Which partitions were taken away from this process, so that the records begun before write no more."""

from __future__ import annotations

from saferetry._identity import RecordKey


class Losses:
    """Count, for each partition, how often it was taken away; thread-safe."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int, str], int] = {}

    def note(self, stream: str, partition: int, group: str) -> None:
        """Take note that a partition was taken away from a consumer of this group."""
        place = (stream, partition, group)
        self.counts[place] = self.counts.get(place, 0) + 1

    def count(self, key: RecordKey | None) -> int:
        """Return how often the partition of a record was taken away: another number than before means, meanwhile again."""
        if not self.counts or key is None:
            return 0
        return self.counts.get((key.stream, key.partition, key.group), 0)


LOSSES = Losses()  # of the process: a rebalance is told in one thread and a record written in another
