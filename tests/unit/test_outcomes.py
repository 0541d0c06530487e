"""What became of a write: the table rule by rule, DESIGN section 5 sentence by sentence, and laws over all facts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from bson.errors import InvalidDocument
from hypothesis import given
from hypothesis import strategies as st
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    CollectionInvalid,
    DocumentTooLarge,
    DuplicateKeyError,
    ExecutionTimeout,
    InvalidOperation,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
    WriteError,
    WTimeoutError,
)

from saferetry._outcomes import (
    DATA_CODES,
    REJECTED_CODES,
    RULES,
    SHUTDOWN_CODES,
    STOPPED_CODES,
    SUCCESS,
    Facts,
    Outcome,
    Reading,
    Signal,
    is_overload,
    read,
    settle,
)

NOT_SENT, NOT_APPLIED, APPLIED = Outcome.NOT_SENT, Outcome.NOT_APPLIED, Outcome.APPLIED
UNKNOWN, UNVERIFIABLE = Outcome.UNKNOWN, Outcome.UNVERIFIABLE

SELECTION, ENCODING, NETWORK = Reading(Signal.SELECTION), Reading(Signal.ENCODING), Reading(Signal.NETWORK)
WTIMEOUT, INTERRUPTED = Reading(Signal.WRITE_CONCERN, 64), Reading(Signal.OTHER)
OVERLOAD_LABELS = frozenset({"RetryableError", "SystemOverloadedError"})
OVERLOAD = Reading(Signal.COMMAND_ERROR, 462, OVERLOAD_LABELS)


def command_error(code: int | None) -> Reading:
    return Reading(Signal.COMMAND_ERROR, code)


def write_error(code: int, changed: int = 0) -> Reading:
    return Reading(Signal.WRITE_ERROR, code, changed=changed)


def deciding_rule(facts: Facts) -> str:
    return next(name for name, holds, _ in RULES if holds(facts))


# --- the table, rule by rule -----------------------------------------------------------------------------------------------

ROWS: Sequence[tuple[str, Facts]] = (
    ("applied stays applied", Facts(NETWORK, known=APPLIED)),
    ("applied stays applied", Facts(SELECTION, sent=0, known=APPLIED)),
    ("acknowledged", Facts(SUCCESS)),
    ("acknowledged", Facts(SUCCESS, statements=7)),
    ("acknowledged", Facts(SUCCESS, multi=True, numbered=False)),
    ("acknowledged", Facts(SUCCESS, sent=0, foreign=True)),
    ("the duplicate is our own first copy", Facts(write_error(11000), sent=2, own_duplicate=True)),
    (
        "the duplicate is our own first copy",
        Facts(write_error(11000), unsettled=1, known=UNKNOWN, numbered=False, own_duplicate=True),
    ),
    ("applied, durability unknown", Facts(WTIMEOUT)),
    ("applied, durability unknown", Facts(WTIMEOUT, sent=2, unsettled=2, known=UNKNOWN)),
    ("applied, durability unknown", Facts(WTIMEOUT, sent=0, foreign=True)),
    ("applied, durability unknown (multi)", Facts(WTIMEOUT, multi=True, numbered=False)),
    ("no server was selected", Facts(SELECTION, sent=0)),
    ("no server was selected", Facts(SELECTION, sent=0, acknowledged=False)),
    ("no server was selected", Facts(SELECTION, sent=0, foreign=True)),
    ("could not be encoded", Facts(ENCODING)),
    ("could not be encoded", Facts(ENCODING, sent=0)),
    ("could not be encoded", Facts(ENCODING, sent=0, acknowledged=False)),
    ("nobody was asked", Facts(SUCCESS, sent=0, acknowledged=False)),
    ("nobody was asked", Facts(NETWORK, sent=0, acknowledged=False)),
    ("a session of the user's", Facts(NETWORK, sent=0, foreign=True)),
    ("a session of the user's", Facts(write_error(11000), sent=0, foreign=True)),
    ("never left", Facts(NETWORK, sent=0)),
    ("never left", Facts(INTERRUPTED, sent=0)),
    ("an earlier send is open", Facts(SELECTION, sent=0, unsettled=2, known=UNKNOWN)),
    ("an earlier send is open", Facts(NETWORK, sent=0, unsettled=1, known=UNKNOWN)),
    ("rejected by overload", Facts(OVERLOAD)),
    ("rejected by overload", Facts(OVERLOAD, sent=3, multi=True, numbered=False)),
    ("rejected before it ran", Facts(command_error(13))),
    ("rejected before it ran", Facts(command_error(13), multi=True, numbered=False)),
    ("rejected before it ran", Facts(command_error(40415), statements=9)),
    ("ran, result lost", Facts(command_error(217), sent=2)),
    ("a newer number started", Facts(command_error(225), sent=2)),
    ("a newer number started", Facts(command_error(217), sent=2, statements=2)),
    ("multi, stopped somewhere", Facts(command_error(50), multi=True, numbered=False)),
    ("multi, stopped somewhere", Facts(NETWORK, multi=True, numbered=False)),
    ("multi, stopped somewhere", Facts(write_error(121), multi=True, numbered=False)),
    ("several statements, stopped by the server", Facts(command_error(50), statements=2)),
    ("several statements, stopped by the server", Facts(write_error(11601, changed=1), statements=2)),
    ("several statements, some refused, some applied", Facts(write_error(11000, changed=1), statements=2)),
    ("several statements, all refused", Facts(write_error(11000), statements=2)),
    ("several statements, all refused", Facts(write_error(11000), sent=2, statements=2)),
    ("the data is at fault", Facts(write_error(11000))),
    ("the data is at fault", Facts(write_error(121), sent=2)),
    ("the data is at fault", Facts(command_error(11000), sent=2)),  # findAndModify
    ("shutdown", Facts(command_error(11600))),
    ("shutdown", Facts(command_error(91))),
    ("one statement, one send, one mongod", Facts(command_error(50))),
    ("one statement, one send, one mongod", Facts(command_error(112))),
    ("one statement, one send, one mongod", Facts(write_error(12345))),
    ("not listed", Facts(NETWORK)),
    ("not listed", Facts(INTERRUPTED)),
    ("not listed", Facts(command_error(50), sent=2)),
    ("not listed", Facts(command_error(189), sent=2)),
    ("not listed", Facts(command_error(12345), statements=2)),
)


@pytest.mark.parametrize(("rule", "facts"), ROWS, ids=[f"{n}-{rule}" for n, (rule, _) in enumerate(ROWS)])
def test_this_rule_decides(rule: str, facts: Facts) -> None:
    assert deciding_rule(facts) == rule
    assert settle(facts) is next(outcome for name, _, outcome in RULES if name == rule)


def test_every_rule_has_a_row() -> None:
    assert {rule for rule, _ in ROWS} == {name for name, _, _ in RULES}


def test_the_names_of_the_rules_are_unique() -> None:
    assert len({name for name, _, _ in RULES}) == len(RULES)


def test_the_last_rule_holds_always_and_says_unknown() -> None:
    _, holds, outcome = RULES[-1]
    assert holds(Facts(SUCCESS))
    assert outcome is UNKNOWN


# --- DESIGN section 5, sentence by sentence --------------------------------------------------------------------------------

SENTENCES: Mapping[str, Sequence[tuple[Facts, Outcome]]] = {
    "NOT_SENT: a session of ours was lent and nothing was sent on it": (
        (Facts(SELECTION, sent=0), NOT_SENT),
        (Facts(NETWORK, sent=0), NOT_SENT),
        (Facts(NETWORK, sent=0, multi=True, numbered=False), NOT_SENT),
        (Facts(INTERRUPTED, sent=0), NOT_SENT),
    ),
    "with sessions not ours only ServerSelectionTimeoutError is NOT_SENT": (
        (Facts(SELECTION, sent=0, foreign=True), NOT_SENT),
        (Facts(NETWORK, sent=0, foreign=True), UNKNOWN),
        (Facts(INTERRUPTED, sent=0, foreign=True), UNKNOWN),
    ),
    "with w:0 only ServerSelectionTimeoutError is NOT_SENT": (
        (Facts(SELECTION, sent=0, acknowledged=False), NOT_SENT),
        (Facts(NETWORK, sent=0, acknowledged=False), UNVERIFIABLE),
        (Facts(SUCCESS, sent=0, acknowledged=False), UNVERIFIABLE),
    ),
    "an encoding error is NOT_APPLIED": (
        (Facts(ENCODING), NOT_APPLIED),
        (Facts(ENCODING, sent=0), NOT_APPLIED),
        (Facts(ENCODING, statements=5), NOT_APPLIED),
        (Facts(ENCODING, multi=True, numbered=False), NOT_APPLIED),
    ),
    "an encoding error after an open send leaves that send open": (
        (Facts(ENCODING, unsettled=1, known=UNKNOWN), UNKNOWN),
        (Facts(ENCODING, sent=2), UNKNOWN),
    ),
    "a reply with ok: 1 is APPLIED": (
        (Facts(SUCCESS), APPLIED),
        (Facts(SUCCESS, sent=2), APPLIED),
        (Facts(SUCCESS, unsettled=2, known=UNKNOWN), APPLIED),
        (Facts(SUCCESS, multi=True, numbered=False), APPLIED),
    ),
    "with a writeConcernError, code 50 included, it is APPLIED": tuple(
        (Facts(Reading(Signal.WRITE_CONCERN, code), sent=sent), APPLIED)
        for code in (50, 64, 91, 100, 189, 11600, None)
        for sent in (1, 2)
    ),
    "an error reply to the only send of one statement on a mongod is NOT_APPLIED": tuple(
        (Facts(reading(code)), NOT_APPLIED)
        for reading in (command_error, write_error)
        for code in (50, 112, 121, 189, 10107, 11000, 11601, 11602, 13435, 16500, 99999)
    ),
    "shutdown is UNKNOWN": tuple((Facts(command_error(code), sent=sent), UNKNOWN) for code in (91, 11600) for sent in (1, 2)),
    "a data error to a resend settles it NOT_APPLIED": tuple(
        (Facts(reading(code), sent=sent, unsettled=unsettled, known=known), NOT_APPLIED)
        for reading in (command_error, write_error)
        for code in (11000, 121)
        for sent, unsettled, known in ((2, 0, NOT_SENT), (1, 1, UNKNOWN))
    ),
    "a data error to a resend without number settles nothing": (
        (Facts(write_error(11000), unsettled=1, known=UNKNOWN, numbered=False), UNKNOWN),
        (Facts(write_error(11000), unsettled=1, known=UNKNOWN, numbered=False, statements=2), UNKNOWN),
    ),
    "50, 112 and 1160x to a resend leave it UNKNOWN": tuple(
        (Facts(command_error(code), sent=sent, unsettled=unsettled, known=known), UNKNOWN)
        for code in (50, 112, 11600, 11601, 11602)
        for sent, unsettled, known in ((2, 0, NOT_SENT), (1, 1, UNKNOWN))
    ),
    "multi is UNKNOWN": tuple(
        (Facts(reading, multi=True, numbered=False), UNKNOWN)
        for reading in (command_error(50), command_error(112), command_error(189), write_error(121), NETWORK)
    ),
    "several statements stopped by 50 or 1160x are UNKNOWN": tuple(
        (Facts(reading(code), statements=3), UNKNOWN)
        for reading in (command_error, write_error)
        for code in (50, 11600, 11601, 11602)
    ),
    "behind a mongos an error reply that is no data error is UNKNOWN": tuple(
        (Facts(reading(code), statements=statements, mongos=True), UNKNOWN)
        for reading in (command_error, write_error)
        for code in (6, 7, 50, 89, 112, 189, 10107, 99999)
        for statements in (1, 2)
    ),
    "more than one send and the last failed otherwise: UNKNOWN whatever it says": tuple(
        (Facts(reading, sent=2), UNKNOWN)
        for reading in (command_error(189), command_error(10107), command_error(99999), write_error(99999), OVERLOAD)
    ),
    "a network error after a send is UNKNOWN": (
        (Facts(NETWORK), UNKNOWN),
        (Facts(NETWORK, sent=2), UNKNOWN),
        (Facts(NETWORK, sent=0, unsettled=1, known=UNKNOWN), UNKNOWN),
    ),
    # PyMongo 4.17 and newer put these labels on every connection that cannot be opened (pool_shared.py,
    # _handle_connection_error): the send before it, whose reply was lost, is no less open for that.
    "a connection that could not be opened after a send leaves it UNKNOWN": (
        (Facts(Reading(Signal.NETWORK, labels=OVERLOAD_LABELS)), UNKNOWN),
        (Facts(Reading(Signal.NETWORK, labels=OVERLOAD_LABELS), sent=2), UNKNOWN),
        (Facts(Reading(Signal.NETWORK, labels=OVERLOAD_LABELS), multi=True, numbered=False), UNKNOWN),
    ),
    "cancellation is UNKNOWN": ((Facts(INTERRUPTED), UNKNOWN), (Facts(INTERRUPTED, sent=2), UNKNOWN)),
    "what is not listed is UNKNOWN": (
        (Facts(command_error(99999), statements=2), UNKNOWN),
        (Facts(command_error(None), sent=2), UNKNOWN),
    ),
}
SENTENCE_ROWS = [(text, facts, outcome) for text, rows in SENTENCES.items() for facts, outcome in rows]


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [(facts, outcome) for _, facts, outcome in SENTENCE_ROWS],
    ids=[f"{n}-{text}" for n, (text, _, _) in enumerate(SENTENCE_ROWS)],
)
def test_the_design_says(facts: Facts, outcome: Outcome) -> None:
    assert settle(facts) is outcome


@pytest.mark.parametrize("code", sorted(DATA_CODES))
def test_a_data_error_is_not_applied_even_behind_a_mongos(code: int) -> None:
    assert settle(Facts(write_error(code), mongos=True)) is NOT_APPLIED


@pytest.mark.parametrize("code", sorted(REJECTED_CODES))
def test_a_rejected_command_whose_first_send_is_open_is_unknown(code: int) -> None:
    assert settle(Facts(command_error(code), sent=2)) is UNKNOWN


def test_no_code_is_in_two_sets_that_contradict_each_other() -> None:
    assert not DATA_CODES & STOPPED_CODES
    assert not REJECTED_CODES & STOPPED_CODES
    assert not DATA_CODES & REJECTED_CODES
    assert SHUTDOWN_CODES < STOPPED_CODES


# --- laws ------------------------------------------------------------------------------------------------------------------

CODES = st.sampled_from(
    [
        *(None, 6, 11, 13, 20, 24, 50, 64, 89, 91, 112, 115, 121, 189, 217, 225, 462),
        *(10107, 11000, 11600, 11601, 11602, 16500, 40415, 99999),
    ]
)
LABELS = st.frozensets(st.sampled_from(["RetryableWriteError", "RetryableError", "SystemOverloadedError", "NoWritesPerformed"]))
REPLIES = (Signal.COMMAND_ERROR, Signal.WRITE_ERROR, Signal.WRITE_CONCERN)


@st.composite
def reachable_facts(draw: st.DrawFn) -> Facts:
    """Draw facts that a driver call can leave: what is not seen is not counted, what is open is unknown."""
    seen = draw(st.sampled_from(["ours", "ours", "ours", "foreign", "w:0"]))
    signals = [signal for signal in Signal if seen != "w:0" or signal not in REPLIES]
    signal = draw(st.sampled_from(signals))
    unsettled = draw(st.integers(0, 3)) if seen == "ours" else 0
    if seen != "ours" or signal is Signal.SELECTION:
        sent = 0
    else:
        sent = draw(st.integers(0 if signal in (Signal.NETWORK, Signal.ENCODING, Signal.OTHER) else 1, 3))
    known = UNKNOWN if unsettled else draw(st.sampled_from([NOT_SENT, NOT_SENT, NOT_APPLIED, APPLIED]))
    multi = draw(st.booleans())
    code = draw(CODES) if signal in REPLIES else None
    return Facts(
        Reading(signal, code, draw(LABELS), draw(st.integers(0, 2)) if signal is Signal.WRITE_ERROR else 0),
        sent=sent,
        unsettled=unsettled,
        known=known,
        statements=1 if multi else draw(st.integers(1, 3)),
        multi=multi,
        numbered=not multi and draw(st.booleans()),
        acknowledged=seen != "w:0",
        foreign=seen == "foreign",
        mongos=draw(st.booleans()),
        own_duplicate=code == 11000 and not multi and sent + unsettled > 1 and draw(st.booleans()),
    )


@given(reachable_facts())
def test_once_applied_always_applied(facts: Facts) -> None:
    if facts.known is APPLIED:
        assert settle(facts) is APPLIED


@given(reachable_facts())
def test_a_network_error_after_a_send_is_never_taken_for_nothing_happened(facts: Facts) -> None:
    may_have_left = facts.sent + facts.unsettled > 0 or facts.foreign or not facts.acknowledged
    if facts.reading.signal in (Signal.NETWORK, Signal.OTHER) and may_have_left:
        assert settle(facts) not in (NOT_SENT, NOT_APPLIED)


@given(reachable_facts())
def test_without_acknowledgement_nothing_is_ever_applied_or_unknown(facts: Facts) -> None:
    if not facts.acknowledged and facts.known is not APPLIED:
        assert settle(facts) in (NOT_SENT, NOT_APPLIED, UNVERIFIABLE)


@given(st.builds(Facts, reading=st.just(WTIMEOUT), acknowledged=st.just(False), sent=st.integers(0, 2)))
def test_w0_is_not_applied_whatever_the_driver_may_raise_one_day(facts: Facts) -> None:
    assert settle(facts) is not APPLIED


@given(reachable_facts())
def test_an_unlisted_code_to_a_resend_is_unknown(facts: Facts) -> None:
    unlisted = facts.reading.code == 99999 and facts.reading.signal is Signal.COMMAND_ERROR
    is_open = facts.known is not APPLIED and not is_overload(facts.reading) and not facts.foreign
    if unlisted and is_open and facts.sent + facts.unsettled > 1:
        assert settle(facts) is UNKNOWN


@given(reachable_facts())
def test_not_sent_means_that_no_send_was_seen_and_none_is_open(facts: Facts) -> None:
    if settle(facts) is NOT_SENT:
        assert facts.sent == facts.unsettled == 0


@given(reachable_facts())
def test_applied_needs_a_reply_or_an_earlier_one(facts: Facts) -> None:
    if settle(facts) is APPLIED and facts.known is not APPLIED:
        assert facts.reading.signal in (*REPLIES, Signal.SUCCESS)


@given(reachable_facts())
def test_a_multi_write_that_failed_with_a_send_open_is_unknown(facts: Facts) -> None:
    if facts.multi and facts.unsettled and facts.reading.signal is not Signal.SUCCESS:
        assert settle(facts) is UNKNOWN


@given(reachable_facts())
def test_behind_a_mongos_only_the_data_or_a_rejection_says_not_applied(facts: Facts) -> None:
    reading = facts.reading
    listed = reading.code in DATA_CODES | REJECTED_CODES or is_overload(reading)
    if facts.mongos and reading.signal in REPLIES and not listed:
        assert settle(facts) is not NOT_APPLIED


def test_effects_are_what_may_have_changed_something() -> None:
    assert [outcome for outcome in Outcome if outcome.is_effect] == [APPLIED, UNKNOWN, UNVERIFIABLE]


# --- what the driver's exceptions say --------------------------------------------------------------------------------------


def labelled(exc: Any, *labels: str) -> Any:
    for label in labels:
        exc._add_error_label(label)
    return exc


def bulk_error(
    write_errors: Sequence[Mapping[str, Any]] = (),
    concern_errors: Sequence[Mapping[str, Any]] = (),
    **counts: int,
) -> BulkWriteError:
    details = {"writeErrors": list(write_errors), "writeConcernErrors": list(concern_errors), "upserted": []}
    zeros = dict.fromkeys(("nInserted", "nUpserted", "nMatched", "nModified", "nRemoved"), 0)
    return BulkWriteError({**details, **zeros, **counts})


RETRYABLE = frozenset({"RetryableWriteError"})
READINGS: Mapping[str, tuple[BaseException, Reading]] = {
    "no server": (ServerSelectionTimeoutError("no primary"), SELECTION),
    "connection lost": (AutoReconnect("connection closed"), NETWORK),
    "connection lost, labelled": (
        labelled(AutoReconnect("connection closed"), "RetryableWriteError"),
        Reading(Signal.NETWORK, labels=RETRYABLE),
    ),
    "socket timeout": (NetworkTimeout("timed out"), NETWORK),
    "pool is full": (WaitQueueTimeoutError("timed out"), NETWORK),
    "not primary": (
        NotPrimaryError("not primary", {"ok": 0, "code": 10107, "errorLabels": ["RetryableWriteError"]}),
        Reading(Signal.COMMAND_ERROR, 10107, RETRYABLE),
    ),
    "not primary without details": (NotPrimaryError("not primary"), command_error(None)),
    "shutdown": (NotPrimaryError("shutdown", {"ok": 0, "code": 11600}), command_error(11600)),
    "command error": (OperationFailure("bad", 2, {"ok": 0.0, "code": 2}), command_error(2)),
    "command error without details": (OperationFailure("bad", 2), command_error(2)),
    "overloaded": (
        OperationFailure("busy", 462, {"ok": 0, "errorLabels": ["RetryableError", "SystemOverloadedError"]}),
        OVERLOAD,
    ),
    "maxTimeMS": (ExecutionTimeout("too long", 50, {"ok": 0, "code": 50}), command_error(50)),
    "write error": (WriteError("refused", 121, {"index": 0, "code": 121}), write_error(121)),
    "write error without details": (WriteError("refused", 121), write_error(121)),
    "duplicate in a findAndModify": (DuplicateKeyError("E11000", 11000, {"ok": 0.0, "code": 11000}), command_error(11000)),
    "duplicate in an insert": (DuplicateKeyError("E11000", 11000, {"index": 0, "code": 11000}), write_error(11000)),
    "wtimeout": (WTimeoutError("waiting", 64, {"code": 64, "errInfo": {"wtimeout": True}}), WTIMEOUT),
    "write concern": (WriteConcernError("shutdown", 91, {"code": 91}), Reading(Signal.WRITE_CONCERN, 91)),
    "maxTimeMS while waiting for the write concern": (
        WTimeoutError("too long", 50, {"code": 50}),
        Reading(Signal.WRITE_CONCERN, 50),
    ),
    "bulk, write errors": (bulk_error([{"index": 1, "code": 11000}], nInserted=1), write_error(11000, changed=1)),
    "bulk, the last write error": (
        bulk_error([{"index": 0, "code": 121}, {"index": 2, "code": 11000}]),
        write_error(11000),
    ),
    "bulk, write concern errors": (
        bulk_error([], [{"code": 64}], nModified=2, nMatched=3),
        Reading(Signal.WRITE_CONCERN, 64, changed=5),
    ),
    "bulk, both": (
        bulk_error([{"index": 1, "code": 11000}], [{"code": 64}], nInserted=1),
        write_error(11000, changed=1),
    ),
    "no BSON": (InvalidDocument("cannot encode"), ENCODING),
    "too large": (DocumentTooLarge("too large"), ENCODING),
    "a number beyond int64": (OverflowError("8-byte ints"), ENCODING),
    "cancelled": (asyncio.CancelledError(), INTERRUPTED),
    "interrupted": (KeyboardInterrupt(), INTERRUPTED),
    "a bug of somebody's": (ValueError("?"), INTERRUPTED),
    "misuse of the driver": (InvalidOperation("?"), INTERRUPTED),
    "the collection exists": (CollectionInvalid("exists"), INTERRUPTED),
}


@pytest.mark.parametrize(("exc", "reading"), READINGS.values(), ids=READINGS.keys())
def test_an_exception_is_read(exc: BaseException, reading: Reading) -> None:
    assert read(exc) == reading


@pytest.mark.parametrize("stop", sorted(STOPPED_CODES))
def test_a_bulk_that_was_stopped_is_read_as_stopped_wherever_that_error_stands(stop: int) -> None:
    refused, stopped = {"index": 0, "code": 11000}, {"index": 1, "code": stop}
    for first, second in ((refused, stopped), ({**stopped, "index": 0}, {**refused, "index": 1})):
        assert settle(Facts(read(bulk_error([first, second])), statements=3)) is UNKNOWN


def test_overload_needs_both_labels() -> None:
    assert is_overload(OVERLOAD)
    assert not is_overload(Reading(Signal.COMMAND_ERROR, 462, frozenset({"RetryableError"})))
    assert not is_overload(Reading(Signal.COMMAND_ERROR, 462, frozenset({"SystemOverloadedError"})))
