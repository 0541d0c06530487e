"""What the lab found: each scenario's two rows side by side, and whether they say what they should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saferetry.lab.stage import Measurement


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scenario, played once in each way."""

    name: str
    raw: Measurement
    saferetry: Measurement

    def failures(self) -> list[str]:
        """Return what is not as it should be, a sentence each.

        The raw row must show its fault, or the scenario would prove nothing; the other one must show none.
        """
        failures = []
        if self.raw.effects == self.raw.expected:
            failures.append(f"{self.name}: raw PyMongo shows no fault ({self.raw.effects} effects, as expected)")
        if self.saferetry.effects != self.saferetry.expected:
            failures.append(f"{self.name}: saferetry had {self.saferetry.effects} effects, expected {self.saferetry.expected}")
        if self.saferetry.peak_copies > 1:
            failures.append(f"{self.name}: saferetry had {self.saferetry.peak_copies} copies in the engine at a time")
        return failures


def as_json(server: str, comparisons: Sequence[Comparison], not_played: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the file of `--json`.

    Args:
        server: the server's version.
        comparisons: in the order they were played.
        not_played: the reason of each scenario that was left out, by its name.
    """
    return {
        "server": server,
        "scenarios": [
            {"name": row.name, "raw": row.raw.as_json(), "saferetry": row.saferetry.as_json()} for row in comparisons
        ],
        "not_played": dict(not_played),
    }
