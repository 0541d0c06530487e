"""Mutants."""

from typing import Any

MUTANTS: dict[str, Any] = {}
