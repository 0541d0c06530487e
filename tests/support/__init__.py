"""What the tests share: the lab's mongod, proxy and failpoints, a log of commands, waiting without sleeping."""

from saferetry.lab.commands import CommandLog
from saferetry.lab.failpoints import (
    fail_command,
    failpoint,
    hold_deletes,
    hold_find_and_modify,
    hold_inserts,
    hold_updates,
)
from saferetry.lab.mongod import Mongod, MongodError
from saferetry.lab.operations import Operation, PeakCopies, copies, running, wait_until_idle
from saferetry.lab.proxy import Mode, Proxy
from tests.support.naming import app_name, random_name
from tests.support.waiting import eventually

__all__ = [
    "CommandLog",
    "Mode",
    "Mongod",
    "MongodError",
    "Operation",
    "PeakCopies",
    "Proxy",
    "app_name",
    "copies",
    "eventually",
    "fail_command",
    "failpoint",
    "hold_deletes",
    "hold_find_and_modify",
    "hold_inserts",
    "hold_updates",
    "random_name",
    "running",
    "wait_until_idle",
]
