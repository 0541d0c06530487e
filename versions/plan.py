"""Which drivers, servers and Pythons are run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

PYTHONS = ("3.11", "3.13")
SERVERS = ("4.4.2", "5.0.4", "6.0.27")
DRIVERS = ("4.9.2", "4.13.2", "4.15.5", "4.16.0", "4.17.0", "4.18.3", "4.19.0")  # and the newest one there is
SUITES = ("unit", "cases", "handling", "transaction", "matrix", "input")


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """One combination, on which each suite is run; sync and async are in every suite."""

    driver: str
    server: str
    python: str

    def __str__(self) -> str:
        return f"PyMongo {self.driver}, mongod {self.server}, Python {self.python}"


def whole(drivers: Sequence[str], servers: Sequence[str], pythons: Sequence[str]) -> list[Cell]:
    """Return every combination."""
    return [Cell(*names) for names in product(drivers, servers, pythons)]


def covering(drivers: Sequence[str], servers: Sequence[str], pythons: Sequence[str]) -> list[Cell]:
    """Return a selection that an hour or two allow; each argument from oldest to newest.

    Every driver on the newest server, the Pythons taking turns; the oldest and the newest driver on every other server, with
    another Python than there. So both of them meet every server, and every Python unless there are more than two.
    """
    cells = [Cell(driver, servers[-1], pythons[place % len(pythons)]) for place, driver in enumerate(drivers)]
    ends = sorted({0, len(drivers) - 1})
    cells += [Cell(drivers[place], server, pythons[(place + 1) % len(pythons)]) for server in servers[:-1] for place in ends]
    return cells
