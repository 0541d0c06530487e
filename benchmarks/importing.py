"""What importing costs: fresh interpreters, one after another, with compiled modules."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

from benchmarks.measuring import Ratio

MODULES = ("pymongo", "saferetry")


def import_ratio(rounds: int) -> Ratio:
    """Return the processor time of importing saferetry, PyMongo included, for that of PyMongo alone."""
    ratios = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(rounds + 1):  # the first one compiles
            alone, with_ours = (_seconds(module, cache) for module in MODULES)
            if number:
                ratios.append(with_ours / alone)
    return Ratio.of(ratios)


def _seconds(module: str, cache: str) -> float:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = _of_children()
    subprocess.run([sys.executable, "-c", f"import {module}"], env=environment, check=True)  # noqa: S603 - our own interpreter
    return _of_children() - before


def _of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
