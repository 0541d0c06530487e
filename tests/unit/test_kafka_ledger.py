"""What was polled, what is done and what may be committed: order is kept, and no offset runs ahead of its record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymongo.errors import AutoReconnect, DuplicateKeyError, OperationFailure, PyMongoError

from saferetry.errors import (
    ConfigurationError,
    DeadLetterError,
    KeyReusedError,
    PartitionLostError,
    RetryRefusedError,
    TakenOverError,
)
from saferetry.kafka._ledger import Ledger, Place
from saferetry.kafka._message import Message
from saferetry.kafka._verdict import RecordVerdict, verdict_on

PLACES: list[Place] = [("t", 0), ("t", 1), ("t", 2)]
DONE, PUT_OFF, STOP = RecordVerdict


def message(place: Place, offset: int) -> Message:
    return Message(*place, offset, 0, True, None, None, (), None)


def ledger(**offsets: int) -> Ledger:
    """Return a ledger with partitions p0, p1, ... and so many messages in each."""
    made = Ledger()
    for number, count in enumerate(offsets.values()):
        made.assign([("t", number)])
        for offset in range(count):
            made.add(message(("t", number), offset))
    return made


def take(made: Ledger, now: float = 0.0) -> tuple[Place, int] | None:
    taken = made.take(now)
    return None if taken is None else (taken[0].place, taken[1].offset)


def finish(made: Ledger) -> None:
    assert made._in_work is not None
    made.done(*made._in_work)


def test_partitions_take_turns() -> None:
    made = ledger(p0=2, p1=1)
    order = []
    while (taken := take(made)) is not None:
        order.append(taken)
        finish(made)
    assert order == [(("t", 0), 0), (("t", 1), 0), (("t", 0), 1)]


def test_what_is_done_may_be_committed_as_the_next_offset() -> None:
    made = ledger(p0=2)
    assert made.to_commit() == {}
    take(made)
    assert made.to_commit() == {}
    finish(made)
    assert made.to_commit() == {("t", 0): 1}
    made.committed({("t", 0): 1})
    assert made.to_commit() == {}


def test_a_record_that_is_put_off_comes_first_again_and_the_others_flow() -> None:
    made = ledger(p0=2, p1=1)
    taken = made.take(0.0)
    assert taken is not None
    made.put_off(*taken, until=5.0)
    assert made.put_off_at(1.0) == {("t", 0)}
    assert take(made, now=1.0) == (("t", 1), 0)
    finish(made)
    assert take(made, now=4.9) is None
    assert made.due_in(4.0) == pytest.approx(1.0)
    assert made.to_commit() == {("t", 1): 1}
    assert take(made, now=5.0) == (("t", 0), 0)
    assert made.put_off_at(5.0) == set()
    finish(made)
    assert take(made, now=5.0) == (("t", 0), 1)


def test_a_partition_that_leaves_begins_nothing_more_and_its_record_in_work_still_counts() -> None:
    made = ledger(p0=3)
    take(made)
    made.leave([("t", 0)])
    assert made.is_in_work([("t", 0)])
    finish(made)
    assert take(made) is None
    assert made.to_commit([("t", 0)]) == {("t", 0): 1}
    assert not made.add(message(("t", 0), 3))


def test_nothing_is_committed_for_a_partition_that_is_gone() -> None:
    made = ledger(p0=2)
    taken = made.take(0.0)
    assert taken is not None
    made.forget([("t", 0)])
    assert taken[0].is_gone
    made.done(*taken)
    assert made.to_commit() == {}


def test_a_partition_that_comes_back_begins_anew() -> None:
    made = ledger(p0=2)
    taken = made.take(0.0)
    assert taken is not None
    made.forget([("t", 0)])
    made.assign([("t", 0)])
    made.done(*taken)  # the record of before
    assert made.to_commit() == {}
    assert made.add(message(("t", 0), 0))


@pytest.mark.parametrize("given", [message(("other", 0), 5), message(("t", 0), 1), message(("t", 0), 0)])
def test_a_message_that_is_not_ours_or_was_seen_is_passed_over(given: Message) -> None:
    made = ledger(p0=2)
    assert not made.add(given)
    assert made.backlog(0.0) == 2


def test_gaps_between_offsets_are_the_brokers_business() -> None:
    made = ledger(p0=0)
    assert made.add(message(("t", 0), 5))
    assert made.add(message(("t", 0), 9))
    take(made)
    finish(made)
    take(made)
    finish(made)
    assert made.to_commit() == {("t", 0): 10}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["poll", "done", "put off", "commit", "leave", "forget", "assign", "give up"]),
            st.sampled_from(PLACES),
        ),
        max_size=60,
    )
)
def test_an_offset_that_is_committed_has_everything_before_it_done_and_records_begin_in_order(
    steps: list[tuple[str, Place]],
) -> None:
    made, now = Ledger(), 0.0
    polled: dict[Place, int] = dict.fromkeys(PLACES, 0)
    committed: dict[Place, int] = dict.fromkeys(PLACES, 0)
    done: dict[Place, set[int]] = {place: set() for place in PLACES}
    expected: dict[Place, int] = dict.fromkeys(PLACES, 0)  # the record that has to begin next
    for step, place in steps:
        now += 1.0
        match step:
            case "assign":
                made.forget([place])
                made.assign([place])
                polled[place] = expected[place] = committed[place]
            case "poll":
                made.add(message(place, polled[place]))
                polled[place] += 1
            case "leave":
                made.leave([place])
            case "forget":
                made.forget([place])
            case "commit":
                offsets = made.to_commit()
                made.committed(offsets)
                committed |= offsets
            case _ if (taken := made.take(now)) is not None:
                partition, record = taken
                assert record.offset == expected[partition.place]
                if step == "done":
                    made.done(partition, record)
                    done[partition.place].add(record.offset)
                    expected[partition.place] += 1
                elif step == "put off":
                    made.put_off(partition, record, until=now)
                else:  # as with a failure: the consumer stops
                    made.give_up()
                    made.forget(PLACES)
        for where, offset in committed.items():
            assert done[where] >= set(range(offset))


# what the ending of a record means


class BusyError(Exception):
    pass


def labelled(label: str) -> PyMongoError:
    return OperationFailure("?", 24, {"errorLabels": [label]})


@pytest.mark.parametrize(
    ("exc", "effect", "verdict"),
    [
        (None, "", DONE),
        (None, "an insert", DONE),
        (AutoReconnect("?"), "", PUT_OFF),
        (AutoReconnect("?"), "an insert", STOP),
        (labelled("UnknownTransactionCommitResult"), "", PUT_OFF),
        (labelled("TransientTransactionError"), "", PUT_OFF),
        (OperationFailure("?", 112), "", PUT_OFF),
        (OperationFailure("?", 13), "", STOP),
        (DuplicateKeyError("?", 11000), "", STOP),
        (TakenOverError("?"), "", PUT_OFF),
        (PartitionLostError("?"), "", PUT_OFF),
        (DeadLetterError("?"), "", PUT_OFF),
        (DeadLetterError("?"), "an insert", STOP),
        (RetryRefusedError("?"), "", STOP),
        (KeyReusedError("?"), "", STOP),
        (ConfigurationError("?"), "", STOP),
        (ValueError("?"), "", STOP),
        (BusyError(), "", PUT_OFF),
        (BusyError(), "an insert", STOP),
        (KeyboardInterrupt(), "", STOP),
        (SystemExit(), "", STOP),
    ],
    ids=repr,
)
def test_only_what_passes_and_repeats_nothing_is_put_off(
    exc: BaseException | None, effect: str, verdict: RecordVerdict
) -> None:
    assert verdict_on(exc, put_off_on=BusyError, effect=effect) is verdict
