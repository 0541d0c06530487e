"""A driver that calls its private parts otherwise is refused by name and version, before anything is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tests.drivers.renaming import copy_renaming
from tests.support import Proxy

ROOT = Path(__file__).parent.parent.parent
NAMES = [
    "_ensure_session",
    "_run_operation",
    "_encrypter",
    "_apply_to",
    "_implicit",
    "_server_session",
    "_client",
    "inc_transaction_id",
    "transaction_id",
    "session_id",
    "mark_dirty",
    "last_use",
    "dirty",
    "generation",
    "timed_out",
    "is_mongos",
    "is_repl",
    "supports_sessions",
    "max_wire_version",
    "_Bulk",
    "_AsyncBulk",
    "ops",
    "_add_to_bulk",
    "_doc",
    "_csot",
    "get_timeout",
    "remaining",
]
if pymongo.version_tuple[:2] >= (4, 17):
    NAMES.append("_get_bound_session")


@pytest.fixture
def plain(proxy: Callable[..., Proxy]) -> Proxy:
    """Counts what plain PyMongo sends."""
    return proxy(mode="delay", times=1_000)


@pytest.fixture
def guarded(proxy: Callable[..., Proxy]) -> Proxy:
    """Counts what saferetry sends."""
    return proxy(mode="delay", times=1_000)


@pytest.fixture(autouse=True)
def emptied(admin: Any) -> Iterator[None]:
    """Take away what the program has written."""
    yield
    admin.test.c.drop()


def connect(driver: Path | None, plain: Proxy, guarded: Proxy, **variables: str) -> dict[str, Any]:
    """Let a program connect with another driver."""
    path = [str(folder) for folder in (driver, ROOT / "src", ROOT) if folder]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "tests.drivers.connecting", plain.uri(), guarded.uri()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found["file"]).is_relative_to(driver or Path(pymongo.__file__).parent)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_driver_that_calls_it_otherwise_is_refused_and_gets_nothing_to_send(
    name: str, tmp_path: Path, plain: Proxy, guarded: Proxy
) -> None:
    found = connect(copy_renaming(name, tmp_path), plain, guarded)
    for answer in found["answers"].values():
        assert answer.startswith(f"PyMongo {pymongo.version} lacks what saferetry builds on: ")
        assert name in answer.split(" builds on: ")[1].split("; nothing was sent")[0]
    assert guarded.hits == 0
    assert plain.hits >= 3, "the copy does not work by itself, so that it says nothing"


def test_the_program_that_shows_it_connects_with_the_driver_as_it_is(plain: Proxy, guarded: Proxy) -> None:
    found = connect(None, plain, guarded)
    assert set(found["answers"].values()) == {"connected"}
    assert guarded.hits >= 3


def test_disabled_goes_on_with_such_a_driver(tmp_path: Path, plain: Proxy, guarded: Proxy) -> None:
    found = connect(copy_renaming("_csot", tmp_path), plain, guarded, SAFERETRY_DISABLED="1")
    assert set(found["answers"].values()) == {"connected"}
    assert guarded.hits >= 3
