"""`saferetry lab --uri`: the same on a server of the user's own, to which nothing else happens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure
from typer.testing import CliRunner, Result

from saferetry import _cli
from saferetry.lab.given import GivenServer, GivenServerError
from saferetry.lab.proxy import Proxy
from saferetry.lab.scenarios import SCENARIOS
from tests.support import Mongod, random_name

PASSWORD = "canary@4111:/?"
ENCODED = "canary%404111%3A%2F%3F"

pytestmark = pytest.mark.xdist_group("lab_given")  # one server with users for all of them


@pytest.fixture(scope="module")
def with_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    """A mongod without test commands, with users: one who may read and write everywhere, and one only in `shop`."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(secrets.token_hex(50))
    key.chmod(0o600)
    with Mongod(parameters={"enableTestCommands": 0}, extra_args=["--auth", "--keyFile", str(key)]) as mongod:
        with MongoClient[dict[str, Any]](mongod.uri) as client:
            client.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        with root_of(mongod) as root:
            root.admin.command("createUser", "tester", pwd=PASSWORD, roles=["readWriteAnyDatabase"])
            root.shop.command("createUser", "clerk", pwd=PASSWORD, roles=["readWrite"])
        yield mongod


def root_of(mongod: Mongod) -> MongoClient[dict[str, Any]]:
    return MongoClient("127.0.0.1", mongod.port, username="root", password=PASSWORD, directConnection=True)


def uri_of(mongod: Mongod, user: str = "tester", path: str = "") -> str:
    return f"mongodb://{user}:{ENCODED}@127.0.0.1:{mongod.port}/{path}"


def lab(*arguments: str, uri: str | None = None) -> Result:
    run = CliRunner().invoke(_cli.app, ["lab", *arguments], env={"LAB_URI": uri})
    for secret in (PASSWORD, ENCODED, "canary"):
        assert secret not in run.output
    return run


def test_what_needs_no_failpoints_is_played_and_what_does_is_said_not_to_be(with_users: Mongod, tmp_path: Path) -> None:
    chosen = ["slow-insert", "lost-reply-inc", "lost-reply-bulk", "update-many", "orphan"]
    with root_of(with_users) as root:
        root.shop.orders.insert_one({"_id": "mine"})
        before = root.list_database_names()
        only = [argument for name in chosen for argument in ("--only", name)]
        run = lab("--json", str(tmp_path / "lab.json"), *only, uri=uri_of(with_users))
        assert run.exit_code == 0, run.output
        assert root.list_database_names() == before
        assert list(root.shop.orders.find()) == [{"_id": "mine"}]
    for name in ("slow-insert", "orphan"):
        assert f"NOT PLAYED: {name}: writes cannot be held in this server's engine" in run.output
    found = json.loads((tmp_path / "lab.json").read_text())
    assert list(found["not_played"]) == ["slow-insert", "orphan"]
    assert [row["name"] for row in found["scenarios"]] == ["lost-reply-inc", "lost-reply-bulk", "update-many"]
    for row in found["scenarios"]:
        assert row["saferetry"]["effects"] == row["saferetry"]["expected"]
        assert row["raw"]["effects"] != row["raw"]["expected"]


@pytest.mark.parametrize(("has_failpoints", "has_javascript"), [(False, True), (True, False), (False, False)])
def test_what_a_server_lacks_is_the_obstacle_of_few_scenarios(has_failpoints: bool, has_javascript: bool) -> None:
    server = SimpleNamespace(has_failpoints=has_failpoints, has_javascript=has_javascript)
    lacking = {scenario.name for scenario in SCENARIOS if scenario.obstacle(server)}
    held = {"slow-insert", "orphan", "poll-interval"}
    assert lacking == (set() if has_failpoints else held) | (set() if has_javascript else {"update-many"})


def test_where_there_are_failpoints_nothing_is_left_out(mongod: Mongod, admin: Any) -> None:
    before = admin.list_database_names()
    run = lab("--uri", mongod.uri, "--only", "slow-insert")
    assert run.exit_code == 0, run.output
    assert "NOT PLAYED" not in run.output
    assert admin.list_database_names() == before


def test_nobody_elses_session_is_ended(with_users: Mongod) -> None:
    with root_of(with_users) as root, root.start_session() as session:
        root.shop.create_collection(random_name("c"))
        with session.start_transaction():
            root.shop.mine.insert_one({"_id": "in a transaction"}, session=session)
            run = lab("--only", "takeover", uri=uri_of(with_users))
            assert run.exit_code == 0, run.output
        assert root.shop.mine.count_documents({}) == 1


def test_with_nothing_to_play_nothing_is_proved(with_users: Mongod) -> None:
    run = lab("--only", "orphan", uri=uri_of(with_users))
    assert run.exit_code == 1
    assert "NOT PLAYED: orphan" in run.output


def test_options_that_are_not_used_are_named(with_users: Mongod) -> None:
    run = lab("--only", "orphan", uri=uri_of(with_users, path="?retryWrites=false&socketTimeoutMS=100&replicaSet=rs0"))
    assert "not used of the connection string: retrywrites, sockettimeoutms;" in " ".join(run.output.split())


def test_a_users_own_database_is_where_he_is_looked_up(with_users: Mongod) -> None:
    with pytest.raises(GivenServerError, match="may not write to a database of the lab's own"):
        GivenServer(uri_of(with_users, "clerk", "shop"))


def test_the_primary_is_found_among_several_hosts(mongod: Mongod) -> None:
    server = GivenServer(f"mongodb://127.0.0.1:1,localhost:{mongod.port}/?replicaSet=rs0")
    assert (server.host, server.port, server.has_failpoints) == ("127.0.0.1", mongod.port, True)
    assert repr(server) == f"GivenServer(127.0.0.1:{mongod.port})"


def test_a_proxy_before_it_asks_for_the_same_user(with_users: Mongod) -> None:
    server = GivenServer(uri_of(with_users))
    with (
        Proxy(server.port, target_host=server.host) as proxy,
        MongoClient[dict[str, Any]](server.uri_through(proxy)) as client,
    ):
        who = client.admin.command("connectionStatus")["authInfo"]["authenticatedUsers"]
    assert who == [{"user": "tester", "db": "admin"}]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (f"mongodb+srv://u:{ENCODED}@cluster.example/", "mongodb+srv means TLS"),
        (f"mongodb://u:{ENCODED}@127.0.0.1:1/?tls=true", "TLS will not do"),
        (f"mongodb://u:{PASSWORD}@127.0.0.1:1/", "no connection string (InvalidURI)"),
        ("mongodb://127.0.0.1:canary/", "no connection string"),
        ("canary", "no connection string"),
        ("mongodb://%2Ftmp%2Fmongodb.sock/", "not UNIX sockets"),
        (f"mongodb://u:{ENCODED}@127.0.0.1:1/", "no primary found: 127.0.0.1:1 does not answer"),
        ("mongodb://nowhere.invalid:1/", "nowhere.invalid has no IPv4 address"),
    ],
)
def test_what_cannot_be_played_on_is_one_clear_error(uri: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saferetry.lab.given._PATIENCE_MS", 200)
    run = lab(uri=uri)
    assert run.exit_code == 1
    assert message in " ".join(run.output.split())
    assert "Traceback" not in run.output


def test_a_wrong_password_is_one_clear_error(with_users: Mongod) -> None:
    run = lab(uri=f"mongodb://tester:{ENCODED}x@127.0.0.1:{with_users.port}/")
    assert run.exit_code == 1
    assert "did not let this user in" in run.output


def test_no_user_where_one_is_needed_is_one_clear_error(with_users: Mongod) -> None:
    run = lab(uri=f"mongodb://127.0.0.1:{with_users.port}/")
    assert run.exit_code == 1
    assert "may not write" in run.output


def test_a_standalone_is_refused_with_the_way_out(standalone: Mongod) -> None:
    run = lab("--uri", f"mongodb://127.0.0.1:{standalone.port}/")
    assert run.exit_code == 1
    assert "is a standalone" in run.output
    assert "rs.initiate()" in run.output


def test_two_servers_are_one_too_many(mongod: Mongod) -> None:
    run = lab("--mongod", str(mongod.binary), uri=mongod.uri)
    assert run.exit_code == 2
    assert "give one of them" in " ".join(run.output.split())


def test_an_error_of_the_servers_is_no_traceback(mongod: Mongod, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OperationFailure("not authorized", 13)

    monkeypatch.setattr("saferetry.lab.report.play", refuse)
    run = lab(uri=mongod.uri)
    assert run.exit_code == 1
    assert run.output.splitlines()[-1] == "saferetry lab: not authorized"
