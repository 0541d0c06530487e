"""K15: forks and cancelled tasks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from saferetry import AsyncMongoClient, Outcome, record
from tests.support import CommandLog, Mongod, app_name, fail_command, wait_until_idle
from tests.support.driving import OPTIONS, RawClient, quick
from tests.support.older import HELD_SECONDS

# PyMongo supports forking with its sync client only. In a process of its own, since forking one with threads (pytest with
# a proxy, say) is a warning of Python's, and PyMongo warns of the client that was opened before.
FORKING = """
import os, sys, warnings
from saferetry import MongoClient, record

warnings.simplefilter("ignore")
uri, database = sys.argv[1:]
client = MongoClient(uri, serverSelectionTimeoutMS=5_000, socketTimeoutMS=5_000)
with record(("t", 0, 68)):
    client[database].c.insert_one({})

def child(number):
    for offset in range(20):
        with record(("t", number, offset)):
            client[database].c.insert_one({})

children = []
for number in range(4):
    process = os.fork()
    if not process:
        code = 1
        try:
            child(number)
            code = 0
        finally:
            os._exit(code)
    children.append(process)
print([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in children])
"""


def test_r68_four_forked_children_share_no_session_and_store_each_document_once(
    admin: RawClient, database_name: str, mongod: Mongod
) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", FORKING, mongod.uri, database_name],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (finished.stdout.strip(), finished.returncode) == ("[0, 0, 0, 0]", 0), finished.stderr
    assert admin[database_name].c.count_documents({}) == 81


async def test_r70_a_cancelled_insert_counts_as_unknown_and_its_repetition_stores_one_document(
    admin: RawClient, database_name: str, mongod: Mongod, log: CommandLog
) -> None:
    name = app_name()
    async with AsyncMongoClient[dict[str, Any]](
        mongod.uri, saferetry=quick(), event_listeners=[log], appName=name, **OPTIONS
    ) as client:
        collection = client[database_name].c
        await client.admin.command("ping")  # connected, so that what is cancelled is no handshake
        async with record(("t", 0, 70)) as current:
            held = fail_command(
                admin, app_name=name, commands=["insert"], blockConnection=True, blockTimeMS=round(HELD_SECONDS * 1000)
            )
            with held:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(collection.insert_one({"x": 1}), 0.2)
                assert [view.outcome for view in current.writes] == [Outcome.UNKNOWN]
            await collection.insert_one({"x": 1})
            assert [view.outcome for view in current.writes] == [Outcome.APPLIED]
        wait_until_idle(admin, name)
    assert log.sends("insert") == 2
    assert [document["x"] for document in admin[database_name].c.find()] == [1]
