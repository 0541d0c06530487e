"""Mutants: plain PyMongo with tenacity, and saferetry with one rule taken out. `tests.campaign.controls` catches them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pymongo
import tenacity
from bson.binary import UUID_SUBTYPE, Binary
from bson.int64 import Int64
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError
from pymongo.synchronous.client_session import ClientSession

import saferetry
from saferetry import (
    _addresses,
    _call,
    _execution,
    _marker,
    _outcomes,
    _parts,
    _plans,
    _policy,
    _record,
    _retry,
    _seam,
    _slots,
    _transaction,
    _transaction_handling,
)
from saferetry._outcomes import Outcome
from saferetry._policy import Decision
from tests.campaign import handling, steps

Patch = Any  # of unittest.mock
_TRIES = 4


@dataclass(frozen=True)
class Mutant:
    """Something that is not saferetry as it should be.

    Attributes:
        takes_out: the rule, and where it stands.
        patches: made and started where it is to be so.
    """

    takes_out: str
    patches: Callable[[], Sequence[Patch]]

    def start(self) -> None:
        """Be it for the rest of this process."""
        for patch in self.patches():
            patch.start()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Be it for a while."""
        with ExitStack() as stack:
            for patch in self.patches():
                stack.enter_context(patch)
            yield


def _plain_client(kind: Callable[..., Any]) -> Callable[..., Any]:
    def make(uri: str, *, saferetry: object, **options: Any) -> Any:
        return kind(uri, **options)

    return make


def _clients() -> list[Patch]:
    return [
        mock.patch.object(saferetry, "MongoClient", _plain_client(pymongo.MongoClient)),
        mock.patch.object(saferetry, "AsyncMongoClient", _plain_client(pymongo.AsyncMongoClient)),
    ]


def _retried_handlers() -> list[Patch]:
    def decorated(self: Any, work: Callable[..., Any]) -> Callable[..., Any]:
        retry = tenacity.retry_if_exception_type(PyMongoError)
        return tenacity.retry(retry=retry, stop=tenacity.stop_after_attempt(_TRIES), reraise=True)(work)

    return [*_clients(), mock.patch.object(handling.Handler, "decorated", decorated)]


def _retried_calls() -> list[Patch]:
    tried = steps._tried

    async def retried(database: Any, owner: str, step: Any, progress: Any) -> Any:
        is_clean = database.name.endswith("_clean")  # the oracle's
        return await tried(database, owner, step if is_clean else replace(step, tries=_TRIES), progress)

    return [
        *_clients(),
        mock.patch.object(handling.Handler, "decorated", lambda self, work: work),
        mock.patch.object(steps, "_tried", retried),
    ]


def _one_driver_call() -> list[Patch]:
    def uncut(bulk_write: Any, collection: Any, requests: Any, options: Any, *, made_ids: Any) -> list[Any]:
        return [
            _parts.Part(
                lambda target: bulk_write(target, requests, **options),
                range(len(requests)),
                made_ids=made_ids,
                requests=requests,
            )
        ]

    return [mock.patch.object(_plans, "cut_bulk", uncut)]


def _multi_among_others() -> list[Patch]:
    return [mock.patch.object(_parts, "_is_multi", return_value=False)]


def _no_address() -> list[Patch]:
    """Let each driver call have a session and a number of the driver's."""
    return [mock.patch.object(_addresses.AddressPool, "acquire", return_value=None)]


def _new_address_each_time() -> list[Patch]:
    sending = _call.WriteCall.sending

    def sending_anew(self: Any, command: Any) -> Any:
        command.address = None
        return sending(self, command)

    return [mock.patch.object(_call.WriteCall, "sending", sending_anew)]


def _same_number() -> list[Patch]:
    acquire = _addresses.AddressPool.acquire

    def acquire_again(self: Any, *arguments: Any) -> Any:
        address = acquire(self, *arguments)
        return _addresses.Address(address.session_id, Int64(1))

    return [mock.patch.object(_addresses.AddressPool, "acquire", acquire_again)]


def _rule(name: str, outcome: Outcome) -> list[Patch]:
    """Let a rule of outcomes come to another one."""
    assert any(row[0] == name for row in _outcomes.RULES), name
    rules = tuple((row[0], row[1], outcome if row[0] == name else row[2]) for row in _outcomes.RULES)
    return [mock.patch.object(_outcomes, "RULES", rules)]


def _first_rule(name: str, holds: Callable[[Any], bool], outcome: Outcome) -> list[Patch]:
    return [mock.patch.object(_outcomes, "RULES", ((name, holds, outcome), *_outcomes.RULES))]


def _last_error_counts() -> list[Patch]:
    return [mock.patch.object(_outcomes.Facts, "only_send", new=True)]


def _unnumbered_again() -> list[Patch]:
    def decide(facts: Any, outcome: Outcome, **rest: Any) -> Decision:
        return Decision.RESEND if _policy.is_passing(facts.reading) else Decision.FINAL

    return [mock.patch.object(_call, "decide", decide)]


def _executed_again() -> list[Patch]:
    return [mock.patch.object(_record.Record, "effect", return_value="")]


def _last_result() -> list[Patch]:
    merge = _parts.merge
    return [mock.patch.object(_call, "merge", lambda results: merge(results[-1:]))]


def _no_repetition() -> list[Patch]:
    return [mock.patch.object(_call.WriteCall, "is_repeated_by", return_value=False)]


def _no_digest() -> list[Patch]:
    return [mock.patch.object(_marker.Marker, "check", lambda self, found: found.get("result"))]


def _slot_of_its_own() -> list[Patch]:
    slots: dict[object, bytes] = {}  # of this process
    return [mock.patch.object(_transaction_handling, "slot_of", lambda *record: slots.setdefault(record, uuid.uuid4().bytes))]


def _low_number() -> list[Patch]:
    def lowest(self: Any, slot: bytes, now: float, newer: int = 0) -> _addresses.Address:
        return _addresses.Address({"id": Binary(slot, UUID_SUBTYPE)}, Int64(1))

    return [mock.patch.object(_slots.Slots, "address", lowest)]


def _newer_number_is_final() -> list[Patch]:
    return [*_low_number(), mock.patch.object(_transaction_handling.Start, "must_go_on", return_value=False)]


def _fenced_is_done() -> list[Patch]:
    judge = _execution.Execution._judge_doomed

    def judge_done(self: Any, doomed: BaseException, exc: BaseException | None) -> Any:
        verdict = judge(self, doomed, exc)
        return _execution.Verdict.DONE if verdict is _execution.Verdict.ASK else verdict

    return [mock.patch.object(_execution.Execution, "_judge_doomed", judge_done)]


def _not_doomed() -> list[Patch]:
    return [mock.patch.object(_execution.Execution, "doom", return_value=None)]


def _nothing_learned() -> list[Patch]:
    return [mock.patch.object(_execution.Execution, "_learns", return_value=False)]


def _marker_apart() -> list[Patch]:
    """Insert the marker before the transaction, as an inbox that is not part of it."""
    begin = _transaction._begin

    def begin_apart(handling: Any, execution: Any, client: Any) -> None:
        begin(handling, execution, client)
        if execution.session is not None and not execution.session.in_transaction:
            return
        if execution.session is not None:
            execution.session.commit_transaction()
            execution.session._server_session = _seam.PinnedServerSession(handling.next_address())
            execution.session.start_transaction(**_seam.TRANSACTION_OPTIONS)

    return [mock.patch.object(_transaction, "_begin", begin_apart)]


def _no_marker() -> list[Patch]:
    def begin_without(handling: Any, execution: Any, client: Any) -> None:
        handling.bind(execution, client)
        address = _addresses.Address({"id": Binary(uuid.uuid4().bytes, UUID_SUBTYPE)}, Int64(1))
        session = _seam.open_session(client, address, None)
        session.start_transaction(**_seam.TRANSACTION_OPTIONS)
        execution.open(session)

    return [mock.patch.object(_transaction, "_begin", begin_without)]


def _no_cancelling() -> list[Patch]:
    return [mock.patch.object(_retry, "cancel", return_value=None)]


def _in_the_drivers_pool() -> list[Patch]:
    """Let a session with an address of ours go into the driver's pool."""
    pinned = _seam.PinnedServerSession
    return [
        mock.patch.object(pinned, "dirty", new=False),
        mock.patch.object(pinned, "generation", new=0),
        mock.patch.object(pinned, "timed_out", return_value=False),
        mock.patch.object(_seam.GuardedSession, "end_session", ClientSession.end_session),
        mock.patch.object(_seam.AsyncGuardedSession, "end_session", AsyncClientSession.end_session),
    ]


def _errors_stay_lost() -> list[Patch]:
    return [mock.patch.object(_call.WriteCall, "_ask_for_lost_errors", return_value=None)]


def _commit_of_one() -> list[Patch]:
    options = {**_seam.TRANSACTION_OPTIONS, "write_concern": pymongo.WriteConcern(1)}
    return [mock.patch.object(_transaction, "TRANSACTION_OPTIONS", options)]


def _is_concern_50(facts: Any) -> bool:
    return facts.reading.signal is _outcomes.Signal.WRITE_CONCERN and facts.reading.code == 50


MUTANTS: Mapping[str, Mutant] = {
    "PyMongo, handler retried": Mutant("everything: plain PyMongo, tenacity around the handler", _retried_handlers),
    "PyMongo, calls retried": Mutant("everything: plain PyMongo, tenacity around each call", _retried_calls),
    "one driver call": Mutant("one command per driver call (DESIGN 4)", _one_driver_call),
    "multi among others": Mutant("a bulk is cut at members that change many (SERVER-FACTS 1)", _multi_among_others),
    "no address": Mutant("an address of our own for each command (DESIGN 4)", _no_address),
    "new address each time": Mutant("every send of a command bears the same address (DESIGN 4)", _new_address_each_time),
    "same number": Mutant("never two commands at one address (SERVER-FACTS 3)", _same_number),
    "last error counts": Mutant("after several sends the last error says nothing (DESIGN 5)", _last_error_counts),
    "unnumbered sent again": Mutant("what has no number is not sent again once unknown (DESIGN 4)", _unnumbered_again),
    "executed again after an effect": Mutant("a handler that wrote is not executed again (DESIGN 6)", _executed_again),
    "last result only": Mutant("results of a bulk's commands are merged (DESIGN 4)", _last_result),
    "repetition is another write": Mutant("an equal next call goes to the same address (DESIGN 4)", _no_repetition),
    "217 is not applied": Mutant(
        "217: it was applied (SERVER-FACTS 3)", lambda: _rule("ran, result lost", Outcome.NOT_APPLIED)
    ),
    "concern 50 is not applied": Mutant(
        "50 in a write concern error: it was applied (SERVER-FACTS 3)",
        lambda: _first_rule("mutant", _is_concern_50, Outcome.NOT_APPLIED),
    ),
    "225 is applied": Mutant("225 never means applied (SERVER-FACTS 3)", _fenced_is_done),
    "no digest": Mutant("a key with another content is refused (DESIGN 7)", _no_digest),
    "a slot of its own": Mutant("an execution takes over the record's slot (DESIGN 7)", _slot_of_its_own),
    "low number, 225 is final": Mutant("a new execution has a higher number (SERVER-FACTS 5)", _newer_number_is_final),
    "not doomed": Mutant("an error dooms the execution (DESIGN 7)", _not_doomed),
    "nothing learned": Mutant("a caught duplicate is learned (DESIGN 7)", _nothing_learned),
    "marker apart": Mutant("the marker is part of the transaction (SERVER-FACTS 5)", _marker_apart),
    "no marker": Mutant("a record that is done is not done again (DESIGN 7)", _no_marker),
    "in the driver's pool": Mutant(
        "an address of ours never gets into the driver's pool (SERVER-FACTS 2)", _in_the_drivers_pool
    ),
    "no cancelling": Mutant("what is given up is cancelled (DESIGN 4)", _no_cancelling),
    "lost errors": Mutant(
        "before 5.0 the errors of an unordered insert are asked for again (SERVER-FACTS 3)", _errors_stay_lost
    ),
    "commit of one node": Mutant("commits are the majority's (DESIGN 7)", _commit_of_one),
}
