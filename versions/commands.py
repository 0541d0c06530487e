"""Commands that must succeed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class MissingError(RuntimeError):
    """Something that a run needs could not be had."""


def output_of(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command and return what it printed.

    Raises:
        MissingError: It failed; the end of what it said is in the message.
    """
    try:
        done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise MissingError(f"{command[0]} could not be run: {exc}") from exc
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise MissingError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}")
    return done.stdout
