"""Pythons with all that the tests need, and drivers that are put before theirs."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from versions.commands import MissingError, output_of

ROOT = Path(__file__).parent.parent
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def python(version: str, folder: Path) -> Path:
    """Return a Python of this version in a venv below a folder, with saferetry and what its tests need.

    This one serves where it is of that version.

    Raises:
        MissingError: There is none on PATH or of pyenv's, or the venv could not be made.
    """
    if version == _version_of(Path(sys.executable)):
        return Path(sys.executable)
    venv = folder / f"python{version}"
    made, stamp = venv / "bin" / "python", venv / ".ready"
    wanted = ROOT / "pyproject.toml"
    if not stamp.exists() or stamp.stat().st_mtime < wanted.stat().st_mtime:
        output_of([_find(version), "-m", "venv", "--clear", venv])
        output_of([made, *_PIP, "install", "--upgrade", "pip"])
        output_of(
            [
                made,
                *_PIP,
                "install",
                "--editable",
                f"{ROOT}[kafka,aiokafka,kafka-python,faststream,lab]",
                "--group",
                f"{wanted}:dev",
            ]
        )
        stamp.touch()
    return made


def _find(version: str) -> Path:
    for candidate in _candidates(version):
        if candidate.is_file() and _version_of(candidate) == version:
            return candidate
    raise MissingError(f"Python {version} is not on PATH and pyenv has none: install it, or choose others (--python)")


def _candidates(version: str) -> Iterator[Path]:
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield Path(on_path)
    yield from sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"), reverse=True)


def _version_of(executable: Path) -> str:
    try:
        return output_of([executable, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    except MissingError:
        return ""  # pyenv's shims are there for versions that are not


def newest(executable: Path) -> str:
    """Return the version of the newest PyMongo there is."""
    said = output_of([executable, *_PIP, "install", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", "pymongo"])
    return str(json.loads(said)["install"][0]["metadata"]["version"])


def driver(version: str, executable: Path, folder: Path) -> Path:
    """Return a folder with this PyMongo, to be put on PYTHONPATH; downloaded unless it is there.

    Raises:
        MissingError: It could not be downloaded, or does not come first.
    """
    there = folder / f"pymongo-{version}-python{_version_of(executable)}"
    if not there.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            target = Path(scratch) / "target"
            output_of(
                [executable, *_PIP, "install", "--no-deps", "--only-binary=:all:", "--target", target, f"pymongo=={version}"]
            )
            target.rename(there)
    return there
