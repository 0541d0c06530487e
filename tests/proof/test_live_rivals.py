"""Executions of one record that are truly at once, and a document that all records write: bounded, and effects once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.proof import work
from tests.proof.conftest import Ground
from tests.support import running

RECORDS = range(1, 9)
MOST_EXECUTIONS = 4  # of one record by one rival, on the average; without waits they would end each other for ever


@pytest.mark.parametrize("rivals", [2, 6, 10])
def test_live_executions_of_one_record_in_several_threads_and_clients_do_it_once(
    rivals: int, ground: Ground, app_name: str, show: Callable[[str], None]
) -> None:
    """Each record is handed to all rivals at the same moment."""
    consumers = [ground.consumer(work.short_pausing_order, appName=app_name) for _ in range(rivals)]
    for consumer in consumers:
        consumer.client.admin.command("ping")
    barrier = threading.Barrier(rivals)
    most_at_once = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal most_at_once
        while not ended.wait(0.005):
            most_at_once = max(most_at_once, len(running(ground.admin, app_name)))

    def handle(number: int) -> list[object]:
        results = []
        for position in RECORDS:
            barrier.wait()
            results.append(consumers[number].handle(position))
        return results

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    with ThreadPoolExecutor(rivals) as pool:
        results = list(pool.map(handle, range(rivals)))
    seconds = time.monotonic() - begin
    ended.set()
    watcher.join()

    executions = sum(len(consumer.executions) for consumer in consumers)
    show(
        f"{rivals} live executions of each of {len(RECORDS)} records: {executions} executions, {seconds / len(RECORDS):.2f} s "
        f"for a record, {most_at_once} operations seen at once"
    )
    assert not [failure for consumer in consumers for failure in consumer.failures]
    assert ground.effects() == work.once(*RECORDS)
    assert all(result in (position, None) for row in results for position, result in zip(RECORDS, row, strict=True))
    assert most_at_once >= 2
    assert executions <= MOST_EXECUTIONS * rivals * len(RECORDS)


@pytest.mark.parametrize("rivals", [2, 6])
def test_live_executions_of_one_record_in_several_processes_do_it_once(
    rivals: int, ground: Ground, show: Callable[[str], None]
) -> None:
    start_at = time.time() + 1 + rivals * 0.5
    workers = [ground.worker(*RECORDS, work="short_pausing_order", start_at=start_at) for _ in range(rivals)]
    for worker in workers:
        worker.wait_for("end")
        assert not worker.told("failed")
    executions = sum(len(worker.told("execution")) for worker in workers)
    show(f"{rivals} processes with the same {len(RECORDS)} records at once: {executions} executions")
    assert ground.effects() == work.once(*RECORDS)
    assert all(event["result"] in (event["position"], None) for worker in workers for event in worker.told("done"))
    assert executions <= MOST_EXECUTIONS * rivals * len(RECORDS)


def test_a_document_that_32_threads_write_exhausts_no_record(ground: Ground, show: Callable[[str], None]) -> None:
    """Every record changes the same document: conflicts are executed again inside the budget of 30 s."""
    threads, each = 32, 10
    consumer = ground.consumer(budget=30, maxPoolSize=threads)
    barrier = threading.Barrier(threads)
    longest = 0.0

    def handle(number: int) -> None:
        nonlocal longest
        barrier.wait()
        for position in range(number * each, (number + 1) * each):
            begin = time.monotonic()
            assert consumer.handle(position) == position
            longest = max(longest, time.monotonic() - begin)

    begin = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(handle, range(threads)))
    seconds = time.monotonic() - begin
    show(
        f"a hot document, {threads} threads, {threads * each} records: {len(consumer.executions)} executions, "
        f"{threads * each / seconds:.0f} records a second, longest {longest:.1f} s"
    )
    assert not consumer.failures
    assert ground.effects() == work.once(*range(threads * each))
