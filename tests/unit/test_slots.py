"""Who has a slot: one key at a time, in the order in which they came, and nobody while all are taken."""

from __future__ import annotations

from saferetry._slots import Slots, Turn

SLOT, OTHER = b"a", b"b"


def in_line(slots: Slots, slot: bytes, key: int) -> Turn:
    """Stand in line for a slot that is in use."""
    turn = slots.take(slot, key)
    assert turn is not None
    return turn


def test_a_slot_goes_to_those_in_line_in_the_order_in_which_they_came() -> None:
    slots = Slots()
    assert slots.take(SLOT, 1) is None
    second, third = in_line(slots, SLOT, 2), in_line(slots, SLOT, 3)
    slots.give_back(SLOT, 1)
    assert (second.done(), third.done()) == (True, False)
    slots.give_back(SLOT, 2)
    assert third.done()
    slots.give_back(SLOT, 3)
    assert slots.take(SLOT, 4) is None


def test_executions_of_one_record_have_its_slot_together() -> None:
    slots = Slots()
    assert slots.take(SLOT, 1) is None
    assert slots.take(SLOT, 1) is None
    first, other, second = (in_line(slots, SLOT, key) for key in (2, 3, 2))
    slots.give_back(SLOT, 1)
    assert not first.done()
    slots.give_back(SLOT, 1)
    assert (first.done(), other.done(), second.done()) == (True, False, True)


def test_one_that_no_longer_stands_in_line_is_passed_over() -> None:
    slots = Slots()
    assert slots.take(SLOT, 1) is None
    gone, next_one = in_line(slots, SLOT, 2), in_line(slots, SLOT, 3)
    assert gone.cancel()
    slots.give_back(SLOT, 1)
    assert next_one.done()
    assert not next_one.cancel()  # too late: it has the slot, and is to give it back


def test_all_slots_are_taken_only_together() -> None:
    slots = Slots()
    assert slots.take(OTHER, 1) is None
    assert not slots.try_take_all()
    slots.give_back(OTHER, 1)
    assert slots.try_take_all()
    assert not slots.try_take_all()
    turns = [in_line(slots, slot, 1) for slot in (SLOT, OTHER)]
    assert not any(turn.done() for turn in turns)
    slots.give_all_back()
    assert all(turn.done() for turn in turns)
