"""Which command gets which ``maxTimeMS``: facts in, milliseconds out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SHORTEST_SOCKET_TIMEOUT_MS = 150
DEFAULT_MS = 20_000  # inside records, where no socket timeout is set
LEAST_MS = 100  # what a first attempt gets although the budget is spent

# Commands that never change anything; all others count as writes.
READ_COMMANDS = frozenset(
    {"find", "getMore", "aggregate", "count", "distinct", "explain", "killCursors", "endSessions", "killSessions"}
    | {"listCollections", "listDatabases", "listIndexes", "listCommands", "collStats", "dbStats", "dbHash", "validate"}
    | {
        "hello",
        "isMaster",
        "ismaster",
        "ping",
        "buildInfo",
        "buildinfo",
        "hostInfo",
        "serverStatus",
        "connectionStatus",
    }
    | {"getParameter", "getCmdLineOpts", "getLog", "currentOp", "replSetGetStatus", "replSetGetConfig", "usersInfo"}
    | {"rolesInfo", "whatsmyuri", "top", "features", "dataSize", "refreshSessions", "startSession"}
)
_LIMITED = frozenset({"insert", "update", "delete", "findAndModify", "bulkWrite", "count", "distinct"})
_STATEMENTS = {"insert": "documents", "update": "updates", "delete": "deletes"}


@dataclass(frozen=True)
class Limits:
    """Hold a client's limits in milliseconds; None: no limit there."""

    socket_timeout_ms: int | None
    inside_ms: int
    outside_ms: int | None
    cursor_ms: int | None

    @classmethod
    def of(cls, socket_timeout_ms: int | None, max_time_ms: int | None, cursor_ms: int | None) -> Limits:
        """Return the limits that follow from a socket timeout and the settings."""
        if socket_timeout_ms is None:
            return cls(None, max_time_ms or DEFAULT_MS, None, cursor_ms)
        has_room = socket_timeout_ms >= SHORTEST_SOCKET_TIMEOUT_MS
        outside = socket_timeout_ms - max(50, socket_timeout_ms // 20) if has_room else None
        inside = max_time_ms if max_time_ms and max_time_ms < socket_timeout_ms else socket_timeout_ms * 2 // 3
        return cls(socket_timeout_ms, inside, outside, cursor_ms)


def limit_of(limits: Limits, command: Mapping[str, Any], remaining: Callable[[], float] | None) -> int | None:
    """Return the ``maxTimeMS`` for a command, or None to leave it alone.

    Args:
        limits: The client's limits.
        command: The command as the driver is about to send it.
        remaining: Returns the seconds left in the record's budget; None outside records.
    """
    name = next(iter(command))
    if name in _LIMITED:
        if remaining is None and _changes_many(name, command):
            return None
    elif "maxTimeMS" not in command and _fetches_more(name, command):
        return limits.cursor_ms
    elif not _ends_with_its_reply(name, command, inside=remaining is not None):
        return None
    given = command.get("maxTimeMS")
    own = limits.outside_ms if remaining is None else limits.inside_ms
    if given and not is_too_long(limits, given):
        own = given
    if own is None or remaining is None:
        return own
    return min(own, max(LEAST_MS, int(remaining() * 1000)))


def is_too_long(limits: Limits, given_ms: float) -> bool:
    """Whether a user's own limit cannot strike before the socket timeout does."""
    return limits.socket_timeout_ms is not None and given_ms >= limits.socket_timeout_ms


def _ends_with_its_reply(name: str, command: Mapping[str, Any], *, inside: bool) -> bool:
    if name == "find":
        return bool(command.get("singleBatch")) and not command.get("tailable")
    pipeline = command.get("pipeline")
    return name == "aggregate" and (_counts(pipeline) or (inside and writes(pipeline)))


def _changes_many(name: str, command: Mapping[str, Any]) -> bool:
    """Whether stopping the command half way would leave some documents changed and some not."""
    if name not in _STATEMENTS:
        return name == "bulkWrite"
    statements = command.get(_STATEMENTS[name])  # a bulk's statements are put in later
    if not statements or len(statements) > 1:
        return True
    return bool(name != "insert" and (statements[0].get("multi") or statements[0].get("limit") == 0))


def _fetches_more(name: str, command: Mapping[str, Any]) -> bool:
    if name == "find":
        return not command.get("singleBatch") and not command.get("tailable")
    if name != "aggregate":
        return False
    pipeline = command.get("pipeline")
    return not _counts(pipeline) and not writes(pipeline) and not _watches(pipeline)


def writes(pipeline: Any) -> bool:
    """Whether a pipeline ends in a stage that writes."""
    last = pipeline[-1] if isinstance(pipeline, (list, tuple)) and pipeline else None
    return isinstance(last, Mapping) and ("$out" in last or "$merge" in last)


def _counts(pipeline: Any) -> bool:
    """Whether it is the pipeline of count_documents: one document, no getMore."""
    return bool(isinstance(pipeline, list) and pipeline and pipeline[-1] == {"$group": {"_id": 1, "n": {"$sum": 1}}})


def _watches(pipeline: Any) -> bool:
    first = pipeline[0] if isinstance(pipeline, (list, tuple)) and pipeline else None
    return isinstance(first, Mapping) and "$changeStream" in first
