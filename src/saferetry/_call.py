"""One PyMongo write call of the user's inside a record: its commands, what is known of each, and what follows a failure.

No I/O here: ``_retry`` makes the driver calls, sync and async, and asks this module what they mean.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo.errors import BulkWriteError, DuplicateKeyError
from tenacity import RetryCallState, retry_if_exception

from saferetry._addresses import Address
from saferetry._command import Command, Target, Terms
from saferetry._decisions import tell
from saferetry._losses import LOSSES
from saferetry._outcomes import SUCCESS, Facts, Outcome, Reading, Signal, WriteView, read, settle
from saferetry._parts import Part, empty_result, merge
from saferetry._plans import Plan
from saferetry._policy import Decision, FullJitter, decide, enough_time
from saferetry._record import REPEATABLE, Record, is_repeatable
from saferetry._seam import KEEPS_WRITE_ERRORS, DriverCall, csot_remaining, longest_idle
from saferetry.errors import RetryRefusedError

logger = logging.getLogger("saferetry")


@dataclass(frozen=True)
class CallReport:
    """Say what saferetry did about a failed call; it is ``exc.saferetry`` of the driver's error.

    Attributes:
        write: The call.
        waits: Seconds waited before its further attempts.
        decision: Why it was not sent again: "final" (the error is the answer), "refused", "attempts", "budget", "interrupted".
        done: How many operations of a bulk were acknowledged.
    """

    write: WriteView
    waits: tuple[float, ...]
    decision: str
    done: int


class Sending(DriverCall):
    """Be one driver call for a command of a write call, which takes in how it ends."""

    is_write = True

    def __init__(self, write_call: WriteCall, address: Address | None, command: Command | None = None, *, multi: bool) -> None:
        self.client = write_call.target.client
        self.address = write_call.at_work = address
        if not multi:
            self.is_numberable, self.wants_number = True, not write_call.repeatable
        self._write_call = write_call
        self._command = command
        self._started = write_call.record.clock()

    def __exit__(self, kind: object = None, exc: BaseException | None = None, trace: object = None) -> bool:
        """End it; an error that is an answer does not leave."""
        super().__exit__()
        write_call, command = self._write_call, self._command
        del self._write_call, self._command  # a connection of asyncio's keeps the context that it was opened in
        write_call.at_work = None
        record = write_call.record
        record.longest_call = max(record.longest_call, record.clock() - self._started)
        return write_call.take_first(self, exc) if command is None else write_call.take(command, self, exc)


class WriteCall:
    """Be one write call; its commands run one after another."""

    made: list[Command] | None = None  # None: it is one command, of which nothing is known yet
    at_work: Address | None = None  # of the command that the server may be at work on just now
    _waits: tuple[float, ...] = ()
    _decision = "final"
    _error_code: int | None = None
    _last_error: BaseException | None = None
    _fingerprint: bytes | None = None
    _last: tuple[Outcome, int, int] | None = None  # outcome, driver calls and sends, once it is over
    _discarded: frozenset[Address] = frozenset()

    def __init__(self, record: Record, target: Target, method: str, plan: Plan, terms: Terms) -> None:
        self.record = record
        self.target = target
        self.method = method
        self.terms = terms
        self.repeatable = REPEATABLE.get()
        self.plan = plan
        if not plan.is_one_command:
            self._cut()  # wrong arguments show before anything is taken note of
        record.add(self)
        if terms.foreign:
            record.note_effect(f"{method} on {target.namespace} was made with a session of the user's")

    @property
    def _commands(self) -> list[Command]:
        return self._cut() if self.made is None else self.made

    def _cut(self) -> list[Command]:
        self.made = [Command(part, place) for place, part in enumerate(self.plan.cut())]
        return self.made

    @property
    def _subject(self) -> str:
        return f"{self.method} on {self.target.namespace}"

    @property
    def is_foreign(self) -> bool:
        """Whether it was made with a session of the user's."""
        return self.terms.foreign

    def view(self) -> WriteView:
        """Return what the user may see of it."""
        if self._last is not None:
            _, calls, sends = self._last
        else:
            calls = sum(command.calls for command in self.made or ())
            sends = sum(command.sends for command in self.made or ())
        return WriteView(self.method, self.target.namespace, self.outcome, calls, sends, self._error_code)

    def orphan(self) -> tuple[Any, Address] | None:
        """Return client and address of the command that the server may be at work on just now, or None."""
        address = self.at_work
        return None if address is None else (self.target.client, address)

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        if self._last is not None:
            return self._last[0]
        if self.made is None:
            return Outcome.NOT_SENT
        outcomes = {command.outcome for command in self.made}
        graver_first = (Outcome.UNKNOWN, Outcome.UNVERIFIABLE, Outcome.APPLIED, Outcome.NOT_APPLIED)
        return next((outcome for outcome in graver_first if outcome in outcomes), Outcome.NOT_SENT)

    # its commands

    def commands(self) -> Iterator[Command]:
        """Yield the commands still to be done, those that a reply makes necessary included."""
        for command in self._commands:  # grows meanwhile
            if not command.is_done:
                yield command
                self._give_back_address_of(command)
            if self.plan.ordered and command.is_done and len(self._commands) > 1 and command.bulk_result()["writeErrors"]:
                return

    def controls(self, command: Command) -> dict[str, Any]:
        """Return tenacity's rules for one command."""
        return {
            "retry": retry_if_exception(lambda _: command.decision is Decision.RESEND),
            "stop": self._stop,
            "wait": FullJitter(self.target.guard.settings, self.target.guard.rng),
            "before_sleep": self._note_wait,
            "reraise": True,
        }

    def _stop(self, state: RetryCallState) -> bool:
        if state.attempt_number >= self.target.guard.settings.max_attempts:
            self._decision = "attempts"
        elif not enough_time(min(self.record.remaining(), csot_remaining()), state.upcoming_sleep, self.record.longest_call):
            self._decision = "budget"
        return self._decision != "final"

    def _note_wait(self, state: RetryCallState) -> None:
        self._waits += (state.upcoming_sleep,)
        tell("resent", self._subject, wait=state.upcoming_sleep)

    def first_sending(self) -> Sending:
        """Return the first driver call for a call of one command, of which little is kept where it succeeds.

        As a context; an error that is an answer does not leave.
        """
        if LOSSES.counts:
            self.record.check_held()
        terms, target = self.terms, self.target
        is_ours = terms.acknowledged and not terms.foreign
        address = target.guard.pool.acquire(longest_idle, target.client) if is_ours else None
        return Sending(self, address, multi=self.plan.multi)

    def take_first(self, call: Sending, exc: BaseException | None) -> bool:
        """Take in how the first driver call ended; whether the call is done."""
        if exc is not None or not self.terms.acknowledged:
            (command,) = self._commands
            command.calls, command.address = 1, call.address
            return self.take(command, call, exc)
        self._last = Outcome.APPLIED, 1, 1 if self.terms.foreign else call.sends  # the first of the rules
        if call.address is not None:
            self.target.guard.pool.release(call.address)
        del self.plan
        return True

    def sending(self, command: Command) -> Sending:
        """Return one driver call for a command, as a context; an error that is an answer does not leave."""
        command.decision = Decision.FINAL
        self.record.check_held()
        command.calls += 1
        if command.address is None and self.terms.acknowledged and not self.terms.foreign:
            command.address = self.target.guard.pool.acquire(longest_idle, self.target.client)
        call = Sending(self, command.address, command, multi=command.part.multi)
        call.statement_id = command.statement_id
        call.was_numbered = command.unsettled > 0 and command.numbered and not command.may_run_twice(self.repeatable)
        return call

    def take(self, command: Command, call: Sending, exc: BaseException | None) -> bool:
        """Take in how a driver call for a command ended; whether that command is done."""
        if exc is not None:
            self._take_error(command, call, exc)
        else:
            self._take(command, call, settle(self._facts(command, call, SUCCESS)))
            command.is_done = True
        if command.is_done and command.sends > 1:
            self._ask_for_lost_errors(command, call)
        return command.is_done

    def _facts(self, command: Command, call: DriverCall, reading: Reading, *, own_duplicate: bool = False) -> Facts:
        """Return what is known of a command after a driver call."""
        return Facts(
            reading,
            sent=call.sends,
            unsettled=command.unsettled,
            known=command.outcome,
            statements=command.part.statements,
            multi=command.part.multi,
            numbered=command.numbered and (call.numbered or not call.sends),
            acknowledged=self.terms.acknowledged,
            foreign=self.terms.foreign,
            mongos=call.mongos,
            own_duplicate=own_duplicate,
        )

    def _take(self, command: Command, call: DriverCall, outcome: Outcome, signal: Signal = Signal.SUCCESS) -> None:
        """Update what is known of a command after a driver call."""
        if call.sends:
            command.numbered = command.numbered and call.numbered
        command.outcome = outcome
        command.unsettled = command.unsettled + call.sends if outcome is Outcome.UNKNOWN else 0
        # On a session of the user's, and with w:0, the seam does not see the sends.
        seen = self.terms.acknowledged and not self.terms.foreign
        command.sends += call.sends if seen or signal is Signal.SELECTION else 1

    def _take_error(self, command: Command, call: DriverCall, exc: BaseException) -> None:
        may_be_there = command.unsettled + call.sends > 1 or self.plan.inserted.are_derived
        own = may_be_there and _is_own_duplicate(command.part, exc)
        reading = read(exc)
        self._error_code = reading.code
        self._last_error = exc
        if may_be_there and isinstance(exc, BulkWriteError) and self._mend(command, exc):
            own = True
        facts = self._facts(command, call, reading, own_duplicate=own)
        self._take(command, call, settle(facts), reading.signal)
        command.decision = decide(facts, command.outcome, repeatable=self.repeatable, id_protected=command.part.is_id_protected)
        logger.debug(
            "%s on %s: %s %s, %s, %s",
            self.method, self.target.namespace, type(exc).__name__, reading.code, command.outcome.value, command.decision.value,
        )  # fmt: skip
        if own and command.outcome is Outcome.APPLIED:
            command.is_done = True
            command.result = self.plan.recovered()
        elif isinstance(exc, BulkWriteError) and command.decision is Decision.FINAL:
            command.error = exc
            command.is_done = True

    # replies that need mending

    def _mend(self, command: Command, exc: BulkWriteError) -> bool:
        """Count duplicates of the ``_id`` made for this call as applied; return whether there were any."""
        errors = exc.details.get("writeErrors", [])
        own = [entry for entry in errors if _duplicates(entry, command.part.made_ids.get(entry["index"]))]
        if not own:
            return False
        mended = copy.deepcopy({**exc.details, "writeErrors": [entry for entry in errors if entry not in own]})
        mended["nInserted"] += len(own)
        command.mended = mended
        next_place = own[-1]["index"] + 1
        if self.plan.ordered and next_place < command.part.statements:
            self._add_rest(command, next_place)
        return True

    def _add_rest(self, command: Command, start: int) -> None:
        """Do the statements that an ordered insert did not come to; some may be there already."""
        rest = command.piece(range(start, command.part.statements))  # at an address of its own
        rest.must_look = True
        if self.plan.inserted.are_derived:
            rest.unsettled = 0
        else:
            rest.numbered = False
        self._add_after(command, [rest])

    def take_found(self, command: Command, found: Sequence[Mapping[str, Any]]) -> None:
        """Count the documents that are there as inserted, and keep the others for sending."""
        ids = {document["_id"] for document in found}
        missing = [place for place in range(command.part.statements) if command.part.made_ids.get(place) not in ids]
        command.must_look = False
        command.found = command.part.statements - len(missing)
        left = command.piece(missing)
        command.part, command.statements = left.part, left.statements
        if not missing:
            command.mended, command.outcome, command.is_done = empty_result(), Outcome.APPLIED, True

    def _ask_for_lost_errors(self, command: Command, call: DriverCall) -> None:
        """Ask each statement again alone where a server before 5.0 does not know the errors of an unordered insert any more.

        Such a server answers a resend with the number of documents that are stored, without the errors of the others or with
        the errors at wrong places: statements that it remembers come first in its answer. At its own statement id a stored
        document is answered from memory, and one that was refused is refused again.
        """
        part = command.part
        if not (part.is_insert and part.statements > 1 and command.numbered):
            return
        if self.plan.ordered or call.wire_version >= KEEPS_WRITE_ERRORS:
            return
        known = command.bulk_result()
        if part.statements in (known["nInserted"], len(known["writeErrors"])):
            return
        command.mended = {**copy.deepcopy(dict(known)), "nInserted": 0, "writeErrors": []}
        alone = [command.piece([place]) for place in range(part.statements)]
        for place, piece in enumerate(alone):
            piece.address, piece.statement_id = command.address, place
        self._add_after(command, alone)

    def _add_after(self, command: Command, more: list[Command]) -> None:
        place = self._commands.index(command) + 1
        self._commands[place:place] = more

    # its end

    def finish(self) -> Any:
        """Return the method's result, or raise the error that is the server's answer."""
        self._settle_addresses()
        try:
            return self._conclude()
        finally:
            self._forget()

    def _conclude(self) -> Any:
        first = self._commands[0]
        try:
            if len(self._commands) > 1 or first.mended is not None:
                done = [(command.part, command.bulk_result()) for command in self._commands if command.is_done]
                return self.plan.conclude(merge(done))
            if first.error is not None:
                raise first.error
        except BulkWriteError as exc:
            self._report(exc)
            raise
        return self.plan.conclude(first.result)

    def give_up(self, exc: BaseException) -> list[Address]:
        """Note on an error that leaves what it means, and return the addresses to be cancelled on the server."""
        if self._decision == "final" and not isinstance(exc, Exception):
            self._decision = "interrupted"
        if any(command.decision is Decision.REFUSED for command in self._commands):
            self._decision = "refused"
        if isinstance(exc, BulkWriteError) and (failed := next((c for c in self._commands if not c.is_done), None)):
            for entry in (*exc.details["writeErrors"], *exc.details["upserted"]):
                entry["index"] = failed.part.positions[entry["index"]]
        self._report(exc)
        unknown = self._settle_addresses()
        done = [command.is_done for command in self._commands]
        if not self.terms.foreign and (self.outcome is Outcome.UNKNOWN or (any(done) and not all(done))):
            self._fingerprint = self.plan.fingerprint(self.plan.inserted.made_ids)
            self.record.unknown_call = self
        else:
            self._forget()
        return unknown if self.target.guard.settings.cancel else []

    def _forget(self) -> None:
        """Keep what may be asked for later alone: a record may write a lot."""
        view = self.view()
        self._last = view.outcome, view.calls, view.sends
        self._commands.clear()
        del self.plan

    def _report(self, exc: BaseException) -> None:
        view = self.view()
        done = sum(command.part.statements for command in self._commands if command.is_done)
        exc.saferetry = CallReport(view, self._waits, self._decision, done)  # type: ignore[attr-defined]
        if self._decision == "final":
            return
        tell("refused" if self._decision == "refused" else "given up", self._subject, self._decision)
        reason = {
            "refused": "not sent again, since it could take effect twice",
            "attempts": f"given up after {view.calls} driver calls (max_attempts)",
            "budget": f"given up after {view.calls} driver calls, since another would not fit into the record's budget",
            "interrupted": "interrupted",
        }[self._decision]
        exc.add_note(
            f"saferetry: {view.method} on {view.namespace}: outcome {view.outcome.value} after {view.sends} sends; {reason}"
        )

    def _settle_addresses(self) -> list[Address]:
        """Give addresses back, and return those whose command is not settled: only its repetition may use them again."""
        guard = self.target.guard
        if not (owned := {command.address for command in self._commands if command.address is not None}):
            return []
        unknown = {address for address in owned if self._is_open(address)}
        for address in owned - unknown - self._discarded:
            guard.pool.release(address)
        for address in unknown - self._discarded:
            guard.discard(address)
        self._discarded |= unknown
        for command in self._commands:
            if command.address not in unknown:
                command.address = None
        return list(unknown)

    def _give_back_address_of(self, command: Command) -> None:
        """Give the address of a settled command back, unless a piece of it is still to be sent there."""
        address = command.address
        if address is None or not command.is_done or self._is_open(address):
            return
        sharing = [other for other in self._commands if other.address is address]
        if not all(other.is_done for other in sharing):
            return
        if address not in self._discarded:
            self.target.guard.pool.release(address)
        for other in sharing:
            other.address = None

    def _is_open(self, address: Address) -> bool:
        return any(command.address is address and command.outcome is Outcome.UNKNOWN for command in self._commands)

    # its repetition by the user

    def is_repeated_by(self, target: Target, method: str, plan: Plan, terms: Terms) -> bool:
        """Whether another call is this one again: the same method, namespace and arguments on the same deployment."""
        if (method, target.namespace, terms) != (self.method, self.target.namespace, self.terms) or self._fingerprint is None:
            return False
        if target.client is not self.target.client and target.client != self.target.client:
            return False
        return plan.fingerprint(self.plan.inserted.made_ids) == self._fingerprint

    def resume(self, target: Target, plan: Plan) -> None:
        """Go on as the repetition that the user asked for: the same addresses, the same ``_id``.

        Raises:
            RetryRefusedError: It could take effect twice; nothing is sent.
        """
        self.repeatable = self.repeatable or is_repeatable()
        if not all(command.may_be_sent_again(self.repeatable) for command in self._commands):
            tell("refused", self._subject, "outcome unknown")
            raise RetryRefusedError(
                f"{self.method} on {self.target.namespace} was not sent again: its outcome is unknown, and it could take "
                "effect twice. Let the first error leave the handler, or, if running it twice is right, use repeatable()",
                writes=self.record.writes,
                reason="outcome unknown",
            ) from self._last_error
        plan.inserted.make_ids(self.plan.inserted.made_ids)
        parts = plan.cut()
        for command in self._commands:
            command.take_part_of(parts)
            command.decision = Decision.FINAL
        self.target, self.plan, self._decision = target, plan, "final"
        self.record.unknown_call = None


def _is_own_duplicate(part: Part, exc: BaseException) -> bool:
    return isinstance(exc, DuplicateKeyError) and _duplicates(exc.details or {}, part.made_ids.get(0))


def _duplicates(entry: Mapping[str, Any], made: Any) -> bool:
    """Whether an error says that the very ``_id`` made for this call is there already."""
    return (
        made is not None
        and entry.get("code") == 11000  # noqa: PLR2004 - DuplicateKey
        and dict(entry.get("keyPattern", {})) == {"_id": 1}
        and entry.get("keyValue", {}).get("_id") == made
    )
