"""The scenarios in which a consumer's process dies in the middle of a record, and another one gets that record."""

from __future__ import annotations

import signal
from dataclasses import replace

from saferetry.lab.broker import Broker
from saferetry.lab.consumer import URI_VARIABLE, Plan
from saferetry.lab.consuming import Ending, Way
from saferetry.lab.processes import TellingProcess
from saferetry.lab.stage import FaultMissingError, Stage

TAKEOVER_SECONDS = 4.0  # after which plain PyMongo gives up; the dead transaction's locks stay for 60
_PROGRAM = "saferetry.lab.consumer"


def crash_redelivery(stage: Stage) -> int:
    """Kill a Kafka consumer between its handler's two writes; return how often its order is in the database."""
    stage.records.insert_one({"_id": "stock", "taken": 0})
    with Broker() as broker:
        broker.produce("orders", b"1")

        def consume(way: Way) -> Ending:
            plan = _plan(stage, way)
            return _kill_and_redeliver(stage, replace(plan, bootstrap=broker.address), command="update")

        stage.consume_elsewhere(consume)
    return max(stage.records.count_documents({"order": 1}), _taken(stage))


def takeover(stage: Stage) -> int:
    """Kill a consumer whose transaction is about to be committed; return how often the record was done soon after."""
    stage.records.insert_one({"_id": "stock", "taken": 0})

    def consume(way: Way) -> Ending:
        plan = replace(_plan(stage, way), transactional=True, patience=TAKEOVER_SECONDS)
        return _kill_and_redeliver(stage, plan, command="commitTransaction")

    stage.consume_elsewhere(consume)
    return max(stage.records.count_documents({"order": 1}), _taken(stage))


def _plan(stage: Stage, way: Way) -> Plan:
    return Plan(way, stage.app_name, stage.records.database.name, stage.records.name)


def _kill_and_redeliver(stage: Stage, plan: Plan, *, command: str) -> Ending:
    """Kill the first consumer when it sends `command`, which the server never gets; let a second one have the record."""

    def kill() -> None:
        first.kill()

    with (
        stage.proxy(command, "cut", 1, on_hit=kill) as proxy,
        consumer_process(plan, stage.uri_through(proxy)) as first,
    ):
        if (code := first.finish()) != -signal.SIGKILL or proxy.hits != 1:
            raise FaultMissingError(f"the first consumer was not killed at its {command}: exit code {code}{first.trace()}")
    with consumer_process(plan, stage.uri) as second:
        done = second.wait_for("done")
        second.finish()
    for consumer in (first, second):
        stage.note_sent(event["command"] for event in consumer.told("sent"))
    executions = sum(len(consumer.told("execution")) for consumer in (first, second))
    return Ending(executions, done["seconds"], done["seen"])


def consumer_process(plan: Plan, uri: str) -> TellingProcess:
    """Return the process of a consumer that follows a plan."""
    return TellingProcess(_PROGRAM, plan.as_json(), environment={URI_VARIABLE: uri})


def _taken(stage: Stage) -> int:
    stock = stage.records.find_one({"_id": "stock"}) or {}
    return int(stock["taken"])
