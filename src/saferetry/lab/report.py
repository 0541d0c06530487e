"""The lab on a terminal: progress while it plays, one table at the end. Needs rich (extra `lab`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pymongo import MongoClient
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from saferetry.lab.comparison import Comparison
from saferetry.lab.consuming import consume_guarded, consume_raw
from saferetry.lab.scenarios import Scenario
from saferetry.lab.server import Server
from saferetry.lab.stage import Measurement


def play(server: Server, scenarios: Sequence[Scenario], console: Console) -> list[Comparison]:
    """Play each scenario twice and show how far it is.

    Args:
        server: a running server.
        scenarios: in the order to play them.
        console: where progress is shown.

    Raises:
        FaultMissingError: a fault did not take place.
    """
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    comparisons = []
    with MongoClient[dict[str, Any]](server.uri) as admin, progress:
        task = progress.add_task("", total=2 * len(scenarios))
        for scenario in scenarios:
            progress.update(task, description=f"{scenario.name}: raw PyMongo")
            raw = scenario.measure(server, admin, consume_raw)
            progress.update(task, advance=1, description=f"{scenario.name}: saferetry")
            guarded = scenario.measure(server, admin, consume_guarded)
            progress.advance(task)
            comparison = Comparison(scenario.name, raw, guarded)
            comparisons.append(comparison)
            _print_lines(console, scenario, comparison)
    return comparisons


def table(server: str, comparisons: Sequence[Comparison]) -> Table:
    """Return the table: two lines for each scenario.

    Args:
        server: the server's version.
        comparisons: in the order of the lines.
    """
    result = Table(
        title=f"mongod {server}: raw PyMongo with a retry of four executions, and saferetry",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # with 80 columns no heading is cut
        show_edge=False,
    )
    result.add_column("scenario", no_wrap=True)
    result.add_column("with", no_wrap=True)
    for heading in ("execu-\ntions", "sends", "peak\ncopies", "effects", "expec-\nted", "seconds"):
        result.add_column(heading, justify="right")
    for row in comparisons:
        result.add_row(row.name, "raw", *_cells(row.raw))
        result.add_row("", "saferetry", *_cells(row.saferetry), end_section=True)
    return result


def not_played(console: Console, obstacles: Mapping[str, str]) -> None:
    """Say what was left out, so that nobody takes it for proved.

    Args:
        console: where it is shown.
        obstacles: the reason of each, by the scenario's name.
    """
    for name, reason in obstacles.items():
        console.print(f"NOT PLAYED: {name}: {escape(reason)}", style="bold yellow", soft_wrap=True)


def _cells(numbers: Measurement) -> list[str]:
    return [
        str(numbers.executions),
        str(numbers.sends),
        str(numbers.peak_copies),
        _effects(numbers),
        str(numbers.expected),
        f"{numbers.seconds:.2f}",
    ]


def _print_lines(console: Console, scenario: Scenario, comparison: Comparison) -> None:
    lines = [f"[bold]{scenario.name}[/bold]: {scenario.about}"]
    for way, numbers in (("raw PyMongo", comparison.raw), ("saferetry", comparison.saferetry)):
        lines.append(f"  {way:12} {_effects(numbers)} (expected {numbers.expected}); the consumer saw: {escape(numbers.seen)}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _effects(numbers: Measurement) -> str:
    style = "green" if numbers.effects == numbers.expected else "red"
    return f"[{style}]{numbers.effects}[/{style}]"
