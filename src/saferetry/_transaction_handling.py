"""The handling of one record with guarantee "transaction": what each ending means. No I/O here."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from bson.errors import BSONError
from pymongo.errors import PyMongoError, WriteConcernError
from tenacity import RetryCallState

from saferetry import _marker, _world
from saferetry._addresses import Address
from saferetry._decisions import tell
from saferetry._execution import FENCED_CODES, Execution, Lesson, State, Verdict, is_transient
from saferetry._handling import Failure, Handling, Rules
from saferetry._marker import Marker
from saferetry._outcomes import read
from saferetry._policy import enough_time
from saferetry._seam import Guard, guard_of
from saferetry._slots import Turn, slot_of
from saferetry.errors import ConfigurationError, TakenOverError

logger = logging.getLogger("saferetry")

LIFETIME = 60.0  # seconds: the default of transactionLifetimeLimitSeconds
PATIENCE_MS = 50  # for a slot in which a statement still runs, before that is cancelled
FIRST_WAIT = 0.005  # seconds: the upper limit of the first wait after a conflict
LONGEST_WAIT = 0.5
MOST_DOUBLINGS = 6  # of the wait after another execution took over
LAST_SECONDS = 2.0  # to find out, when the time is up, whether a commit took place
_NOT_NEWEST = frozenset({225, 117})  # TransactionTooOld, and a number that was used before
_WRITE_CONFLICT = 112
_TAKEN_OVER = _NOT_NEWEST | {11601}  # Interrupted: whoever takes over kills the statement that still runs
_TIMED_OUT, _NO_TRANSACTIONS = 50, 20
# 4.4, 5.0: "newer transaction with txnNumber 7"; 6.0: "with { txnNumber: 7 }", "with txnNumberAndRetryCounter { txnNumber: 7"
_NEWER_NUMBER = re.compile(r"newer[^{}]*?\{?[^{}]*?txnNumber(?:AndRetryCounter \{ txnNumber)?:? (\d+)")


class TransactionHandling(Handling):
    """Be the handling of one record: its executions, one after another, until one commits or another had.

    Raises:
        ConfigurationError: Neither a group nor a name of the user's makes the key unique among services.
    """

    guard: Guard  # of its client, once that is known
    client: Any = None
    marker: Marker | None = None
    result: Any = None
    is_done_before = False
    stored_result: Any = None
    verdict = Verdict.FINAL
    last_code: int | None = None
    is_marker_held = False  # another execution has inserted the same marker and not committed yet
    is_asked_by_user = False
    is_commit_unknown = False
    fenced = 0
    _slot = b""
    _slot_is_taken = False
    _asks_until = 0.0

    def __init__(self, rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(rules, args, kwargs)
        self.budget = self.budget.at_most(LIFETIME)
        self.lessons: list[Lesson] = []
        self.in_order: set[tuple[str, str]] = set()
        if self.key is not None and not self.key.group and not rules.is_named:
            raise ConfigurationError(
                'handler: guarantee "transaction" needs a group (kafka_key, RecordKey(group=...), SAFERETRY_GROUP) or name=, '
                "so that two services never answer for each other"
            )

    # executions

    def _is_followed(self, exc: BaseException) -> bool:  # noqa: ARG002 - it was judged with all that is known
        """Whether another execution is to follow."""
        return self.verdict is Verdict.AGAIN

    def _wait(self, state: RetryCallState) -> float:
        if self.last_code in FENCED_CODES:  # live executions must not go on taking over from each other
            self.fenced += 1
            return _world.uniform(self.rng, self.longest * 2.0 ** min(self.fenced, MOST_DOUBLINGS))
        if self.is_asked_by_user:
            return super()._wait(state)
        return self.wait_after_conflict(state.attempt_number)

    def wait_after_conflict(self, attempt: int) -> float:
        """Return the seconds to wait after the n-th conflict: little at first, for documents that many write."""
        return _world.uniform(self.rng, min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(attempt, 10)))

    def _is_spent(self) -> bool:
        """Whether there were too many; what conflicts is bounded by the budget alone."""
        return self.is_asked_by_user and super()._is_spent()

    def executing(self, begin: Callable[[TransactionHandling, Execution, Any], Any]) -> Self:
        """Be one execution, as a context; its transaction ``begin`` begins, at once or with its first operation."""
        self.last_code, self.is_marker_held, self.is_asked_by_user, self.verdict = None, False, False, Verdict.FINAL
        self.execution = Execution(self.rules.client, partial(begin, self), self.lessons, self.in_order)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        """End it."""
        try:
            super().__exit__(kind, exc, trace)
        finally:
            self.execution.close()
            if self._slot_is_taken:
                self.guard.slots.give_back(self._slot, self.key)
                self._slot_is_taken = False

    def _is_to_be_refused(self, exc: BaseException) -> bool:  # noqa: ARG002 - it undoes what it did
        return False

    def client_for_outer(self) -> Any:
        """Return the client with which a record around this one begins its transaction.

        Raises:
            ConfigurationError: Neither names one.
        """
        if self.rules.client is None:
            raise ConfigurationError(
                f"handler: {self.rules.name} joins the transaction of another record: give client= there or here"
            )
        return self.rules.client

    @contextmanager
    def inside(self, outer: Execution) -> Iterator[None]:
        """Be an execution inside the transaction of a record around it, which must not commit a half of this one."""
        self.executions = 1
        record = self.record = self.new_record()
        record.transaction = outer
        record.enter()
        try:
            yield
        except BaseException as exc:
            outer.doom_for_inner(exc)
            record.leave(exc)
            raise
        else:
            record.leave(None)

    # the beginning

    def bind(self, execution: Execution, client: Any) -> Marker:
        """Let the operations of a client join.

        Raises:
            ConfigurationError: No marker can be made, or (strict) the record has no digest.
        """
        guard = self.guard = guard_of(client)
        if guard.is_encrypted:
            raise ConfigurationError(
                f'the handler {self.rules.name}: guarantee "transaction" is not supported on a client with '
                "auto_encryption_opts: encrypt explicitly (ClientEncryption)"
            )
        assert self.key is not None  # noqa: S101 - the decorator asks for one
        digest = self.rules.digest(self.argument) if self.rules.digest is not None else self.key.digest
        if not isinstance(digest, bytes):
            raise ConfigurationError(f"handler: digest= must return bytes, not {type(digest).__name__}")
        if not digest:
            guard.complain(
                "digest",
                f"the records of {self.rules.name} have no digest, so that another record with the same key (a topic made "
                "anew, offsets rewound) is taken for done: use kafka_key, RecordKey(digest=...) or digest=",
            )
        self.client = execution.client = client
        self.marker = _marker.marker_of(client, self.key, self.rules.name, digest=digest)
        self._slot = slot_of(self.key, self.rules.name, self.marker.database)
        return self.marker

    def are_markers_prepared(self) -> bool:
        """Whether the marker's index was looked for."""
        return self.bound_marker().namespace in self.guard.prepared_markers

    @contextmanager
    def preparing_markers(self) -> Iterator[bool]:
        """Whether the marker's index is to be looked for now: not while other records run, which its making would fail.

        None begins meanwhile: each would make the collection in its own transaction, and one of them alone can commit that.

        Raises:
            ConfigurationError: The user has no right to make the index.
        """
        namespace, guard = self.bound_marker().namespace, self.guard
        if not guard.slots.try_take_all():
            yield False
            return
        try:
            yield True
            guard.prepared_markers.add(namespace)
        except PyMongoError as exc:
            if (refused := _marker.index_refusal(exc, self.bound_marker())) is not None:
                raise refused from exc
            logger.info("the index of the markers could not be made now: %s", type(exc).__name__)
        finally:
            guard.slots.give_all_back()

    def lacks_index(self, indexes: Mapping[str, Any]) -> bool:
        """Whether the index is to be made."""
        guard = self.guard
        life = _marker.life_of(indexes)
        if life not in (None, guard.settings.marker_ttl_s):
            lives = "for ever" if life == math.inf else f"{life:.0f} s"
            guard.warn_once(
                "ttl", f"the markers live {lives}, as their index says, not marker_ttl_s {guard.settings.marker_ttl_s}"
            )
        return life is None

    def index_options(self) -> dict[str, Any]:
        """Return the options of the index."""
        return _marker.index_options(self.guard.settings)

    def bound_marker(self) -> Marker:
        """Return the marker of a handling that is bound to a client."""
        assert self.marker is not None  # noqa: S101 - for the type checker
        return self.marker

    def take_slot(self) -> Turn | None:
        """Take the record's slot; the turn to wait for, while another record of this process uses it."""
        turn = self.guard.slots.take(self._slot, self.key)
        self._slot_is_taken = turn is None
        return turn

    @contextmanager
    def in_line(self, turn: Turn) -> Iterator[float]:
        """Be in line for the slot, for so many seconds at most.

        Raises:
            TakenOverError: It has been in use for the whole budget.
        """
        try:
            yield self.budget.remaining()
        except TimeoutError:
            if turn.cancel():
                raise TakenOverError(
                    f"the slot of {self.rules.name} was in use by another record for the whole budget"
                ) from None
        finally:
            self._slot_is_taken = not turn.cancel()

    def next_address(self, newer: int = 0) -> Address:
        """Return the slot with a number that is newer than all that are known."""
        return self.guard.slots.address(self._slot, time.time(), newer)

    # the marker

    def takes(self, found: Mapping[str, Any] | None) -> bool:
        """Take the result from a marker; whether there was one.

        Raises:
            KeyReusedError: It belongs to a record with another content.
        """
        if found is None:
            return False
        self.stored_result = self.bound_marker().check(found)
        self.is_done_before = True
        tell("skipped", self.rules.name, "done before")
        return True

    @property
    def answer(self) -> Any:
        """The handler's result, or the stored one of a record that was done before."""
        if not self.is_done_before:
            return self.result
        return self.stored_result if self.rules.store_result else None

    def skip(self, execution: Execution, found: Mapping[str, Any]) -> None:
        """Let the handler not run, or leave it: the record is done.

        Raises:
            KeyReusedError: A record with another content is.
        """
        self.takes(found)
        execution.state = State.DONE_BEFORE
        if self.record is not None:
            self.record.skipped = True

    def unconfirmed(self) -> TakenOverError:
        """Return what is raised where no majority has a marker in time: a failover may take it back."""
        return TakenOverError(
            f"another execution of a record of {self.rules.name} has committed, but no majority of the servers has "
            "confirmed it in time; do not commit its offset"
        )

    def check_asking(self, exc: PyMongoError) -> None:
        """Give up asking for the marker when that cannot help.

        Raises:
            PyMongoError: The error.
        """
        if not is_transient(exc) or not self.budget.remaining():
            raise exc

    def after_asking(self, found: Mapping[str, Any] | None, error: BaseException | None) -> Verdict:
        """Return what follows, once the marker was asked."""
        if self.takes(found) or error is None:
            return Verdict.DONE
        if self.is_commit_unknown:
            return Verdict.FINAL
        self.last_code = read(error).code
        return Verdict.AGAIN if self.last_code in FENCED_CODES or is_transient(error) else Verdict.FINAL

    def note_commit_without_majority(self) -> None:
        """Take note that a commit took place, which a failover may take back before a majority has it: soon, as a rule."""
        self.is_commit_unknown = True
        self._asks_until = _world.monotonic() + LAST_SECONDS

    def must_ask_again(self) -> bool:
        """Whether a majority may have the marker of a commit that took place in a moment."""
        return self.is_commit_unknown and _world.monotonic() < self._asks_until

    def unanswered(self) -> Verdict:
        """Return what follows where nobody answered whether the record is done: another execution may be at work on it."""
        self.is_commit_unknown = True
        return Verdict.FINAL

    def result_to_store(self, execution: Execution) -> dict[str, Any] | None:
        """Return the update of the marker with the handler's result, if it is to be stored."""
        if not self.rules.store_result or execution.state is not State.OPEN or execution.doomed is not None:
            return None
        return {"$set": {"result": self.result}}

    def unstorable(self, exc: BaseException) -> BaseException:
        """Return what is raised where a result could not be stored."""
        if not isinstance(exc, (BSONError, TypeError, OverflowError, UnicodeError)):
            return exc
        return ConfigurationError(
            f"handler: store_result cannot store a {type(self.result).__name__} of {self.rules.name}: return a BSON value"
        )

    # the end

    def after_failed_commit(self, exc: PyMongoError, tries: int) -> tuple[Verdict, float]:
        """Return what follows a commit that failed: COMMIT again after some seconds, ASK, or FINAL (settle, the time is up)."""
        is_applied = isinstance(exc, WriteConcernError)  # and its durability is to be waited for
        if not (is_applied or exc.has_error_label("UnknownTransactionCommitResult")):
            return Verdict.ASK, 0.0
        wait = self.wait_after_conflict(tries)
        return (Verdict.COMMIT, wait) if enough_time(self.budget.remaining(), wait, 0.0) else (Verdict.FINAL, 0.0)

    def follow(self, execution: Execution, verdict: Verdict, error: BaseException | None) -> BaseException:
        """Take in how an execution that did not commit ended; return what is raised."""
        was_caught = error is None or execution.went_on
        error = error if error is not None else execution.doomed
        assert error is not None  # noqa: S101 - only what is done ends without
        if verdict is Verdict.FINAL and error is execution.doomed and was_caught:
            error.add_note(
                "saferetry: this error ended the record's transaction: what the handler did after catching it could not be "
                "committed"
            )
        if verdict is Verdict.AGAIN and not was_caught and isinstance(error, self.rules.fatal):
            verdict = Verdict.FINAL
        elif verdict is Verdict.FINAL and not self.is_commit_unknown and self.asks_again(error):
            verdict, self.is_asked_by_user = Verdict.AGAIN, True
        if execution.committing and not self.is_commit_unknown:
            execution.state = State.ABORTED
        self.verdict = verdict
        return error

    def final_error(self, exc: Exception) -> Exception:
        """Return what leaves: TakenOverError where a live rival has the record."""
        if not (self.is_marker_held or self.last_code in _TAKEN_OVER) or self.verdict is not Verdict.AGAIN:
            return exc
        return TakenOverError(
            f"a record of {self.rules.name} was taken over by another execution, which has not committed yet; do not commit "
            "its offset"
        )

    def recoverer_for(self, exc: Exception) -> Callable[[Failure], Any] | None:
        """Return who takes over, if anybody."""
        return None if self.is_commit_unknown else super().recoverer_for(exc)


class Start:
    """Be the taking over of a slot: numbers until the server takes one for the newest."""

    def __init__(self, handling: TransactionHandling) -> None:
        self._handling = handling
        self._newer = 0
        self._tries = 0
        self.patience_ms: int | None = PATIENCE_MS
        self.address = handling.next_address()

    def must_cancel(self, exc: PyMongoError) -> bool:
        """Whether a statement still runs in the slot and is to be cancelled first.

        Raises:
            TakenOverError: Nothing has ended it: that execution may still commit, so the record is no case for a recoverer.
        """
        if read(exc).code != _TIMED_OUT:
            return False
        if self.patience_ms is None and not self._handling.budget.remaining():
            raise TakenOverError(
                f"another execution of a record of {self._handling.rules.name} is at work in the server and could not be "
                "cancelled; do not commit its offset"
            ) from exc
        self.patience_ms = None
        return True

    def must_go_on(self, exc: PyMongoError) -> bool:
        """Whether a higher number is to be tried.

        Raises:
            ConfigurationError: The server has no transactions.
        """
        code = read(exc).code
        if code == _NO_TRANSACTIONS:
            raise ConfigurationError(
                'guarantee "transaction" needs a replica set, which may have one node: mongod --replSet rs0, rs.initiate()'
            ) from exc
        self._handling.is_marker_held = code == _WRITE_CONFLICT  # under another user, whose sessions are not ours to take over
        if code not in _TAKEN_OVER or not self._handling.budget.remaining():
            return False
        if code not in _NOT_NEWEST:  # killed, as what ran in the slot before, perhaps by our own cancelling
            return True
        self._tries += 1
        found = _NEWER_NUMBER.search(str(exc))
        self._newer = int(found[1]) if found else int(self.address.number) + 1_000_000 * 2**self._tries
        logger.debug("%s: its slot has a newer number (%d tries)", self._handling.rules.name, self._tries)
        return True

    def renew(self) -> None:
        """Take the next number."""
        self.address = self._handling.next_address(self._newer)
