"""Bad input: one clear error each, and nothing of the user's in what we say."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.driving import api

__all__ = ["api"]  # both halves of PyMongo

# Stands in every document, filter, URI and password of these tests, and must stand in nothing that we say.
CANARY = "canary4111"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this process's own SAFERETRY_ variables away."""
    for name in [name for name in os.environ if name.upper().startswith("SAFERETRY_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nothing_is_logged_of_the_users(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Look at every log record of ours, down to DEBUG."""
    caplog.set_level(logging.DEBUG, "saferetry")
    yield
    for phase in ("setup", "call"):
        for entry in caplog.get_records(phase):
            assert entry.name != "saferetry" or CANARY not in entry.getMessage()


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of ours whose message has these parts and nothing of the user's."""
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value).__module__ == "saferetry.errors"
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for part in parts:
        assert part in told
    assert CANARY not in told
    assert CANARY not in repr([getattr(caught.value, name, None) for name in ("writes", "reason")])
