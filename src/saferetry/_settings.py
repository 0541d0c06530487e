"""The settings: frozen, validated as a whole, from arguments or from ``SAFERETRY_*`` variables."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, cast

from saferetry.errors import ConfigurationError

PREFIX = "SAFERETRY_"
_DAY_MS = 86_400_000


def _number(default: int | None, low: int, high: int, unit: str, meaning: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "unit": unit, "meaning": meaning, "kind": int})


def _text(default: str | None, meaning: str, *, may_be_empty: bool = True) -> Any:
    return field(default=default, metadata={"unit": "text", "meaning": meaning, "kind": str, "may_be_empty": may_be_empty})


def _switch(default: bool, meaning: str) -> Any:  # noqa: FBT001 - it declares a switch
    return field(default=default, metadata={"unit": "switch", "meaning": meaning, "kind": bool})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hold every setting; ``Settings(...)`` reads no environment, ``Settings.from_env(...)`` does.

    Times are whole milliseconds. ``docs/settings.md`` has the table with units, defaults and ranges.

    Example:
        >>> Settings(max_attempts=2).max_attempts
        2

    Raises:
        ConfigurationError: One or more values are wrong; the message names all of them.
    """

    max_attempts: int = _number(4, 1, 100, "count", "driver calls at most for one command of one call, the first counted")
    max_executions: int = _number(4, 1, 100, "count", "executions of a handler at most, the first counted")
    backoff_base_ms: int = _number(100, 1, 60_000, "ms", "upper limit of the first wait (full jitter)")
    backoff_cap_ms: int = _number(10_000, 1, _DAY_MS, "ms", "upper limit of every wait")
    budget_ms: int = _number(60_000, 1, _DAY_MS, "ms", "time that one record may take, waits and executions together")
    max_time_ms: int | None = _number(
        None, 1, _DAY_MS, "ms", "`maxTimeMS` inside records; unset: two thirds of the socket timeout, else 20,000"
    )
    socket_timeout_ms: int | None = _number(
        None, 150, _DAY_MS, "ms", "`socketTimeoutMS` of a new client whose URI and arguments give none"
    )
    cursor_max_time_ms: int | None = _number(
        None, 1, _DAY_MS, "ms", "`maxTimeMS` of cursors that fetch more than one batch; unset: no limit"
    )
    longest_execution_ms: int | None = _number(
        None,
        1,
        _DAY_MS,
        "ms",
        "longest execution for the poll arithmetic; unset: server selection + 2 x socket timeout",
    )
    max_poll_interval_ms: int | None = _number(None, 1, _DAY_MS, "ms", "`max.poll.interval.ms` of the consumer")
    max_poll_records: int | None = _number(None, 1, 1_000_000, "count", "records that one poll may return")
    group: str = _text("", "consumer group, part of a record's identity")
    epoch: str = _text("", "generation of a stream (a recreated topic), part of a record's identity")
    marker_collection: str = _text("saferetry_records", "collection of the markers", may_be_empty=False)
    marker_database: str | None = _text(
        None, "database of the markers; unset: the client's default database", may_be_empty=False
    )
    marker_ttl_s: int = _number(604_800, 1, 315_360_000, "s", "life of a marker")
    tag: bool = _switch(True, "put record and execution into the `comment` of writes (servers from 4.4)")
    cancel: bool = _switch(True, "stop what a given-up write left on the server (`killSessions` on its own session)")
    strict: bool = _switch(False, "refuse what is otherwise only warned about")
    disabled: bool = _switch(False, "kill switch: plain PyMongo")
    seed: int | None = _number(None, 0, 2**63 - 1, "number", "seed of the jitter, for tests")

    def __post_init__(self) -> None:
        """Check every value and report all faults at once."""
        faults = [fault for spec in fields(self) if (fault := _fault_of(spec, getattr(self, spec.name)))]
        if not faults and self.backoff_cap_ms < self.backoff_base_ms:
            faults.append(
                f"backoff_cap_ms is {self.backoff_cap_ms}, below backoff_base_ms {self.backoff_base_ms}: raise the cap"
            )
        if faults:
            raise ConfigurationError("saferetry settings: " + "; ".join(faults))

    @staticmethod
    def from_env(**arguments: Any) -> Settings:
        """Return settings from arguments, else ``SAFERETRY_<NAME>`` variables, else defaults.

        Raises:
            ConfigurationError: An unknown variable or argument, or bad values; all of them in one message.
        """
        variables = tuple(sorted(item for item in os.environ.items() if item[0].startswith(PREFIX)))
        return _read(variables) if not arguments else _read.__wrapped__(variables, arguments)


def _fault_of(spec: Field[Any], value: Any) -> str | None:
    rule = spec.metadata
    if value is None:
        return None if spec.default is None else f"{spec.name} is None: give a value or leave it out"
    kind = rule["kind"]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {int: "a whole number", str: "text", bool: "True or False"}[kind]
        return f"{spec.name} is {value!r}: give {wanted}"
    if kind is int and not rule["low"] <= value <= rule["high"]:
        return f"{spec.name} is {value}: give {rule['low']} to {rule['high']} ({rule['unit']})"
    if kind is str and not value and not rule["may_be_empty"]:
        return f"{spec.name} is empty: give a name"
    return None


@functools.lru_cache(maxsize=64)  # asked for every record
def _read(variables: tuple[tuple[str, str], ...], arguments: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    import environs  # noqa: PLC0415 - only here, so that importing saferetry stays quick

    kinds = {spec.name: spec.metadata["kind"] for spec in fields(Settings)}
    values = dict(arguments)
    faults = [f"unknown argument {name!r}{_nearest(name, kinds)}" for name in values if name not in kinds]
    env = environs.Env(prefix=PREFIX)
    parse: dict[type, Callable[[str], Any]] = {int: env.int, str: env.str, bool: env.bool}
    for variable, text in variables:
        name = variable.removeprefix(PREFIX).lower()
        if name not in kinds or variable != variable.upper():
            faults.append(
                f"unknown variable {variable}{_nearest(variable.upper(), [PREFIX + known.upper() for known in kinds])}"
            )
        elif name not in values:
            try:
                values[name] = parse[kinds[name]](name.upper())
            except environs.EnvError:
                wanted = {int: "a whole number", bool: "true or false"}[kinds[name]]
                faults.append(f"{variable} is {text!r}: give {wanted}")
    try:
        settings = Settings(**{name: value for name, value in values.items() if name in kinds})
    except ConfigurationError as exc:
        faults.append(str(exc).removeprefix("saferetry settings: "))
    if faults:
        raise ConfigurationError("saferetry settings: " + "; ".join(faults))
    return settings


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0)
    return f": did you mean {matches[0]}?" if matches else ""


def settings_table() -> str:
    """Return the table of all settings as Markdown, for the documentation."""
    lines = ["| name | variable | unit | default | range | meaning |", "|---|---|---|---|---|---|"]
    words = {None: "unset", True: "true", False: "false", "": "empty"}
    for spec in fields(Settings):
        rule, name, default = spec.metadata, spec.name, cast("Any", spec.default)
        span = f"{rule['low']:,} to {rule['high']:,}" if rule["kind"] is int else ""
        shown = f"{default:,}" if rule["kind"] is int and default is not None else words.get(default, default)
        variable = PREFIX + name.upper()
        lines.append(f"| `{name}` | `{variable}` | {rule['unit']} | {shown} | {span} | {rule['meaning']} |")
    return "\n".join(lines)
