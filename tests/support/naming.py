"""Names that no other test has."""

from __future__ import annotations

import uuid


def random_name(prefix: str) -> str:
    """Return a name that is new in every call, fit for databases, collections and appNames."""
    return f"{prefix}_{uuid.uuid4().hex[:12]}"


def app_name() -> str:
    """Return an appName for a client, so that failpoints and $currentOp mean this client only."""
    return random_name("app")
