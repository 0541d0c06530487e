"""A consumer in a process of its own: `python -m tests.campaign.worker PLAN`, which is asked for one delivery after another."""

from __future__ import annotations

import json
import sys
from typing import Any

from pymongo import common

from saferetry.lab.processes import tell
from tests.campaign.handling import Handler, connect
from tests.campaign.mutants import MUTANTS
from tests.campaign.schedule import Lane, Plan
from tests.support.driving import run_without_waiting


def main() -> None:
    """Handle the deliveries that it is asked for; it tells "ready", and "told" for each."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    common.MIN_HEARTBEAT_INTERVAL = 0.02  # a lost server is looked at again at once
    if plan["mutant"]:
        MUTANTS[plan["mutant"]].start()
    client = connect(Lane(**plan["lane"]), plan["uri"], plan["app_name"], plan["database"], **plan["options"])
    tell("ready")
    for line in sys.stdin:
        handler = Handler(Plan.of_json(json.loads(line)), client, plan["database"])
        handle = handler.decorated(lambda argument, handler=handler: run_without_waiting(handler.work(argument)))
        try:
            told = handler.done(handle(handler.plan))
        except Exception as exc:  # noqa: BLE001 - the parent judges
            told = handler.failed(exc)
        tell("told", **told.as_json())
    client.close()


if __name__ == "__main__":
    main()
