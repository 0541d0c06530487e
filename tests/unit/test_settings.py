"""The settings: every one by argument and by variable, their order, and all faults told at once."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferetry import Settings
from saferetry._settings import settings_table
from saferetry.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
DAY_MS = 86_400_000

# name: default, a good value, its text in a variable
GOOD: Mapping[str, tuple[Any, Any, str]] = {
    "max_attempts": (4, 7, "7"),
    "max_executions": (4, 2, "2"),
    "backoff_base_ms": (100, 50, "50"),
    "backoff_cap_ms": (10_000, 2_000, "2000"),
    "budget_ms": (60_000, 5_000, "5000"),
    "max_time_ms": (None, 4_000, "4000"),
    "socket_timeout_ms": (None, 9_000, "9000"),
    "cursor_max_time_ms": (None, 30_000, "30000"),
    "longest_execution_ms": (None, 800, "800"),
    "max_poll_interval_ms": (None, 300_000, "300000"),
    "max_poll_records": (None, 500, "500"),
    "group": ("", "orders", "orders"),
    "epoch": ("", "2", "2"),
    "marker_collection": ("saferetry_records", "markers", "markers"),
    "marker_database": (None, "admin_db", "admin_db"),
    "marker_ttl_s": (604_800, 60, "60"),
    "tag": (True, False, "false"),
    "cancel": (True, False, "0"),
    "strict": (False, True, "true"),
    "disabled": (False, True, "1"),
    "seed": (None, 42, "42"),
}
NUMBERS = {  # name: lowest, highest
    "max_attempts": (1, 100),
    "max_executions": (1, 100),
    "backoff_base_ms": (1, 60_000),
    "backoff_cap_ms": (1, DAY_MS),
    "budget_ms": (1, DAY_MS),
    "max_time_ms": (1, DAY_MS),
    "socket_timeout_ms": (150, DAY_MS),
    "cursor_max_time_ms": (1, DAY_MS),
    "longest_execution_ms": (1, DAY_MS),
    "max_poll_interval_ms": (1, DAY_MS),
    "max_poll_records": (1, 1_000_000),
    "marker_ttl_s": (1, 315_360_000),
    "seed": (0, 2**63 - 1),
}
BESIDE: Mapping[str, dict[str, Any]] = {
    "backoff_base_ms": {"backoff_cap_ms": DAY_MS},
    "backoff_cap_ms": {"backoff_base_ms": 1},
}  # what goes with it


def variable(name: str) -> str:
    return f"SAFERETRY_{name.upper()}"


def fault_of(**arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Settings(**arguments)
    return str(caught.value)


# --- values ----------------------------------------------------------------------------------------------------------------


def test_these_are_all_settings() -> None:
    assert [field.name for field in dataclasses.fields(Settings)] == list(GOOD)


@pytest.mark.parametrize("name", GOOD)
def test_a_setting_has_its_default(name: str) -> None:
    assert getattr(Settings(), name) == GOOD[name][0]
    assert getattr(Settings.from_env(), name) == GOOD[name][0]


@pytest.mark.parametrize("name", GOOD)
def test_a_setting_is_taken_from_its_argument(name: str) -> None:
    assert getattr(Settings(**{name: GOOD[name][1]}), name) == GOOD[name][1]


@pytest.mark.parametrize("name", GOOD)
def test_a_setting_is_taken_from_its_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), GOOD[name][2])
    assert getattr(Settings.from_env(), name) == GOOD[name][1]


@pytest.mark.parametrize("name", GOOD)
def test_an_argument_goes_before_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), GOOD[name][2])
    argument = GOOD[name][0] if GOOD[name][0] is not None else _other(GOOD[name][1])
    assert getattr(Settings.from_env(**{name: argument}), name) == argument


def _other(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value + "_2"


def test_settings_made_by_hand_read_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_MAX_ATTEMPTS", "7")
    monkeypatch.setenv("SAFERETRY_NONSENSE", "1")
    assert Settings().max_attempts == 4


def test_a_variable_that_changes_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_MAX_ATTEMPTS", "7")
    assert Settings.from_env().max_attempts == 7
    monkeypatch.setenv("SAFERETRY_MAX_ATTEMPTS", "8")
    assert Settings.from_env().max_attempts == 8


def test_a_bad_variable_behind_an_argument_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_MAX_ATTEMPTS", "many")
    assert Settings.from_env(max_attempts=2).max_attempts == 2


def test_other_peoples_variables_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_ATTEMPTS", "7")
    monkeypatch.setenv("SAFERETRYING_X", "7")
    assert Settings.from_env() == Settings()


def test_settings_are_frozen_and_can_be_compared_and_hashed() -> None:
    settings = Settings(max_attempts=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.max_attempts = 3  # type: ignore[misc]  # that is the test
    assert settings == Settings(max_attempts=2)
    assert hash(settings) == hash(Settings(max_attempts=2))


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        Settings(2)  # type: ignore[call-arg]  # that is the test


def test_importing_does_not_import_environs() -> None:
    script = "import saferetry, sys; sys.exit('environs' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], check=False, env=environment).returncode == 0


# --- faults ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERS)
def test_the_ends_of_a_range_are_inside(name: str) -> None:
    for value in NUMBERS[name]:
        arguments: dict[str, Any] = {**BESIDE.get(name, {}), name: value}
        assert getattr(Settings(**arguments), name) == value


@pytest.mark.parametrize("name", NUMBERS)
def test_beyond_a_range_the_setting_and_the_range_are_named(name: str) -> None:
    low, high = NUMBERS[name]
    for value in (low - 1, high + 1, -5):
        fault = fault_of(**{name: value})
        assert f"{name} is {value}: give {low} to {high}" in fault


@pytest.mark.parametrize("value", ["7", 7.0, True, b"7", [7], float("nan")])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_must_be_a_whole_number(name: str, value: Any) -> None:
    assert f"{name} is {value!r}: give a whole number" in fault_of(**{name: value})


@pytest.mark.parametrize("value", ["true", 1, 0])
@pytest.mark.parametrize("name", ["tag", "cancel", "strict", "disabled"])
def test_a_switch_must_be_true_or_false(name: str, value: Any) -> None:
    assert f"{name} is {value!r}: give True or False" in fault_of(**{name: value})


@pytest.mark.parametrize("value", [7, b"x", True])
@pytest.mark.parametrize("name", ["group", "epoch", "marker_collection", "marker_database"])
def test_a_text_must_be_text(name: str, value: Any) -> None:
    assert f"{name} is {value!r}: give text" in fault_of(**{name: value})


@pytest.mark.parametrize("name", ["marker_collection", "marker_database"])
def test_a_name_must_not_be_empty(name: str) -> None:
    assert f"{name} is empty: give a name" in fault_of(**{name: ""})


@pytest.mark.parametrize("name", [name for name, (default, _, _) in GOOD.items() if default is not None])
def test_none_is_not_a_way_to_say_default(name: str) -> None:
    assert f"{name} is None: give a value or leave it out" in fault_of(**{name: None})


def test_the_cap_must_not_be_below_the_base() -> None:
    assert "backoff_cap_ms is 10, below backoff_base_ms 100: raise the cap" in fault_of(backoff_cap_ms=10)


def test_all_bad_values_are_in_one_error() -> None:
    fault = fault_of(max_attempts=0, budget_ms=-1, tag="yes", group=3, marker_collection="")
    assert all(name in fault for name in ("max_attempts", "budget_ms", "tag", "group", "marker_collection"))


def test_all_bad_variables_and_arguments_are_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_MAX_ATTEMPTS", "many")
    monkeypatch.setenv("SAFERETRY_BUDGET_MS", "-1")
    monkeypatch.setenv("SAFERETRY_STRICT", "perhaps")
    monkeypatch.setenv("SAFERETRY_NONSENSE", "1")
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_env(max_executions=0, colour="red")
    for part in ("SAFERETRY_MAX_ATTEMPTS", "budget_ms is -1", "SAFERETRY_STRICT", "SAFERETRY_NONSENSE", "max_executions is 0"):
        assert part in str(caught.value)
    assert "unknown argument 'colour'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("max_attempts", "many", "a whole number"),
        ("max_attempts", "", "a whole number"),
        ("max_attempts", "4.5", "a whole number"),
        ("strict", "perhaps", "true or false"),
        ("strict", "", "true or false"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named_with_what_is_wanted(
    name: str, text: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable(name), text)
    with pytest.raises(ConfigurationError, match=f"{variable(name)} is .*: give {wanted}"):
        Settings.from_env()


def test_an_empty_variable_is_an_empty_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFERETRY_GROUP", "")
    assert Settings.from_env().group == ""


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("SAFERETRY_MAX_ATTEMPT", "SAFERETRY_MAX_ATTEMPTS"),
        ("SAFERETRY_BUDGET", "SAFERETRY_BUDGET_MS"),
        ("SAFERETRY_MAXTIMEMS", "SAFERETRY_MAX_TIME_MS"),
        ("SAFERETRY_STRICTLY", "SAFERETRY_STRICT"),
        ("SAFERETRY_", "SAFERETRY_TAG"),
    ],
)
def test_an_unknown_variable_names_the_nearest(unknown: str, nearest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(unknown, "1")
    with pytest.raises(ConfigurationError, match=rf"unknown variable {unknown}: did you mean {nearest}\?"):
        Settings.from_env()


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown argument 'max_attempt': did you mean max_attempts\?"):
        Settings.from_env(max_attempt=3)


@pytest.mark.parametrize("unknown", ["SAFERETRY_max_attempts", "SAFERETRY_Group", "SAFERETRY_strict"])
def test_a_variable_in_other_letters_is_an_unknown_one(unknown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(unknown, "1")
    with pytest.raises(ConfigurationError, match=f"unknown variable {unknown}: did you mean {unknown.upper()}"):
        Settings.from_env()


def test_an_argument_that_cannot_be_hashed_is_a_bad_value_like_others() -> None:
    with pytest.raises(ConfigurationError, match=r"max_attempts is .*: give a whole number"):
        Settings.from_env(max_attempts=[3])


def test_an_argument_is_not_taken_for_an_equal_one_of_another_type() -> None:
    assert Settings.from_env(max_attempts=1).max_attempts == 1
    with pytest.raises(ConfigurationError, match="max_attempts is True: give a whole number"):
        Settings.from_env(max_attempts=True)


@given(name=st.sampled_from(sorted(NUMBERS)), value=st.integers(-(2**70), 2**70))
def test_a_number_is_taken_as_it_is_or_refused(name: str, value: int) -> None:
    low, high = NUMBERS[name]
    arguments: dict[str, Any] = {**BESIDE.get(name, {}), name: value}
    if low <= value <= high:
        assert getattr(Settings(**arguments), name) == value
    else:
        assert name in fault_of(**arguments)


# --- the table of the documentation ----------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_setting() -> None:
    rows = settings_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(GOOD)
    assert [row.split("`")[3] for row in rows] == [variable(name) for name in GOOD]


@pytest.mark.parametrize("name", NUMBERS)
def test_the_table_tells_the_range(name: str) -> None:
    low, high = NUMBERS[name]
    row = next(line for line in settings_table().splitlines() if f"`{name}`" in line.split("|")[1])
    assert f"| {low:,} to {high:,} |" in row


def test_the_documentation_holds_this_very_table() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    table = page.split("<!-- settings-table:begin -->\n")[1].split("\n<!-- settings-table:end -->")[0]
    assert table == settings_table(), "docs/settings.md is out of date: run `make docs`"
