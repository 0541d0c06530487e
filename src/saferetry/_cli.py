"""The command line: `saferetry lab`."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from pymongo.errors import PyMongoError

try:
    import typer
    from rich.console import Console
except ImportError:
    sys.exit("saferetry lab needs typer and rich: pip install 'saferetry[lab]'")

from saferetry.lab import report
from saferetry.lab.broker import BrokerError
from saferetry.lab.comparison import as_json
from saferetry.lab.given import GivenServer, GivenServerError
from saferetry.lab.mongod import Mongod, MongodError
from saferetry.lab.processes import ProcessError
from saferetry.lab.scenarios import SCENARIOS
from saferetry.lab.server import Server
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
    uri: Annotated[
        str | None,
        typer.Option(
            help="Play on this test server instead of starting one. Better in the variable: others see a command line.",
            metavar="URI",
            envvar="LAB_URI",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers into this file.", metavar="FILE")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Play only this scenario; may be repeated. One of {', '.join(_NAMES)}.", metavar="NAME"),
    ] = None,
) -> None:
    """Bring nine faults upon one handler, with raw PyMongo and with saferetry, and count the effects.

    Exit code 0: every fault did harm with raw PyMongo and none with saferetry.
    """
    unknown = sorted(set(only or []) - set(_NAMES))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: no such scenario, there are {', '.join(_NAMES)}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json_file.absolute().parent} is no folder")
    if mongod is not None and uri is not None:
        raise typer.BadParameter("--mongod starts a server and --uri (or LAB_URI) names one: give one of them")
    scenarios = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    console = Console()
    try:
        with ExitStack() as stack:
            server = _server(mongod, uri, stack, console)
            obstacles = {scenario.name: why for scenario in scenarios if (why := scenario.obstacle(server))}
            comparisons = report.play(server, [row for row in scenarios if row.name not in obstacles], console)
            version = server.version
    except (GivenServerError, MongodError, BrokerError, ProcessError, FaultMissingError, PyMongoError) as exc:
        sys.exit(f"saferetry lab: {exc}")
    console.print(report.table(version, comparisons))
    report.not_played(console, obstacles)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(version, comparisons, obstacles), indent=2) + "\n", encoding="utf-8")
    failures = [failure for comparison in comparisons for failure in comparison.failures()]
    for failure in failures:
        console.print(failure, style="bold red")
    raise typer.Exit(1 if failures or not comparisons else 0)


def _server(mongod: Path | None, uri: str | None, stack: ExitStack, console: Console) -> Server:
    if uri is None:
        own = stack.enter_context(Mongod(mongod))
        console.print(f"mongod {own.version} at 127.0.0.1:{own.port}, folder {own.folder}")
        return own
    given = GivenServer(uri)
    console.print(f"mongod {given.version} at {given.host}:{given.port}, in databases of the lab's own, lab_...")
    if given.ignored:
        console.print(f"not used of the connection string: {', '.join(given.ignored)}; each scenario has options of its own")
    return given


def main() -> None:
    """Run the command line."""
    app()
