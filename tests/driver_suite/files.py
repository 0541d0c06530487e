"""Which files of the driver's suite are about what saferetry touches."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

RELEVANT = (
    "bulk",
    "change_stream",
    "client",
    "client_bulk_write",
    "client_context",
    "collation",
    "collection*",
    "command_logging",
    "command_monitoring",
    "comment",
    "causal_consistency",
    "create_entities",
    "crud_*",
    "csot",
    "cursor",
    "custom_types",
    "database",
    "default_exports",
    "examples",
    "fork",
    "grid_file",
    "gridfs*",
    "index_management",
    "load_balancer",
    "logger",
    "monitoring",
    "operation_id_retry",
    "pooling",
    "raw_bson*",
    "read_concern",
    "read_preferences",
    "read_write_concern_spec",
    "results",
    "retryable_*",
    "run_command",
    "session",
    "sessions_unified",
    "threads",
    "transactions*",
    "typing*",
    "unified_format",
    "versioned_api*",
    "write_concern",
    "async_cancellation",
    "async_contextvars_reset",
    "concurrency",
)
"""Without "test_" and ".py"; in test/ and in test/asynchronous/."""

IN_RECORD = ("crud_*", "collection*", "bulk", "gridfs*", "grid_file", "custom_types")
"""Those of them that run inside a record too."""

SLICE = (
    "test/test_collection.py",
    "test/test_custom_types.py",
    "test/asynchronous/test_bulk.py",
    "test/asynchronous/test_gridfs.py",
)
"""What continuous integration runs."""


def find_files(suite: Path, wanted: Sequence[str] = ()) -> list[str]:
    """Return the relevant files of an unpacked suite, or those of `wanted`: paths, or names as in `RELEVANT`."""
    there = sorted(str(path.relative_to(suite)) for path in (suite / "test").rglob("test_*.py"))
    found = [file for file in there if file in wanted or is_one_of(file, wanted or RELEVANT)]
    return sorted(found, key=lambda file: (file.count("/"), file))


def is_one_of(file: str, names: Sequence[str]) -> bool:
    """Whether a file goes by one of some names."""
    path = Path(file)
    known_folder = str(path.parent) in ("test", "test/asynchronous")
    return known_folder and any(fnmatch.fnmatchcase(path.stem.removeprefix("test_"), name) for name in names)
