"""A copy of the installed driver in which one private name is another: what a release of tomorrow may be."""

from __future__ import annotations

import re
from importlib.util import cache_from_source
from pathlib import Path

import pymongo

NEW = "{}_of_tomorrow"


def copy_renaming(name: str, folder: Path) -> Path:
    """Put a copy of the package pymongo into a folder, which goes on PYTHONPATH; the copy works as the original does.

    Args:
        name: an attribute, function, class or module, renamed wherever it stands as a word.
        folder: an empty one.
    """
    source = Path(pymongo.__file__).parent
    word = re.compile(rf"\b{re.escape(name)}\b")
    changed = 0
    for file in source.rglob("*"):
        place = folder / "pymongo" / file.relative_to(source)
        if file.is_dir() or file.suffix == ".pyc":
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        text, count = word.subn(NEW.format(name), file.read_text(encoding="utf-8")) if file.suffix == ".py" else ("", 0)
        changed += count
        if file.stem == name:
            (place.with_stem(NEW.format(name))).write_text(text, encoding="utf-8")
        elif count:
            place.write_text(text, encoding="utf-8")
        else:
            _link(file, place)
    if not changed:
        raise ValueError(f"nothing in PyMongo {pymongo.version} is called {name}")
    return folder


def _link(file: Path, place: Path) -> None:
    """Put a link to a file in its place, and to what Python has compiled of it, which saves most of a start's time."""
    place.symlink_to(file)
    compiled = Path(cache_from_source(str(file)))
    if file.suffix == ".py" and compiled.exists():
        there = Path(cache_from_source(str(place)))
        there.parent.mkdir(exist_ok=True)
        there.symlink_to(compiled)
