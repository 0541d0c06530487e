"""Which command gets which ``maxTimeMS``: every command shape inside and outside records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from bson.son import SON
from hypothesis import given
from hypothesis import strategies as st

from saferetry._limits import DEFAULT_MS, LEAST_MS, READ_COMMANDS, Limits, is_too_long, limit_of, writes

Command = Mapping[str, Any]
COUNTING = [{"$match": {}}, {"$group": {"_id": 1, "n": {"$sum": 1}}}]

ONE: Mapping[str, Command] = {  # what one statement does is done or not
    "insert_one": {"insert": "c", "documents": [{"_id": 1}]},
    "update_one": {"update": "c", "updates": [{"q": {}, "u": {}, "multi": False}]},
    "replace_one": {"update": "c", "updates": [{"q": {}, "u": {}, "multi": False, "upsert": True}]},
    "delete_one": {"delete": "c", "deletes": [{"q": {}, "limit": 1}]},
    "find_one_and_update": {"findAndModify": "c", "query": {}, "update": {}},
    "estimated_document_count": {"count": "c"},
    "distinct": {"distinct": "c", "key": "a"},
    "count_documents": {"aggregate": "c", "pipeline": COUNTING, "cursor": {}},
    "find_one": {"find": "c", "filter": {}, "limit": 1, "singleBatch": True},
}
MANY: Mapping[str, Command] = {  # stopped half way they leave some documents changed and some not
    "update_many": {"update": "c", "updates": [{"q": {}, "u": {}, "multi": True}]},
    "delete_many": {"delete": "c", "deletes": [{"q": {}, "limit": 0}]},
    "a bulk, whose statements are put in later": {"insert": "c", "ordered": True},
    "a bulk of updates": {"update": "c", "ordered": True},
    "several inserts": {"insert": "c", "documents": [{"_id": 1}, {"_id": 2}]},
    "several updates": {"update": "c", "updates": [{"q": {}, "u": {}}, {"q": {}, "u": {}}]},
    "client.bulk_write": {"bulkWrite": 1, "ops": [], "nsInfo": []},
    "$out": {"aggregate": "c", "pipeline": [{"$match": {}}, {"$out": "d"}], "cursor": {}},
    "$merge": {"aggregate": "c", "pipeline": [{"$merge": {"into": "d"}}], "cursor": {}},
    "$merge of a database": {"aggregate": 1, "pipeline": [{"$currentOp": {}}, {"$merge": "d"}], "cursor": {}},
}
CURSORS: Mapping[str, Command] = {
    "find": {"find": "c", "filter": {}},
    "find with a limit": {"find": "c", "filter": {}, "limit": 10},
    "aggregate": {"aggregate": "c", "pipeline": [{"$match": {}}], "cursor": {}},
    "aggregate of a database": {"aggregate": 1, "pipeline": [{"$currentOp": {}}], "cursor": {}},
    "an empty pipeline": {"aggregate": "c", "pipeline": [], "cursor": {}},
}
NEVER: Mapping[str, Command] = {
    "tailable find": {"find": "c", "filter": {}, "tailable": True, "awaitData": True},
    "change stream": {"aggregate": "c", "pipeline": [{"$changeStream": {}}, {"$match": {}}], "cursor": {}},
    "getMore": {"getMore": 1, "collection": "c"},
    "commit": {"commitTransaction": 1},
    "abort": {"abortTransaction": 1},
    "createIndexes": {"createIndexes": "c", "indexes": []},
    "create": {"create": "c"},
    "drop": {"drop": "c"},
    "dropDatabase": {"dropDatabase": 1},
    "dropIndexes": {"dropIndexes": "c", "index": "*"},
    "renameCollection": {"renameCollection": "a.b", "to": "a.c"},
    "listCollections": {"listCollections": 1},
    "listIndexes": {"listIndexes": "c"},
    "ping": {"ping": 1},
    "hello": {"hello": 1},
    "killSessions": {"killSessions": []},
    "replSetStepDown": {"replSetStepDown": 10},
    "explain": {"explain": {"find": "c"}},
}
LIMITS = Limits.of(9_000, None, None)
OUTSIDE = 8_550  # 9,000 less 5 %


def ids(*tables: Mapping[str, Command]) -> pytest.MarkDecorator:
    shapes = {name: command for table in tables for name, command in table.items()}
    return pytest.mark.parametrize("command", shapes.values(), ids=shapes.keys())


@ids(ONE, MANY)
def test_inside_a_record_writes_and_reads_of_one_reply_get_two_thirds_of_the_socket_timeout(command: Command) -> None:
    assert limit_of(LIMITS, command, lambda: 60.0) == 6_000


@ids(ONE)
def test_outside_a_single_statement_gets_the_socket_timeout_less_five_percent(command: Command) -> None:
    assert limit_of(LIMITS, command, None) == OUTSIDE


@ids(MANY)
def test_outside_a_write_of_many_documents_is_left_alone(command: Command) -> None:
    assert limit_of(LIMITS, command, None) is None


@ids(CURSORS)
def test_a_cursor_is_left_alone_inside_and_outside(command: Command) -> None:
    assert limit_of(LIMITS, command, lambda: 60.0) is None
    assert limit_of(LIMITS, command, None) is None


@ids(CURSORS)
def test_a_cursor_gets_cursor_max_time_ms_where_that_is_set(command: Command) -> None:
    limits = Limits.of(9_000, None, 5_000)
    assert limit_of(limits, command, lambda: 60.0) == 5_000
    assert limit_of(limits, command, None) == 5_000


@ids(CURSORS)
def test_a_cursor_keeps_the_users_own_limit(command: Command) -> None:
    assert limit_of(Limits.of(9_000, None, 5_000), {**command, "maxTimeMS": 7_000}, lambda: 60.0) is None


@ids(NEVER)
@pytest.mark.parametrize("remaining", [None, 60.0])
def test_administration_and_waiting_cursors_never_get_a_limit(command: Command, remaining: float | None) -> None:
    assert limit_of(Limits.of(9_000, 4_000, 5_000), command, left(remaining)) is None


@ids(ONE, MANY)
def test_without_a_socket_timeout_a_record_limits_to_20_seconds(command: Command) -> None:
    assert DEFAULT_MS == 20_000
    assert limit_of(Limits.of(None, None, None), command, lambda: 60.0) == DEFAULT_MS


@ids(ONE, MANY, CURSORS)
def test_without_a_socket_timeout_nothing_is_limited_outside(command: Command) -> None:
    assert limit_of(Limits.of(None, 4_000, None), command, None) is None


def left(seconds: float | None) -> Callable[[], float] | None:
    """Return a budget's clock; None: outside records."""
    return None if seconds is None else lambda: seconds


@pytest.mark.parametrize(
    ("socket_ms", "max_time_ms", "inside"),
    [
        (9_000, None, 6_000),
        (9_000, 4_000, 4_000),
        (9_000, 8_999, 8_999),
        (9_000, 9_000, 6_000),  # cannot strike before the socket timeout does
        (9_000, 50_000, 6_000),
        (150, None, 100),
        (None, None, 20_000),
        (None, 4_000, 4_000),
        (None, 90_000, 90_000),
    ],
)
def test_max_time_ms_holds_inside_records_where_it_is_below_the_socket_timeout(
    socket_ms: int | None, max_time_ms: int | None, inside: int
) -> None:
    assert limit_of(Limits.of(socket_ms, max_time_ms, None), ONE["insert_one"], lambda: 600.0) == inside


@pytest.mark.parametrize("socket_ms", [1, 50, 149])
@ids(ONE, MANY, CURSORS)
def test_outside_no_limit_fits_below_a_short_socket_timeout(command: Command, socket_ms: int) -> None:
    assert limit_of(Limits.of(socket_ms, None, None), command, None) is None


@pytest.mark.parametrize(
    ("socket_ms", "outside"), [(150, 100), (400, 350), (1_000, 950), (1_020, 969), (9_000, 8_550), (60_000, 57_000)]
)
def test_outside_the_margin_is_five_percent_but_at_least_50_ms(socket_ms: int, outside: int) -> None:
    assert limit_of(Limits.of(socket_ms, None, None), ONE["find_one"], None) == outside


def test_max_time_ms_is_for_records_only() -> None:
    assert limit_of(Limits.of(9_000, 4_000, None), ONE["insert_one"], None) == OUTSIDE


@pytest.mark.parametrize(
    ("remaining", "limit"), [(60.0, 6_000), (6.0, 6_000), (5.0, 5_000), (0.25, 250), (0.1, LEAST_MS), (0.0, LEAST_MS)]
)
def test_inside_a_record_the_limit_shrinks_to_the_budget_but_not_below_100_ms(remaining: float, limit: int) -> None:
    assert limit_of(LIMITS, ONE["insert_one"], left(remaining)) == limit


@pytest.mark.parametrize(
    ("given_ms", "remaining", "limit"),
    [
        (100, 60.0, 100),
        (100, None, 100),
        (8_999, 60.0, 8_999),  # above ours, below the socket timeout: his word
        (8_999, None, 8_999),
        (9_000, 60.0, 6_000),
        (9_000, None, OUTSIDE),
        (90_000, 60.0, 6_000),
        (8_000, 5.0, 5_000),  # the budget is above all
        (0, 60.0, 6_000),  # 0 means no limit, which cannot strike before the socket timeout does
    ],
)
def test_the_users_lower_limit_wins_and_one_that_cannot_strike_is_lowered(
    given_ms: int, remaining: float | None, limit: int
) -> None:
    assert limit_of(LIMITS, {**ONE["find_one"], "maxTimeMS": given_ms}, left(remaining)) == limit


def test_outside_a_write_of_many_documents_keeps_the_users_own_limit() -> None:
    assert limit_of(LIMITS, {**MANY["update_many"], "maxTimeMS": 100}, None) is None


@pytest.mark.parametrize(
    ("socket_ms", "given_ms", "too_long"), [(9_000, 8_999, False), (9_000, 9_000, True), (None, 10**9, False)]
)
def test_a_limit_is_too_long_from_the_socket_timeout_on(socket_ms: int | None, given_ms: int, too_long: bool) -> None:
    assert is_too_long(Limits.of(socket_ms, None, None), given_ms) is too_long


@given(
    socket_ms=st.integers(150, 86_400_000),
    max_time_ms=st.none() | st.integers(1, 86_400_000),
    command=st.sampled_from([*ONE.values(), *MANY.values()]),
    given_ms=st.none() | st.integers(1, 86_400_000),
    remaining=st.none() | st.floats(0, 86_400),
)
def test_an_injected_limit_is_above_zero_and_below_the_socket_timeout(
    socket_ms: int, max_time_ms: int | None, command: Command, given_ms: int | None, remaining: float | None
) -> None:
    sent = {**command, **({} if given_ms is None else {"maxTimeMS": given_ms})}
    limit = limit_of(Limits.of(socket_ms, max_time_ms, None), sent, left(remaining))
    assert limit is None or 0 < limit < socket_ms


@given(
    command=st.sampled_from([*ONE.values(), *MANY.values()]),
    given_ms=st.integers(1, 8_999),
    remaining=st.none() | st.floats(0, 600),
)
def test_the_users_lower_limit_is_never_raised(command: Command, given_ms: int, remaining: float | None) -> None:
    limit = limit_of(LIMITS, {**command, "maxTimeMS": given_ms}, left(remaining))
    assert limit is None or limit <= given_ms


# --- what writes -----------------------------------------------------------------------------------------------------------

PIPELINES: Sequence[tuple[Any, bool]] = (
    ([{"$out": "d"}], True),
    ([{"$match": {}}, {"$merge": {"into": "d"}}], True),
    (({"$out": "d"},), True),
    ([SON([("$out", "d")])], True),
    ([{"$match": {"$out": 1}}], False),
    ([{"$match": {}}], False),
    ([], False),
    (None, False),
    ("$out", False),
    ([None], False),
)


@pytest.mark.parametrize(("pipeline", "does_write"), PIPELINES)
def test_a_pipeline_writes_if_its_last_stage_does(pipeline: Any, does_write: bool) -> None:
    assert writes(pipeline) is does_write


@pytest.mark.parametrize(
    "name",
    [
        "insert",
        "update",
        "delete",
        "findAndModify",
        "findandmodify",
        "bulkWrite",
        "create",
        "createIndexes",
        "drop",
        "dropDatabase",
        "dropIndexes",
        "renameCollection",
        "collMod",
        "mapReduce",
        "eval",
        "applyOps",
        "convertToCapped",
        "compact",
        "commitTransaction",
        "createUser",
        "unheardOf",
    ],
)
def test_a_command_that_is_not_known_to_read_counts_as_a_write(name: str) -> None:
    assert name not in READ_COMMANDS
