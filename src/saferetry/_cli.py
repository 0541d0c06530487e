"""The command line: `saferetry lab`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ImportError:
    sys.exit("saferetry lab needs typer and rich: pip install 'saferetry[lab]'")

from saferetry.lab import report
from saferetry.lab.broker import BrokerError
from saferetry.lab.comparison import as_json
from saferetry.lab.mongod import Mongod, MongodError
from saferetry.lab.processes import ProcessError
from saferetry.lab.scenarios import SCENARIOS
from saferetry.lab.stage import FaultMissingError

_NAMES = [scenario.name for scenario in SCENARIOS]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Make trying again safe: see what a retry does to a MongoDB database, without and with saferetry."""


@app.command()
def lab(
    mongod: Annotated[
        Path | None,
        typer.Option(help="The mongod to start; else LAB_MONGOD, the one on PATH, the one in the wheel.", metavar="PATH"),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers into this file.", metavar="FILE")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Play only this scenario; may be repeated. One of {', '.join(_NAMES)}.", metavar="NAME"),
    ] = None,
) -> None:
    """Start a mongod, bring eight faults upon one handler, with raw PyMongo and with saferetry, and count the effects.

    Exit code 0: every fault did harm with raw PyMongo and none with saferetry.
    """
    unknown = sorted(set(only or []) - set(_NAMES))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: no such scenario, there are {', '.join(_NAMES)}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json_file.absolute().parent} is no folder")
    scenarios = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    console = Console()
    try:
        with Mongod(mongod) as server:
            console.print(f"mongod {server.version} at 127.0.0.1:{server.port}, folder {server.folder}")
            comparisons = report.play(server, scenarios, console)
            version = server.version
    except (MongodError, BrokerError, ProcessError, FaultMissingError) as exc:
        sys.exit(f"saferetry lab: {exc}")
    console.print(report.table(version, comparisons))
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(version, comparisons), indent=2) + "\n", encoding="utf-8")
    failures = [failure for comparison in comparisons for failure in comparison.failures()]
    for failure in failures:
        console.print(failure, style="bold red")
    raise typer.Exit(1 if failures else 0)


def main() -> None:
    """Run the command line."""
    app()
