"""`saferetry lab`: its numbers are measured, and its exit code means what it says."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from typer.testing import CliRunner

from saferetry import _cli
from saferetry.lab import report
from saferetry.lab.comparison import Comparison, as_json
from saferetry.lab.consuming import Ending, Message, consume_guarded, consume_raw
from saferetry.lab.poll_interval import POLL_INTERVAL
from saferetry.lab.redelivery import TAKEOVER_SECONDS
from saferetry.lab.scenarios import SCENARIOS, Scenario
from saferetry.lab.stage import FaultMissingError, Measurement
from tests.support import Mongod

RawClient = MongoClient[dict[str, Any]]

DOUBLED = Measurement(executions=2, sends=3, peak_copies=1, effects=2, expected=1, seconds=1.0127767, seen="done")
ONCE = replace(DOUBLED, executions=1, effects=1)


def scenario(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


def test_the_scenarios_are_those_of_the_file_format() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert names == [
        "slow-insert",
        "lost-reply-inc",
        "lost-reply-insert",
        "lost-reply-bulk",
        "update-many",
        "orphan",
        "crash-redelivery",
        "takeover",
        "poll-interval",
    ]


@pytest.mark.parametrize(
    ("raw", "guarded", "failures"),
    [
        (DOUBLED, ONCE, []),
        (DOUBLED, replace(ONCE, peak_copies=0), []),
        (ONCE, ONCE, ["x: raw PyMongo shows no fault (1 effects, as expected)"]),
        (DOUBLED, DOUBLED, ["x: saferetry had 2 effects, expected 1"]),
        (DOUBLED, replace(ONCE, effects=0), ["x: saferetry had 0 effects, expected 1"]),
        (DOUBLED, replace(ONCE, peak_copies=2), ["x: saferetry had 2 copies in the engine at a time"]),
    ],
)
def test_a_comparison_fails_unless_raw_shows_its_fault_and_saferetry_none(
    raw: Measurement, guarded: Measurement, failures: list[str]
) -> None:
    assert Comparison("x", raw, guarded).failures() == failures


def test_the_file_has_the_six_numbers_of_each_row_and_the_server() -> None:
    numbers = {"executions": 2, "sends": 3, "peak_copies": 1, "effects": 2, "expected": 1, "seconds": 1.013}
    assert as_json("6.0.5", [Comparison("x", DOUBLED, ONCE)], {"y": "why"}) == {
        "server": "6.0.5",
        "scenarios": [{"name": "x", "raw": numbers, "saferetry": {**numbers, "executions": 1, "effects": 1}}],
        "not_played": {"y": "why"},
    }


def test_a_raw_retry_behind_a_slow_insert_makes_several_copies_at_a_time(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("slow-insert").measure(mongod, admin, consume_raw)
    assert measured.effects >= 2
    assert measured.peak_copies >= 2
    assert measured.sends > measured.executions


def test_saferetry_behind_a_slow_insert_keeps_to_one_copy(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("slow-insert").measure(mongod, admin, consume_guarded)
    assert (measured.effects, measured.peak_copies, measured.executions, measured.seen) == (1, 1, 1, "done")


def test_a_raw_retry_of_an_update_many_changes_documents_again(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("update-many").measure(mongod, admin, consume_raw)
    assert (measured.executions, measured.sends) == (4, 4)
    assert measured.effects > 0


def test_saferetry_sends_an_update_many_once_and_asks_the_recoverer(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("update-many").measure(mongod, admin, consume_guarded)
    assert (measured.sends, measured.effects, measured.seen) == (1, 0, "refused: RetryRefusedError")


def test_a_raw_consumer_doubles_the_record_of_one_that_was_killed(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("crash-redelivery").measure(mongod, admin, consume_raw)
    assert (measured.executions, measured.effects, measured.seen) == (2, 2, "done")


def test_saferetry_does_a_redelivered_record_once(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("crash-redelivery").measure(mongod, admin, consume_guarded)
    assert (measured.executions, measured.effects, measured.seen) == (2, 1, "done")


def test_a_raw_transaction_is_blocked_by_the_locks_of_a_dead_one(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("takeover").measure(mongod, admin, consume_raw)
    assert measured.effects == 0
    assert measured.seconds >= TAKEOVER_SECONDS - 1


def test_saferetry_takes_the_record_over_at_once(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("takeover").measure(mongod, admin, consume_guarded)
    assert (measured.executions, measured.effects, measured.seen) == (2, 1, "done")
    assert measured.seconds < 1


def test_raw_retries_with_pauses_cost_the_consumer_its_group(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("poll-interval").measure(mongod, admin, consume_raw)
    assert (measured.effects, measured.left_group) == (1, True)
    assert measured.seconds > POLL_INTERVAL


def test_saferetry_gives_a_record_up_before_the_next_poll_is_due(mongod: Mongod, admin: RawClient) -> None:
    measured = scenario("poll-interval").measure(mongod, admin, consume_guarded)
    assert (measured.effects, measured.left_group, measured.seen) == (0, False, "NotPrimaryError")
    assert measured.seconds < POLL_INTERVAL
    assert measured.as_json()["left_group"] is False


def test_a_scenario_ends_the_transactions_of_its_dead(mongod: Mongod, admin: RawClient) -> None:
    scenario("takeover").measure(mongod, admin, consume_raw)
    idle = admin.admin.aggregate([{"$currentOp": {"allUsers": True, "idleSessions": True}}])
    assert not [document for document in idle if document.get("appName", "").startswith("lab_")]


def test_without_a_kafka_client_the_command_says_what_to_install(mongod: Mongod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    run = CliRunner().invoke(_cli.app, ["lab", "--mongod", str(mongod.binary), "--only", "crash-redelivery"])
    assert run.exit_code == 1
    assert "pip install 'saferetry[lab]'" in run.output


def test_a_fault_that_does_not_take_place_is_no_result(mongod: Mongod, admin: RawClient) -> None:
    def consume_nothing(message: Message) -> Ending:
        return Ending(executions=0, seconds=0.0, seen="done")

    with pytest.raises(FaultMissingError, match="0 replies were lost, not 2"):
        scenario("lost-reply-insert").measure(mongod, admin, consume_nothing)


def test_a_scenario_leaves_no_database_behind(mongod: Mongod, admin: RawClient) -> None:
    scenario("lost-reply-inc").measure(mongod, admin, consume_raw)
    assert not [name for name in admin.list_database_names() if name.startswith("lab_")]


def test_the_command_plays_what_was_asked_for_and_writes_the_file(mongod: Mongod, tmp_path: Path) -> None:
    file = tmp_path / "lab.json"
    only = ["--only", "lost-reply-inc", "--only", "lost-reply-bulk"]
    run = CliRunner().invoke(_cli.app, ["lab", "--mongod", str(mongod.binary), "--json", str(file), *only])
    assert run.exit_code == 0, run.output
    found = json.loads(file.read_text())
    assert found["server"] == mongod.version
    assert [row["name"] for row in found["scenarios"]] == ["lost-reply-inc", "lost-reply-bulk"]
    assert {row["saferetry"]["effects"] for row in found["scenarios"]} == {1}
    assert {row["raw"]["effects"] for row in found["scenarios"]} == {2}


def test_the_command_fails_when_saferetry_does_no_better(mongod: Mongod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "consume_guarded", consume_raw)
    run = CliRunner().invoke(_cli.app, ["lab", "--mongod", str(mongod.binary), "--only", "lost-reply-inc"])
    assert run.exit_code == 1
    assert "lost-reply-inc: saferetry had 2 effects, expected 1" in run.output


def test_the_command_fails_when_raw_pymongo_shows_no_fault(mongod: Mongod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "consume_raw", consume_guarded)
    run = CliRunner().invoke(_cli.app, ["lab", "--mongod", str(mongod.binary), "--only", "lost-reply-inc"])
    assert run.exit_code == 1
    assert "lost-reply-inc: raw PyMongo shows no fault" in run.output


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--only", "lost-reply"], 2, "no such scenario"),
        (["--mongod", "/nowhere/mongod"], 1, "saferetry lab: /nowhere/mongod is no file"),
        (["--json", "/nowhere/lab.json"], 2, "/nowhere is no folder"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: list[str], exit_code: int, message: str) -> None:
    run = CliRunner().invoke(_cli.app, ["lab", *arguments])
    assert run.exit_code == exit_code
    assert message in run.output


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "typer", None)
        with pytest.raises(SystemExit, match=r"pip install 'saferetry\[lab\]'"):
            importlib.reload(_cli)
    importlib.reload(_cli)
