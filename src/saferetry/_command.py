"""One command of a write call: what is known of it; and on what, and under which terms, the call is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo.errors import BulkWriteError

from saferetry._addresses import Address
from saferetry._outcomes import Outcome
from saferetry._parts import Part
from saferetry._policy import Decision
from saferetry._seam import Guard, namespace_of


@dataclass(slots=True, eq=False)
class Target:
    """Say on what a call is made.

    Attributes:
        owner: The collection, database or client.
        client: Its client.
        guard: The client's guard.
    """

    owner: Any
    client: Any
    guard: Guard

    @property
    def namespace(self) -> str:
        """Its name, for views and messages."""
        return namespace_of(self.owner)


@dataclass(frozen=True)
class Terms:
    """Say under which terms a call is made.

    Attributes:
        addressable: The driver would number it.
        acknowledged: Write concern above 0.
        foreign: On a session of the user's.
    """

    addressable: bool = True
    acknowledged: bool = True
    foreign: bool = False


class Command:
    """Hold all that is known of one command of a call.

    Args:
        part: What it sends.
        place: Which command of the call's plan it is, or is a piece of.
        statements: Which statements of that; None: all.
    """

    address: Address | None = None
    statement_id = 0
    unsettled = 0  # sends whose fate is open
    calls = 0
    sends = 0
    numbered = True
    outcome = Outcome.NOT_SENT
    decision = Decision.FINAL
    is_done = False
    result: Any = None
    error: BulkWriteError | None = None  # an answer, not a failure: statements were refused
    mended: dict[str, Any] | None = None  # a bulk result of ours in place of the server's
    found = 0  # documents of it that were there already
    must_look = False  # some of its documents may be there already

    def __init__(self, part: Part, place: int, statements: Sequence[int] | None = None) -> None:
        self.part = part
        self.place = place
        self.statements = statements

    def piece(self, places: Sequence[int]) -> Command:
        """Return a command for some of its statements: an earlier copy of them may still be at work."""
        statements = places if self.statements is None else [self.statements[place] for place in places]
        piece = Command(self.part.only(places), self.place, statements)
        piece.unsettled = 1
        return piece

    def take_part_of(self, parts: Sequence[Part]) -> None:
        """Be the same command of an equal plan."""
        part = parts[self.place]
        self.part = part if self.statements is None else part.only(self.statements)

    def bulk_result(self) -> Mapping[str, Any]:
        """Return what it did, as the driver's bulk result."""
        result: Mapping[str, Any] = self.mended or (self.result.bulk_api_result if self.error is None else self.error.details)
        return {**result, "nInserted": result["nInserted"] + self.found} if self.found else result

    def may_run_twice(self, repeatable: bool) -> bool:  # noqa: FBT001 - what it asks for
        """Whether a second copy on the server would do no harm."""
        return repeatable or self.part.is_id_protected

    def may_be_sent_again(self, repeatable: bool) -> bool:  # noqa: FBT001 - what it asks for
        """Whether a send after an unknown outcome is the same write."""
        return self.outcome is not Outcome.UNKNOWN or self.numbered or self.may_run_twice(repeatable)
