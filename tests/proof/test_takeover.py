"""A new execution takes over from a dead or a stalled one at once, and fences it: effects once."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable

import pymongo
import pytest
from pymongo.errors import PyMongoError

from saferetry.lab.processes import TellingProcess
from tests.proof import work
from tests.proof.conftest import Ground
from tests.proof.consuming import Consumer
from tests.proof.work import Database
from tests.support import CommandLog, Mode, eventually, hold_updates, running

A_WHILE = 2.0  # seconds: far above what a takeover takes, far below the 60 for which a dead transaction keeps its locks
MORE = range(100, 105)  # records handled undisturbed


def timed(consumer: Consumer, position: int) -> float:
    begin = time.monotonic()
    assert consumer.handle(position) == position
    return time.monotonic() - begin


def undisturbed(consumer: Consumer) -> float:
    return statistics.median(timed(consumer, position) for position in MORE)


def killed_at(ground: Ground, command: str) -> None:
    """Let a worker die when it sends this command for record 1; the server never gets it."""

    def kill() -> None:
        worker.kill()

    to_the_dead = ground.proxy(command=command, mode="cut", on_hit=kill)
    worker: TellingProcess = ground.worker(1, uri=to_the_dead.uri())
    assert worker.finish() == -signal.SIGKILL


def test_a_dead_execution_is_taken_over_at_once(ground: Ground, show: Callable[[str], None]) -> None:
    consumer = ground.consumer()
    usual = undisturbed(consumer)
    killed_at(ground, "commitTransaction")
    took = timed(consumer, 1)
    show(f"taken over from a dead execution in {took * 1000:.0f} ms, undisturbed {usual * 1000:.0f} ms")
    assert ground.effects() == work.once(*MORE, 1)
    assert took < A_WHILE


def test_the_locks_of_a_dead_execution_stay_until_it_is_taken_over(ground: Ground) -> None:
    killed_at(ground, "commitTransaction")
    with pytest.raises(PyMongoError), pymongo.timeout(0.5):
        ground.database.stock.update_one({}, {"$inc": {"probes": 1}})
    ground.consumer().handle(1)
    with pymongo.timeout(0.5):
        ground.database.stock.update_one({}, {"$inc": {"probes": 1}})
    assert ground.effects() == work.once(1)


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_statement_still_at_work_is_cancelled_first(
    is_alive: bool, ground: Ground, log: CommandLog, app_name: str, show: Callable[[str], None]
) -> None:
    consumer = ground.consumer(event_listeners=[log])
    usual = undisturbed(consumer)
    worker = ground.worker(1, work="slow_order", appName=app_name)
    worker.wait_for("half")
    eventually(lambda: any(operation.is_write for operation in running(ground.admin, app_name)))
    if not is_alive:
        worker.kill()
        worker.finish()
    log.clear()
    took = timed(consumer, 1)
    show(f"taken over from a statement at work in {took * 1000:.0f} ms, undisturbed {usual * 1000:.0f} ms")
    assert took < A_WHILE
    sent = [name for name in log.names() if name in ("insert", "killSessions")]
    assert sent[:3] == ["insert", "killSessions", "insert"]
    if is_alive:
        worker.wait_for("end")
        (ended,) = [*worker.told("done"), *worker.told("failed")]
        assert (ended["event"], ended["result"]) == ("done", None)
    assert ground.effects() == work.once(*MORE, 1)


def test_a_statement_that_cannot_be_cancelled_is_waited_for(ground: Ground, app_name: str) -> None:
    """It ends by itself at last (a stalled disk, say): the record is done then, and is no dead letter before."""
    with hold_updates(ground.admin, f"{ground.name}.stock") as release:
        worker = ground.worker(1, appName=app_name)
        eventually(lambda: any(operation.held_by for operation in running(ground.admin, app_name)))
        worker.kill()
        timer = threading.Timer(3.0, release)
        timer.start()
        consumer = ground.consumer(socketTimeoutMS=900)
        assert consumer.handle(1) == 1
        timer.join()
    assert not consumer.failures
    assert ground.effects() == work.once(1)


def test_an_execution_whose_statement_was_cancelled_leaves_no_dead_letter(ground: Ground, app_name: str) -> None:
    """The one that took over is still at work, and nothing is committed yet, when the first one hears that it was cancelled."""
    victim = ground.worker(1, work="slow_order", appName=app_name)
    victim.wait_for("half")
    eventually(lambda: any(operation.is_write for operation in running(ground.admin, app_name)))

    def last_while_the_victim_judges(database: Database, position: int) -> int:
        work.order(database, position)
        time.sleep(0.5)
        return position

    ground.consumer(last_while_the_victim_judges).handle(1)
    victim.wait_for("end")
    assert [event["result"] for event in victim.told("done")] in ([None], [1])
    assert ground.effects() == work.once(1)


@pytest.mark.parametrize("is_done_meanwhile", [True, False])
@pytest.mark.parametrize("place", ["before its last statement", "before its commit"])
def test_a_stalled_execution_that_goes_on_is_fenced(is_done_meanwhile: bool, place: str, ground: Ground) -> None:
    worker = ground.worker(1, work="pausing_order" if "statement" in place else "pausing_before_commit")
    worker.wait_for("half")
    worker.pause()
    rival = ground.consumer(work.order if is_done_meanwhile else failing_order)
    rival.handle(1)
    worker.resume()
    worker.wait_for("end")
    (done,) = worker.told("done")
    assert done["result"] == (None if is_done_meanwhile else 1)
    assert len(worker.told("execution")) == (1 if is_done_meanwhile else 2)
    assert ground.effects() == work.once(1)


class _OnPurposeError(Exception):
    pass


def failing_order(database: Database, position: int) -> None:
    work.order(database, position)
    raise _OnPurposeError


# A rival takes over at each point of an execution.


@pytest.mark.parametrize("outcome", ["commits", "fails"])
@pytest.mark.parametrize(
    "point",
    [
        ("insert", 0, "delay"),  # the marker is on its way
        ("insert", 0, "delay_reply"),  # the marker is in, the reply on its way
        ("insert", 1, "delay"),
        ("insert", 1, "delay_reply"),
        ("update", 0, "delay"),
        ("update", 0, "delay_reply"),
        ("update", 1, "delay"),
        ("update", 1, "delay_reply"),
        ("commitTransaction", 0, "delay"),
        ("commitTransaction", 0, "delay_reply"),  # the commit is done, the reply on its way
        ("commitTransaction", 0, "close"),  # the reply is lost: the commit is sent again
        ("commitTransaction", 0, "cut"),  # the commit never came to the server
    ],
    ids=str,
)
def test_a_rival_at_any_point_does_not_double_or_halve(point: tuple[str, int, Mode], outcome: str, ground: Ground) -> None:
    rival = ground.consumer(work.order if outcome == "commits" else failing_order)
    command, skip, mode = point
    listening = ground.proxy(command=command, skip=skip, mode=mode, on_hit=lambda: rival.handle(1))
    consumer = ground.consumer(uri=listening.uri())
    result = consumer.handle(1)
    assert listening.hits == 1
    assert not consumer.failures
    assert result in (1, None)
    assert ground.effects() == work.once(1)
    assert len(consumer.executions) <= 2
