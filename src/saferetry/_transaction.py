"""Guarantee "transaction": a record's operations and its marker are one transaction, whoever executes it how often.

An execution takes the record's slot (``_slots``) over from whatever was open there, inserts the marker, runs the handler, whose
operations join (``_methods``), and commits. A marker that is there already says that the record is done. The loops stand twice,
for threads and for asyncio; what they decide by is in ``_transaction_handling`` and ``_execution``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pymongo
from pymongo.errors import DuplicateKeyError, PyMongoError

from saferetry import _world
from saferetry._addresses import Address
from saferetry._attempts import attempts, attempts_async
from saferetry._execution import Execution, State, Verdict
from saferetry._marker import TTL_KEY, index_question, is_unauthorized, says_index
from saferetry._process import awaited
from saferetry._seam import (
    TRANSACTION_OPTIONS,
    DriverCall,
    begun_as_before,
    cancel,
    cancel_async,
    open_session,
    remember_begun,
)
from saferetry._slots import stand_in_line, stand_in_line_async
from saferetry._transaction_handling import LAST_SECONDS, Start, TransactionHandling
from saferetry.errors import KeyReusedError

logger = logging.getLogger("saferetry")

POLL = 0.01  # seconds between two looks at a marker


def handle(handling: TransactionHandling, fn: Callable[[], Any]) -> Any:
    """Handle a record.

    Raises:
        Exception: What left the last execution, unless a recoverer took it.
    """
    try:
        outer = None if handling.outer is None else handling.outer.transaction
        if outer is None:
            attempts(handling.controls, _execute, handling, fn)
        else:
            _join_outer(handling, outer, fn)
    except Exception as exc:  # noqa: BLE001 - it leaves, or a recoverer takes it
        error = handling.final_error(exc)
        recoverer = handling.recoverer_for(error)
        if recoverer is None or (was_done := _was_done(handling)) is None:
            raise error from (exc if error is not exc else exc.__cause__)
        if not was_done:
            return handling.finished(recoverer(handling.failure(error)), "recoverer")
    return handling.answer


def _execute(handling: TransactionHandling, fn: Callable[[], Any]) -> None:
    with handling.executing(_begin_with_first_operation):
        handling.check_held()
        execution: Execution = handling.execution
        error: BaseException | None = None
        try:
            if handling.rules.client is not None:
                _begin(handling, execution, handling.rules.client)
            if execution.state is not State.DONE_BEFORE:
                handling.result = handling.finished(fn())
                handling.check_held()
                _store_result(handling, execution)
        except BaseException as exc:  # noqa: BLE001 - judged below
            error = exc
        verdict = execution.judge(error)
        if verdict is Verdict.COMMIT:
            verdict, error = _commit(handling, execution)
        if verdict is Verdict.ASK:
            verdict = _ask(handling, error or execution.doomed)
        if verdict is Verdict.DONE:
            return
        _abort(execution)
        raise handling.follow(execution, verdict, error)


def _begin(handling: TransactionHandling, execution: Execution, client: Any) -> None:
    """Take the slot over and insert the marker, or find that the record is done."""
    marker = handling.bind(execution, client)
    if not handling.are_markers_prepared():
        _prepare_markers(handling)
    if (turn := handling.take_slot()) is not None:
        with handling.in_line(turn) as seconds:
            stand_in_line(turn, seconds)
    start = Start(handling)
    while True:
        session = _begun(client, start.address, start.patience_ms)
        try:
            marker.raw(client).insert_one(marker.document(), session=session)
        except DuplicateKeyError as exc:
            found = _find_committed(handling, exc)
            if found is not None:
                handling.skip(execution, found)
                return
            _world.sleep(POLL)
            start.renew()  # no majority has it yet: a failover may have taken it back
        except PyMongoError as exc:
            if start.must_cancel(exc):
                cancel(client, start.address)
            elif not start.must_go_on(exc):
                execution.doom(exc)
                raise
            start.renew()
        else:
            execution.open(session)
            return


def _begun(client: Any, address: Address, cap_ms: int | None) -> Any:
    """Return a session with a transaction that has begun; the server hears of it with the first statement."""
    session = begun_as_before(client, address, cap_ms)
    if session is None:
        session = open_session(client, address, cap_ms)
        session.start_transaction(**TRANSACTION_OPTIONS)
        remember_begun(client, session)
    return session


def _begin_with_first_operation(handling: TransactionHandling, execution: Execution, client: Any) -> None:
    """Begin where the handler names no client: the operation is not made where that fails."""
    with execution.beginning():
        handling.check_held()
        _begin(handling, execution, client)


def _prepare_markers(handling: TransactionHandling) -> None:
    """Look for the index that lets markers expire, and make it where it is missing."""
    with handling.preparing_markers() as must_prepare:
        if must_prepare and _lacks_index(handling):
            with DriverCall(handling.client):
                handling.bound_marker().raw(handling.client).create_index(TTL_KEY, **handling.index_options())


def _lacks_index(handling: TransactionHandling) -> bool:
    raw = handling.bound_marker().raw(handling.client)
    try:
        return handling.lacks_index(raw.index_information())
    except PyMongoError as exc:
        if not is_unauthorized(exc):
            raise
    try:
        return not says_index(raw.database.command(index_question(handling.bound_marker())))
    except PyMongoError:
        return True


def _find_committed(handling: TransactionHandling, exc: DuplicateKeyError) -> Any:
    """Return the marker that somebody committed, once a majority has it, or None."""
    try:
        found = _find_marker(handling)
    except PyMongoError as error:
        raise handling.unconfirmed() from error
    if found is None and not handling.budget.remaining():
        raise handling.unconfirmed() from exc
    return found


def _find_marker(handling: TransactionHandling) -> Any:
    """Return the record's marker as the majority has it, or None."""
    marker = handling.bound_marker()
    while True:
        try:
            with DriverCall(handling.client, is_write=False), pymongo.timeout(max(handling.budget.remaining(), LAST_SECONDS)):
                return marker.majority(handling.client).find_one(marker.filter)
        except PyMongoError as exc:
            handling.check_asking(exc)
            _world.sleep(POLL)


def _ask(handling: TransactionHandling, error: BaseException | None) -> Verdict:
    try:
        while (found := _find_marker(handling)) is None and handling.must_ask_again():
            _world.sleep(POLL)
        return handling.after_asking(found, error)
    except PyMongoError:
        return handling.unanswered()


def _store_result(handling: TransactionHandling, execution: Execution) -> None:
    update = handling.result_to_store(execution)
    if update is None:
        return
    marker = handling.bound_marker()
    try:
        marker.raw(handling.client).update_one(marker.filter, update, session=execution.session)
    except BaseException as exc:
        execution.doom(exc)
        raise handling.unstorable(exc) from exc


def _commit(handling: TransactionHandling, execution: Execution) -> tuple[Verdict, BaseException | None]:
    if execution.state is State.WAITING:
        return Verdict.DONE, None  # nothing was read or written
    execution.committing = True
    tries = 0
    while True:
        try:
            execution.session.commit_transaction()
        except PyMongoError as exc:
            tries += 1
            verdict, wait = handling.after_failed_commit(exc, tries)
            if verdict is Verdict.FINAL:
                return _settle_commit(handling, exc)
            if verdict is Verdict.ASK:
                return verdict, exc
            _world.sleep(wait)
        except BaseException:
            handling.is_commit_unknown = True
            raise
        else:
            execution.state = State.COMMITTED
            return Verdict.DONE, None


def _settle_commit(handling: TransactionHandling, error: PyMongoError) -> tuple[Verdict, BaseException | None]:
    """Find out at the end of the budget whether a commit took place: a higher number ends what is open, the marker tells."""
    marker = handling.bound_marker()
    session = _begun(handling.client, handling.next_address(), None)
    try:
        with pymongo.timeout(LAST_SECONDS):
            marker.raw(handling.client).insert_one(marker.document(), session=session)
            session.abort_transaction()
    except DuplicateKeyError:  # committed, but a failover may take it back before a majority has it
        handling.note_commit_without_majority()
        return Verdict.ASK, error
    except PyMongoError:
        handling.is_commit_unknown = True
        return Verdict.FINAL, error
    return Verdict.AGAIN, error


def _abort(execution: Execution) -> None:
    """End an open transaction, so that its locks are gone; a server that does not answer ends it by itself."""
    if execution.state is not State.OPEN or execution.committing:
        return
    execution.state = State.ABORTED
    try:
        with pymongo.timeout(LAST_SECONDS):
            execution.session.abort_transaction()
    except PyMongoError as exc:
        logger.debug("the end of a transaction was not acknowledged: %s", type(exc).__name__)


def _was_done(handling: TransactionHandling) -> bool | None:
    """Whether another execution has done the record meanwhile, so that no recoverer must have it; None: nobody answers."""
    if handling.marker is None:
        return False
    marker = handling.marker
    try:
        found = _find_marker(handling)
        if found is None:
            with DriverCall(handling.client, is_write=False):
                if marker.raw(handling.client).find_one(marker.filter) is not None:
                    return None  # no majority has it yet
        return handling.takes(found)
    except KeyReusedError:
        return False  # another record was done
    except PyMongoError:
        return None


def _join_outer(handling: TransactionHandling, outer: Execution, fn: Callable[[], Any]) -> None:
    """Run the handler inside the transaction of the record around it, with a marker of its own."""
    with outer.lock:
        if outer.state is State.WAITING:
            with outer.beginning():
                client = handling.client_for_outer()
            outer.begin(outer, client)
        outer.check(outer.client if handling.rules.client is None else handling.rules.client)
        handling.bind(outer, outer.client)
        marker = handling.bound_marker()
        with outer.joining():
            found = marker.raw(outer.client).find_one(marker.filter, session=outer.session)
            if not handling.takes(found):
                marker.raw(outer.client).insert_one(marker.document(), session=outer.session)
    if found is None:
        with handling.inside(outer):
            handling.result = handling.finished(fn())
            _store_result(handling, outer)


async def handle_async(handling: TransactionHandling, fn: Callable[[], Awaitable[Any]]) -> Any:
    """Handle a record.

    Raises:
        Exception: What left the last execution, unless a recoverer took it.
    """
    try:
        outer = None if handling.outer is None else handling.outer.transaction
        if outer is None:
            await attempts_async(handling.controls, _execute_async, handling, fn)
        else:
            await _join_outer_async(handling, outer, fn)
    except Exception as exc:  # noqa: BLE001 - it leaves, or a recoverer takes it
        error = handling.final_error(exc)
        recoverer = handling.recoverer_for(error)
        if recoverer is None or (was_done := await _was_done_async(handling)) is None:
            raise error from (exc if error is not exc else exc.__cause__)
        if not was_done:
            return handling.finished(await awaited(recoverer(handling.failure(error))), "recoverer")
    return handling.answer


async def _execute_async(handling: TransactionHandling, fn: Callable[[], Awaitable[Any]]) -> None:
    with handling.executing(_begin_with_first_operation_async):
        handling.check_held()
        execution: Execution = handling.execution
        error: BaseException | None = None
        try:
            if handling.rules.client is not None:
                await _begin_async(handling, execution, handling.rules.client)
            if execution.state is not State.DONE_BEFORE:
                handling.result = handling.finished(await fn())
                handling.check_held()
                await _store_result_async(handling, execution)
        except BaseException as exc:  # noqa: BLE001 - judged below
            error = exc
        verdict = execution.judge(error)
        if verdict is Verdict.COMMIT:
            verdict, error = await _commit_async(handling, execution)
        if verdict is Verdict.ASK:
            verdict = await _ask_async(handling, error or execution.doomed)
        if verdict is Verdict.DONE:
            return
        await _abort_async(execution)
        raise handling.follow(execution, verdict, error)


async def _begin_async(handling: TransactionHandling, execution: Execution, client: Any) -> None:
    """Take the slot over and insert the marker, or find that the record is done."""
    marker = handling.bind(execution, client)
    if not handling.are_markers_prepared():
        await _prepare_markers_async(handling)
    if (turn := handling.take_slot()) is not None:
        with handling.in_line(turn) as seconds:
            await stand_in_line_async(turn, seconds)
    start = Start(handling)
    while True:
        session = await _begun_async(client, start.address, start.patience_ms)
        try:
            await marker.raw(client).insert_one(marker.document(), session=session)
        except DuplicateKeyError as exc:
            found = await _find_committed_async(handling, exc)
            if found is not None:
                handling.skip(execution, found)
                return
            await _world.sleep_async(POLL)
            start.renew()  # no majority has it yet: a failover may have taken it back
        except PyMongoError as exc:
            if start.must_cancel(exc):
                await cancel_async(client, start.address)
            elif not start.must_go_on(exc):
                execution.doom(exc)
                raise
            start.renew()
        else:
            execution.open(session)
            return


async def _begun_async(client: Any, address: Address, cap_ms: int | None) -> Any:
    """Return a session with a transaction that has begun; the server hears of it with the first statement."""
    session = begun_as_before(client, address, cap_ms)
    if session is None:
        session = open_session(client, address, cap_ms)
        await session.start_transaction(**TRANSACTION_OPTIONS)
        remember_begun(client, session)
    return session


async def _begin_with_first_operation_async(handling: TransactionHandling, execution: Execution, client: Any) -> None:
    """Begin where the handler names no client: the operation is not made where that fails."""
    with execution.beginning():
        handling.check_held()
        await _begin_async(handling, execution, client)


async def _prepare_markers_async(handling: TransactionHandling) -> None:
    """Look for the index that lets markers expire, and make it where it is missing."""
    with handling.preparing_markers() as must_prepare:
        if must_prepare and await _lacks_index_async(handling):
            with DriverCall(handling.client):
                await handling.bound_marker().raw(handling.client).create_index(TTL_KEY, **handling.index_options())


async def _lacks_index_async(handling: TransactionHandling) -> bool:
    raw = handling.bound_marker().raw(handling.client)
    try:
        return handling.lacks_index(await raw.index_information())
    except PyMongoError as exc:
        if not is_unauthorized(exc):
            raise
    try:
        return not says_index(await raw.database.command(index_question(handling.bound_marker())))
    except PyMongoError:
        return True


async def _find_committed_async(handling: TransactionHandling, exc: DuplicateKeyError) -> Any:
    """Return the marker that somebody committed, once a majority has it, or None."""
    try:
        found = await _find_marker_async(handling)
    except PyMongoError as error:
        raise handling.unconfirmed() from error
    if found is None and not handling.budget.remaining():
        raise handling.unconfirmed() from exc
    return found


async def _find_marker_async(handling: TransactionHandling) -> Any:
    """Return the record's marker as the majority has it, or None."""
    marker = handling.bound_marker()
    while True:
        try:
            with DriverCall(handling.client, is_write=False), pymongo.timeout(max(handling.budget.remaining(), LAST_SECONDS)):
                return await marker.majority(handling.client).find_one(marker.filter)
        except PyMongoError as exc:
            handling.check_asking(exc)
            await _world.sleep_async(POLL)


async def _ask_async(handling: TransactionHandling, error: BaseException | None) -> Verdict:
    try:
        while (found := await _find_marker_async(handling)) is None and handling.must_ask_again():
            await _world.sleep_async(POLL)
        return handling.after_asking(found, error)
    except PyMongoError:
        return handling.unanswered()


async def _store_result_async(handling: TransactionHandling, execution: Execution) -> None:
    update = handling.result_to_store(execution)
    if update is None:
        return
    marker = handling.bound_marker()
    try:
        await marker.raw(handling.client).update_one(marker.filter, update, session=execution.session)
    except BaseException as exc:
        execution.doom(exc)
        raise handling.unstorable(exc) from exc


async def _commit_async(handling: TransactionHandling, execution: Execution) -> tuple[Verdict, BaseException | None]:
    if execution.state is State.WAITING:
        return Verdict.DONE, None  # nothing was read or written
    execution.committing = True
    tries = 0
    while True:
        try:
            await execution.session.commit_transaction()
        except PyMongoError as exc:
            tries += 1
            verdict, wait = handling.after_failed_commit(exc, tries)
            if verdict is Verdict.FINAL:
                return await _settle_commit_async(handling, exc)
            if verdict is Verdict.ASK:
                return verdict, exc
            await _world.sleep_async(wait)
        except BaseException:
            handling.is_commit_unknown = True
            raise
        else:
            execution.state = State.COMMITTED
            return Verdict.DONE, None


async def _settle_commit_async(handling: TransactionHandling, error: PyMongoError) -> tuple[Verdict, BaseException | None]:
    """Find out at the end of the budget whether a commit took place: a higher number ends what is open, the marker tells."""
    marker = handling.bound_marker()
    session = await _begun_async(handling.client, handling.next_address(), None)
    try:
        with pymongo.timeout(LAST_SECONDS):
            await marker.raw(handling.client).insert_one(marker.document(), session=session)
            await session.abort_transaction()
    except DuplicateKeyError:  # committed, but a failover may take it back before a majority has it
        handling.note_commit_without_majority()
        return Verdict.ASK, error
    except PyMongoError:
        handling.is_commit_unknown = True
        return Verdict.FINAL, error
    return Verdict.AGAIN, error


async def _abort_async(execution: Execution) -> None:
    """End an open transaction, so that its locks are gone; a server that does not answer ends it by itself."""
    if execution.state is not State.OPEN or execution.committing:
        return
    execution.state = State.ABORTED
    try:
        with pymongo.timeout(LAST_SECONDS):
            await execution.session.abort_transaction()
    except PyMongoError as exc:
        logger.debug("the end of a transaction was not acknowledged: %s", type(exc).__name__)


async def _was_done_async(handling: TransactionHandling) -> bool | None:
    """Whether another execution has done the record meanwhile, so that no recoverer must have it; None: nobody answers."""
    if handling.marker is None:
        return False
    marker = handling.marker
    try:
        found = await _find_marker_async(handling)
        if found is None:
            with DriverCall(handling.client, is_write=False):
                if await marker.raw(handling.client).find_one(marker.filter) is not None:
                    return None  # no majority has it yet
        return handling.takes(found)
    except KeyReusedError:
        return False  # another record was done
    except PyMongoError:
        return None


async def _join_outer_async(handling: TransactionHandling, outer: Execution, fn: Callable[[], Awaitable[Any]]) -> None:
    """Run the handler inside the transaction of the record around it, with a marker of its own."""
    async with outer.async_lock:
        if outer.state is State.WAITING:
            with outer.beginning():
                client = handling.client_for_outer()
            await outer.begin(outer, client)
        outer.check(outer.client if handling.rules.client is None else handling.rules.client)
        handling.bind(outer, outer.client)
        marker = handling.bound_marker()
        with outer.joining():
            found = await marker.raw(outer.client).find_one(marker.filter, session=outer.session)
            if not handling.takes(found):
                await marker.raw(outer.client).insert_one(marker.document(), session=outer.session)
    if found is None:
        with handling.inside(outer):
            handling.result = handling.finished(await fn())
            await _store_result_async(handling, outer)
