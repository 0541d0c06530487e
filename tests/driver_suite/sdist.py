"""The driver's own test suite, of the version that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
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
    unpacking = folder / "unpacking"
    shutil.rmtree(unpacking, ignore_errors=True)
    unpacking.mkdir(parents=True)
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
    for name in KEPT:
        (source / name).rename(kept / name)
    kept.rename(suite)
    shutil.rmtree(unpacking)
    return suite
