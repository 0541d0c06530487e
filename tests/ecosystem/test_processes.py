"""Forked processes and gevent's greenlets, each in a Python of its own, since neither belongs into one with other tests."""

from __future__ import annotations

import subprocess
import sys

from tests.support import Mongod
from tests.support.driving import RawClient

BEGINNING = """
import sys, os, threading, warnings
warnings.simplefilter("ignore")  # PyMongo and Python warn of a client, and of threads, that were there before a fork
from saferetry import MongoClient, RecordKey, Settings, handler, record

uri, database = sys.argv[1:]
client = MongoClient(
    uri, socketTimeoutMS=5_000, serverSelectionTimeoutMS=5_000, saferetry=Settings(marker_database=database, budget_ms=8_000)
)
collection = client[database].c

@handler(key=lambda n: RecordKey("t", 0, n, group="g", digest=b"d"), guarantee="transaction", client=client, name="add")
def add(number):
    collection.insert_one({"number": number})

def forked(work, *args):
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        work(*args)
        code = 0
    except BaseException as exc:
        print(type(exc).__name__, flush=True)
    finally:
        os._exit(code)
"""
CHILDREN = """
add(0)

def child(number):
    for offset in range(5):
        add(1 + 5 * number + offset)
        add(0)

codes = []
for number in range(3):
    codes.append(forked(child, number))
print(codes)
"""
HELD = """
from saferetry._slots import Slots, slot_of

slots, slot = Slots(), slot_of(RecordKey("t", 0, 1, group="g"), "add", database)
assert slots.take(slot, "parent") is None

def take():
    assert slots.try_take_all()
    slots.give_all_back()
    assert slots.take(slot, "child") is None and not slots.try_take_all()
    slots.give_back(slot, "child")

with slots._lock:  # as if another thread were about to take one
    print(forked(take), flush=True)
print(slots.take(slot, "other") is None)
"""
INSIDE = """
def write():
    collection.insert_one({"number": "child"})

def write_in_a_record_of_its_own():
    with record(("t", 1, 1)):
        collection.insert_one({"number": "own"})

@handler(key=("t", 0, 1), name="inside")
def inside(message):
    collection.insert_one({"number": "parent"})
    print(forked(write), forked(write_in_a_record_of_its_own), flush=True)
    collection.insert_one({"number": "parent"})

@handler(key=lambda n: RecordKey("t", 0, n, group="g", digest=b"d"), guarantee="transaction", client=client, name="txn")
def in_a_transaction(number):
    collection.insert_one({"number": "txn"})
    print(forked(write), flush=True)

inside(1)
in_a_transaction(1)
"""
GREENLETS = """
from gevent import monkey
monkey.patch_all()
import gevent, sys
from saferetry import MongoClient, RecordKey, Settings, current_record, handler, propagate, record
from saferetry.lab.proxy import Proxy

uri, database = sys.argv[1:]
port = int(uri.rsplit(":", 1)[1].split("/")[0])
settings = Settings(marker_database=database, backoff_base_ms=1)
with Proxy(port) as proxy, MongoClient(proxy.uri(socketTimeoutMS=5_000), saferetry=settings) as client:
    collection = client[database].c

    @handler(key=lambda n: RecordKey("t", 0, n, group="g", digest=b"d"), guarantee="transaction", client=client, name="add")
    def add(number):
        collection.insert_one({"number": number})
        gevent.sleep(0.01)
        collection.update_one({"number": number}, {"$set": {"done": current_record().key.position}})

    def in_a_record(number):
        with record(("t", 1, number)) as current:
            gevent.sleep(0.01)
            assert current_record() is current
            collection.insert_one({"number": number, "done": number})

    add(0)
    client.admin.command("ping")
    proxy.arm(b"number", "close", 6)
    for work, numbers in ((in_a_record, range(100, 110)), (add, [*range(10), *range(10)])):
        greenlets = [gevent.spawn(work, number) for number in numbers]
        gevent.joinall(greenlets, raise_error=True, timeout=60)
        assert all(greenlet.successful() for greenlet in greenlets)
    with record(("t", 2, 1)) as outer:
        alone, bound = gevent.spawn(current_record), gevent.spawn(propagate(current_record))
        gevent.joinall([alone, bound])
        print(alone.value, bound.value is outer, proxy.hits)
"""


def run(source: str, mongod: Mongod, name: str) -> list[str]:
    """Run a program on a database and return the lines that it printed."""
    finished = subprocess.run(
        [sys.executable, "-c", source, mongod.uri, name], capture_output=True, text=True, timeout=90, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def test_r68_forked_children_do_their_records_once_in_transactions(admin: RawClient, mongod: Mongod, name: str) -> None:
    assert run(BEGINNING + CHILDREN, mongod, name) == ["[0, 0, 0]"]
    assert sorted(document["number"] for document in admin[name].c.find()) == list(range(16))


def test_a_forked_child_does_not_wait_for_the_slots_of_its_parent(mongod: Mongod, name: str) -> None:
    assert run(BEGINNING + HELD, mongod, name) == ["0", "False"]


def test_a_child_forked_inside_a_record_writes_in_one_of_its_own_or_not_at_all(
    admin: RawClient, mongod: Mongod, name: str
) -> None:
    assert run(BEGINNING + INSIDE, mongod, name) == ["ConfigurationError", "1 0", "ConfigurationError", "1"]
    assert sorted(document["number"] for document in admin[name].c.find()) == ["own", "parent", "parent", "txn"]


def test_greenlets_of_gevent_have_records_of_their_own(admin: RawClient, mongod: Mongod, name: str) -> None:
    assert run(GREENLETS, mongod, name) == ["None True 6"]
    documents = list(admin[name].c.find())
    assert sorted(document["number"] for document in documents) == [*range(10), *range(100, 110)]
    assert all(document["done"] == document["number"] for document in documents)
