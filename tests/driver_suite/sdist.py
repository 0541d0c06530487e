"""The driver's own test suite, of the version that is installed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pymongo

KEPT = ("test", "pyproject.toml")  # without the sdist's pymongo/, which would stand in front of the installed one


def unpack(folder: Path) -> Path:
    """Return where the suite is unpacked inside `folder`, downloaded with pip the first time.

    Raises:
        subprocess.CalledProcessError: pip could not get it.
    """
    suite = folder / f"pymongo-{pymongo.version}"
    if suite.exists():
        return suite
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:  # several processes may be at it
        unpacking = Path(name)
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
                *("--no-deps", "--no-binary", "pymongo", "--dest", str(unpacking), f"pymongo=={pymongo.version}"),
            ],
            check=True,
        )
        (archive,) = unpacking.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(unpacking, filter="data")
        source = unpacking / archive.name.removesuffix(".tar.gz")
        kept = unpacking / "kept"
        kept.mkdir()
        for part in KEPT:
            (source / part).rename(kept / part)
        try:
            kept.rename(suite)
        except OSError:
            if not suite.exists():  # else another process was first
                raise
    return suite
