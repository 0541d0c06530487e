"""Handlers whose reads decide, delivered once to five times by consumers that crash: as one clean run leaves it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from saferetry.lab.processes import TellingProcess
from tests.proof import deciding
from tests.proof.conftest import Ground
from tests.proof.deciding import DECIDING, RECORDS
from tests.proof.work import MARKERS
from tests.support import Mode

IS_LONG = bool(os.environ.get("PROOF_LONG"))  # make proof
CRASHES = 60 if IS_LONG else 4
COMMANDS_A_LIFE = 24  # at most, from one crash to the next

pytestmark = [pytest.mark.timeout(1800 if IS_LONG else 120)]


def deliveries(rng: random.Random) -> list[int]:
    """Return the positions in the order in which a broker that redelivers hands them out, each one to five times."""
    order: list[int] = []
    times = [rng.randint(1, 5) for _ in range(RECORDS)]
    start = 0
    for position in range(RECORDS):
        order.append(position)
        for _ in range(times[position] - 1):
            start = rng.randint(max(0, position - 3), position)
            order.extend(range(start, position + 1))
    return order


def clean_run(ground: Ground, name: str) -> dict[str, Any]:
    """Return what the database holds after each record was handled once."""
    with ground.consumer(DECIDING[name]) as consumer:
        for position in range(RECORDS):
            consumer.handle(position)
    return deciding.contents(ground.database)


def life(ground: Ground, name: str, left: list[int], rng: random.Random, *, may_crash: bool) -> TellingProcess:
    """Let a worker handle these records; kill it before or after some command, if it may crash and comes that far."""

    def kill() -> None:
        worker.kill()

    mode: Mode = rng.choice(["cut", "close"])
    proxy = ground.proxy(mode=mode, skip=rng.randrange(COMMANDS_A_LIFE), on_hit=kill)
    worker: TellingProcess = ground.worker(*left, uri=proxy.uri() if may_crash else None, work=name)
    return worker


def crashing_run(ground: Ground, name: str, rng: random.Random, most: int) -> tuple[int, int]:
    """Deliver and crash until everything was delivered; return the number of crashes, at most so many, and of executions."""
    left = deliveries(rng)
    crashes = executions = 0
    while left:
        worker = life(ground, name, left, rng, may_crash=crashes < most)
        code = worker.finish()
        assert code in (0, -signal.SIGKILL), worker.trace()
        assert not worker.told("failed"), worker.told("failed")
        assert not [event for event in worker.told("done") if str(event["result"]).startswith("recovered")]
        executions += len(worker.told("execution"))
        left = left[len(worker.told("done")) :]
        crashes += code != 0
    return crashes, executions


@pytest.mark.parametrize("name", DECIDING)
def test_crashes_and_redeliveries_leave_what_one_clean_run_leaves(
    name: str, ground: Ground, show: Callable[[str], None]
) -> None:
    rng = random.Random(name)
    ground.start_anew(deciding.prepare)
    expected = clean_run(ground, name)
    crashes = executions = 0
    while crashes < CRASHES:
        ground.start_anew(deciding.prepare)
        more_crashes, more_executions = crashing_run(ground, name, rng, CRASHES - crashes)
        crashes, executions = crashes + more_crashes, executions + more_executions
        assert deciding.contents(ground.database) == expected
        assert ground.database[MARKERS].count_documents({}) == RECORDS
    show(f"{name}: {crashes} crashes, {executions} executions")
