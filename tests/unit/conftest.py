"""The unit tests need no server, no network and no environment."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Few examples, so that all unit tests together stay below 5 s; HYPOTHESIS_PROFILE=long looks harder.
for profile, examples in (("unit", 30), ("long", 20_000)):
    settings.register_profile(
        profile, max_examples=examples, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this process's own SAFERETRY_ variables away."""
    for name in [name for name in os.environ if name.upper().startswith("SAFERETRY_")]:
        monkeypatch.delenv(name)
