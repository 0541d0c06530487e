"""Documents, filters, results and credentials appear in nothing that saferetry says, sends beside them, or stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import DeleteMany, InsertOne, UpdateOne

import saferetry
from saferetry import Failure, RecordKey, Settings
from saferetry.errors import SafeRetryError
from tests.security.conftest import Place
from tests.support import CommandLog, Mongod, Proxy, app_name, fail_command
from tests.support.driving import quick

CANARY = "canary5eed"
DOCUMENT = {"card": CANARY}
FILTER = {"card": {"$ne": CANARY}}
INC = {"$inc": {"n": 1}, "$set": {"seen": CANARY}}
KEY = RecordKey("orders", 0, 7, group="g", digest=CANARY.encode())
FAULTLESS = 0


@dataclass
class Stage:
    """Where a scene plays."""

    client: Any
    strict: Any
    proxy: Proxy
    place: Place
    failed: Callable[..., Any]

    @property
    def c(self) -> Any:
        """The collection that handlers write to."""
        return self.client[self.place.name].c

    def handle(self, work: Callable[[], Any], **options: Any) -> Any:
        """Handle a record with guarantee "transaction"."""
        given = {"key": KEY, "guarantee": "transaction", "client": self.client, "name": "scene", "budget": 3.0, **options}
        return saferetry.handler(**given)(lambda _: work())(DOCUMENT)


def given_up(stage: Stage) -> None:
    stage.proxy.arm(command="update", times=100)
    with saferetry.record(KEY):
        stage.c.update_one(FILTER, INC)


def passed_over(stage: Stage) -> None:
    stage.proxy.arm(command="insert", times=100)
    with saferetry.record(KEY):
        try:
            stage.c.insert_one(dict(DOCUMENT))
        except Exception:  # noqa: BLE001, S110 - as some handlers do
            pass


def refused_to_repeat(stage: Stage) -> None:
    stage.proxy.arm(command="update", times=1)
    with saferetry.record(KEY):
        try:
            stage.c.update_many(FILTER, INC)
        except Exception:  # noqa: BLE001 - as some handlers do
            stage.c.update_many(FILTER, INC)


def refused_to_execute_again(stage: Stage) -> None:
    def work(_: Any) -> None:
        stage.c.bulk_write([InsertOne(dict(DOCUMENT)), UpdateOne(FILTER, INC), DeleteMany({"card": f"{CANARY}2"})])
        raise KeyError(FAULTLESS)

    saferetry.handler(key=KEY, client=stage.client, name="scene", retry_on=KeyError)(work)(DOCUMENT)


def a_server_error(stage: Stage) -> None:
    with (
        fail_command(stage.place.root, app_name=stage.client.options.pool_options.appname, commands=["update"], errorCode=8000),
        saferetry.record(KEY),
    ):
        stage.c.update_one(FILTER, INC)


def a_strict_refusal(stage: Stage) -> None:
    with saferetry.record(KEY):
        stage.strict[stage.place.name].c.update_many(FILTER, INC)


def a_strict_write_outside(stage: Stage) -> None:
    stage.strict[stage.place.name].c.insert_one(dict(DOCUMENT))


def an_ended_record(stage: Stage) -> None:
    with saferetry.record(KEY):
        late = saferetry.propagate(lambda: stage.c.insert_one(dict(DOCUMENT)))
    late()


def a_key_reused(stage: Stage) -> None:
    stage.handle(lambda: stage.c.insert_one(dict(DOCUMENT)) and None)
    stage.handle(lambda: None, digest=lambda argument: f"{CANARY}, another".encode())


def a_doomed_transaction(stage: Stage) -> None:
    def work() -> None:
        try:
            stage.c.update_one({"_id": 1}, {"$inc": {"text": 1}})
        except Exception:  # noqa: BLE001, S110 - as some handlers do
            pass

    stage.c.update_one({"_id": 1}, {"$set": {"text": CANARY}})
    stage.handle(work)


def a_caught_duplicate(stage: Stage) -> None:
    def work() -> None:
        try:
            stage.c.insert_one({"_id": CANARY})
        except Exception:  # noqa: BLE001, S110 - as some handlers do
            pass
        stage.c.insert_one(dict(DOCUMENT))

    stage.place.root[stage.place.name].c.insert_one({"_id": CANARY})
    stage.handle(work)


def an_unknown_commit(stage: Stage) -> None:
    stage.proxy.arm(command="commitTransaction", times=3)
    stage.handle(lambda: stage.c.insert_one(dict(DOCUMENT)) and None)


def what_cannot_join(stage: Stage) -> None:
    stage.handle(lambda: stage.c.database.command("insert", "c", documents=[dict(DOCUMENT)]))


def an_unstorable_result(stage: Stage) -> None:
    stage.handle(lambda: {CANARY}, store_result=True)


def a_recoverer(stage: Stage) -> None:
    failures: list[Failure] = []

    def work() -> None:
        stage.c.insert_one(dict(DOCUMENT))
        raise KeyError(FAULTLESS)

    stage.handle(work, recoverer=failures.append)
    (failure,) = failures
    stage.failed(failure.key, failure.reason, failure.writes)


def derived_ids(stage: Stage) -> None:
    @saferetry.handler(key=KEY, client=stage.client, name="scene", derive_ids=True)
    def work(_: Any) -> None:
        stage.c.insert_one(dict(DOCUMENT))

    work(DOCUMENT)
    work(DOCUMENT)


SCENES = (
    given_up,
    passed_over,
    refused_to_repeat,
    refused_to_execute_again,
    a_server_error,
    a_strict_refusal,
    a_strict_write_outside,
    an_ended_record,
    a_key_reused,
    a_doomed_transaction,
    a_caught_duplicate,
    an_unknown_commit,
    what_cannot_join,
    an_unstorable_result,
    a_recoverer,
    derived_ids,
)


@pytest.fixture
def said() -> list[str]:
    """What saferetry said, beside its logs."""
    return []


@pytest.fixture
def stage(locked: Mongod, place: Place, log: CommandLog, said: list[str], short_heartbeats: None) -> Iterator[Stage]:
    """A client whose password is a canary too, and a strict one."""
    login = place.user("user", CANARY)

    def connect(uri: str, settings: Settings) -> Any:
        return saferetry.MongoClient[dict[str, Any]](
            uri, saferetry=settings, appName=app_name(), event_listeners=[log], serverSelectionTimeoutMS=2000, **login
        )

    settings = quick(marker_database=place.name, max_attempts=2)
    with (
        Proxy(locked.port) as proxy,
        connect(proxy.uri(), settings) as client,
        connect(locked.uri, quick(strict=True)) as strict,
    ):
        yield Stage(client, strict, proxy, place, lambda *facts: said.append(repr(facts)))


def sayings_of(exc: BaseException) -> Iterator[str]:
    """Yield what is ours in an error and in those that it came from; the driver's own text is the driver's."""
    seen: BaseException | None = exc
    while seen is not None:
        yield from getattr(seen, "__notes__", ())
        if isinstance(seen, SafeRetryError):
            yield f"{seen} {seen!r} {vars(seen)}"
        yield repr(getattr(seen, "saferetry", ""))
        seen = seen.__cause__ or seen.__context__


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_canary_is_found_nowhere(
    scene: Callable[[Stage], None], stage: Stage, said: list[str], log: CommandLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "saferetry")
    try:
        scene(stage)
    except Exception as exc:  # noqa: BLE001 - most scenes end so
        said += sayings_of(exc)
    logs = [caplog.handler.format(record) for record in caplog.records if record.name.startswith("saferetry")]
    tags = [str(command.get("comment")) for command in log.commands()]
    markers = stage.place.root[stage.place.name].saferetry_records
    raw = markers.with_options(codec_options=bson.CodecOptions(document_class=RawBSONDocument))
    stored = [repr(document.raw) for document in raw.find()]
    assert logs + said + stored, "the scene says nothing"
    for text in [*logs, *said, *tags, *stored]:
        assert CANARY not in text
        assert "pwd" not in text


def test_the_marker_holds_a_hash_of_the_payload_only(stage: Stage) -> None:
    stage.handle(lambda: stage.c.insert_one(dict(DOCUMENT)) and None)
    (marker,) = stage.place.documents("saferetry_records")
    assert set(marker) == {"_id", "at", "digest"}
    assert len(marker["digest"]) == 32
    assert marker["_id"] == {"group": "g", "stream": "orders", "partition": 0, "position": 7, "epoch": "", "name": "scene"}


def test_a_pickled_error_of_ours_holds_no_canary(stage: Stage) -> None:
    with pytest.raises(saferetry.errors.RetryRefusedError) as caught:
        refused_to_execute_again(stage)
    assert CANARY not in repr(caught.value.__reduce__())
