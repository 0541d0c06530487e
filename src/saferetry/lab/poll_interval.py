"""The scenario in which a consumer's retries outlast the time that its broker gives it between two polls."""

from __future__ import annotations

from saferetry.lab.broker import Broker
from saferetry.lab.consumer import Plan
from saferetry.lab.consuming import Ending, Way
from saferetry.lab.failpoints import fail_command
from saferetry.lab.redelivery import consumer_process
from saferetry.lab.stage import Stage

POLL_INTERVAL = 5.0  # seconds; 300 by default
_PAUSE = 2.0  # seconds between the executions of plain PyMongo's retry: three of them are too many
_NOT_PRIMARY = 10107


def poll_interval(stage: Stage) -> int:
    """Let all inserts be refused with an error that passes; return how often the consumer left its group."""
    with Broker() as broker:
        broker.produce("orders", b"1")

        def consume(way: Way) -> Ending:
            plan = Plan(
                way,
                stage.app_name,
                stage.records.database.name,
                stage.records.name,
                bootstrap=broker.address,
                poll_interval=POLL_INTERVAL,
                pause=_PAUSE,
            )
            failing = fail_command(
                stage.admin,
                app_name=stage.app_name,
                commands=["insert"],
                errorCode=_NOT_PRIMARY,
                errorLabels=["RetryableWriteError", "TransientTransactionError"],
            )
            with failing, consumer_process(plan, stage.uri) as consumer:
                done = consumer.wait_for("done")
                left = consumer.wait_for("group")["left"]
                consumer.finish()
            stage.note_sent(event["command"] for event in consumer.told("sent"))
            return Ending(len(consumer.told("execution")), done["seconds"], done["seen"], left_group=left)

        stage.consume_elsewhere(consume)
    return int(bool(stage.ending.left_group))
