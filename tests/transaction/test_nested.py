"""Handlers and records inside a handler: one transaction, a marker each, and never a half of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pymongo.errors import AutoReconnect

import saferetry
from saferetry import Failure, RecordKey, current_record
from saferetry.errors import ConfigurationError, KeyReusedError, RetryRefusedError
from tests.support import CommandLog, app_name, fail_command
from tests.support.driving import ProxyFactory, done
from tests.transaction.scene import KEY, Scene, in_transaction, names

INNER = replace(KEY, stream="items", position=1)


class Nest:
    """An outer handler that calls an inner one, both counted."""

    def __init__(self, scene: Scene, client: Any, *, inner: dict[str, Any] | None = None, **outer: Any) -> None:
        self.runs = {"outer": 0, "inner": 0}
        self.inner_result: Any = None
        self.client = client
        self.database = client[scene.name]
        self.during_inner: Callable[[], Any] = lambda: None
        self.after_inner: Callable[[], Any] = lambda: None

        @scene.api.handler(**{"key": INNER, "guarantee": "transaction", "client": client, **(inner or {})})
        async def on_item(database: Any) -> int:
            self.runs["inner"] += 1
            await done(database.c.insert_one({"_id": "inner"}))
            await done(self.during_inner())
            return self.runs["inner"]

        @scene.api.handler(**{"key": KEY, "guarantee": "transaction", "client": client, **outer})
        async def on_order(database: Any) -> None:
            self.runs["outer"] += 1
            await done(database.c.insert_one({"_id": "outer"}))
            self.inner_result = await done(on_item(database))
            await done(self.after_inner())

        self.on_item, self.on_order = on_item, on_order


def ids(scene: Scene) -> list[Any]:
    return [document["_id"] for document in scene.documents()]


def marked(scene: Scene) -> list[str]:
    return sorted(marker["_id"]["name"] for marker in scene.markers())


def fail(error: type[Exception] = LookupError) -> None:
    raise error


async def test_both_markers_are_committed_with_the_effects_of_both(scene: Scene, log: CommandLog) -> None:
    nest = Nest(scene, scene.client(log=log))
    seen = []
    nest.after_inner = lambda: seen.append((ids(scene), marked(scene)))
    await done(nest.on_order(nest.database))
    assert seen == [([], [])]
    assert ids(scene) == ["inner", "outer"]
    assert marked(scene) == ["on_item", "on_order"]
    assert len(in_transaction(log)) == log.sends("commitTransaction") == 1


async def test_the_inner_result_is_returned(scene: Scene) -> None:
    nest = Nest(scene, scene.client())
    await done(nest.on_order(nest.database))
    assert nest.inner_result == 1


async def test_a_redelivered_outer_record_runs_neither(scene: Scene) -> None:
    for _ in range(2):
        nest = Nest(scene, scene.client())
        await done(nest.on_order(nest.database))
    assert nest.runs == {"outer": 0, "inner": 0}


async def test_a_redelivered_inner_record_alone_is_skipped(scene: Scene) -> None:
    nest = Nest(scene, scene.client())
    await done(nest.on_order(nest.database))
    again = Nest(scene, scene.client())
    await done(again.on_item(again.database))
    assert again.runs == {"outer": 0, "inner": 0}
    assert ids(scene) == ["inner", "outer"]


@pytest.mark.parametrize("store", [False, True])
async def test_an_inner_record_that_was_done_alone_before_is_skipped_inside(scene: Scene, store: bool) -> None:
    nest = Nest(scene, scene.client(), inner={"store_result": store})
    await done(nest.on_item(nest.database))
    again = Nest(scene, scene.client(), inner={"store_result": store})
    await done(again.on_order(again.database))
    assert again.runs == {"outer": 1, "inner": 0}
    assert again.inner_result == (1 if store else None)
    assert ids(scene) == ["inner", "outer"]
    assert marked(scene) == ["on_item", "on_order"]


async def test_an_inner_record_called_twice_is_done_once(scene: Scene) -> None:
    nest = Nest(scene, scene.client())
    nest.after_inner = lambda: nest.on_item(nest.database)
    await done(nest.on_order(nest.database))
    assert nest.runs == {"outer": 1, "inner": 1}
    assert ids(scene) == ["inner", "outer"]


async def test_two_inner_records_each_have_a_marker(scene: Scene) -> None:
    @scene.api.handler(
        key=lambda number: replace(INNER, position=number), guarantee="transaction", client=(client := scene.client())
    )
    async def on_item(number: int) -> None:
        await done(client[scene.name].c.insert_one({"_id": number}))

    async def on_order(database: Any) -> None:
        for number in range(3):
            await done(on_item(number))

    await scene.deliver(on_order, client)
    assert ids(scene) == [0, 1, 2]
    assert len(scene.markers()) == 4


async def test_an_inner_record_with_another_content_is_an_error(scene: Scene) -> None:
    nest = Nest(scene, scene.client())
    await done(nest.on_item(nest.database))
    again = Nest(scene, scene.client(), inner={"key": replace(INNER, digest=b"other")})
    with pytest.raises(KeyReusedError):
        await done(again.on_order(again.database))
    assert ids(scene) == ["inner"]
    assert marked(scene) == ["on_item"]


async def test_an_inner_failure_undoes_both(scene: Scene) -> None:
    nest = Nest(scene, scene.client())
    nest.during_inner = fail
    with pytest.raises(LookupError):
        await done(nest.on_order(nest.database))
    assert ids(scene) == marked(scene) == []


async def test_an_outer_failure_undoes_both(scene: Scene) -> None:
    nest = Nest(scene, scene.client())
    nest.after_inner = fail
    with pytest.raises(LookupError):
        await done(nest.on_order(nest.database))
    assert ids(scene) == marked(scene) == []


async def test_an_inner_failure_that_the_outer_catches_is_raised_at_its_end(scene: Scene) -> None:
    client = scene.client()
    nest = Nest(scene, client)
    nest.during_inner = fail

    async def on_batch(database: Any) -> str:
        await done(database.c.insert_one({"_id": "outer"}))
        try:
            await done(nest.on_item(database))
        except LookupError:
            pass
        return "done"

    with pytest.raises(LookupError) as caught:
        await scene.deliver(on_batch, client)
    assert any("could not be committed" in note for note in caught.value.__notes__)
    assert ids(scene) == marked(scene) == []


async def test_after_an_inner_failure_the_outer_can_write_no_more(scene: Scene) -> None:
    client = scene.client()
    nest = Nest(scene, client)
    nest.during_inner = fail

    async def on_batch(database: Any) -> None:
        with pytest.raises(LookupError):
            await done(nest.on_item(database))
        await done(database.c.insert_one({"_id": "after"}))

    with pytest.raises(LookupError):
        await scene.deliver(on_batch, client)
    assert ids(scene) == []


async def test_an_inner_failure_named_in_the_outer_retry_on_is_executed_again_as_a_whole(scene: Scene) -> None:
    nest = Nest(scene, scene.client(), retry_on=LookupError)
    nest.during_inner = lambda: fail() if nest.runs["inner"] < 3 else None
    await done(nest.on_order(nest.database))
    assert nest.runs == {"outer": 3, "inner": 3}
    assert ids(scene) == ["inner", "outer"]


async def test_the_outer_recoverer_has_an_inner_failure(scene: Scene) -> None:
    recovered: list[Failure] = []
    nest = Nest(scene, scene.client(), recoverer=recovered.append)
    nest.during_inner = fail
    await done(nest.on_order(nest.database))
    assert [(failure.reason, failure.key) for failure in recovered] == [("failed", KEY)]
    assert ids(scene) == []


@pytest.mark.parametrize("code", [112, 251, 11601])
async def test_an_error_that_passes_inside_executes_the_whole_again_and_is_no_case_for_the_inner_recoverer(
    scene: Scene, code: int
) -> None:
    recovered: list[Failure] = []
    name = app_name()
    nest = Nest(scene, scene.client(appName=name), inner={"recoverer": recovered.append})
    nest.during_inner = lambda: nest.database.c.update_one({"_id": "inner"}, {"$inc": {"n": 1}})
    with fail_command(scene.admin, app_name=name, commands=["update"], times=2, errorCode=code):
        await done(nest.on_order(nest.database))
    assert recovered == []
    assert nest.runs == {"outer": 3, "inner": 3}
    assert scene.documents() == [{"_id": "inner", "n": 1}, {"_id": "outer"}]


async def test_a_lost_reply_inside_executes_the_whole_again_and_is_no_case_for_the_inner_recoverer(
    scene: Scene, proxy: ProxyFactory
) -> None:
    recovered: list[Failure] = []
    lossy = proxy(command="update", times=1)
    nest = Nest(scene, scene.client(lossy.uri()), inner={"recoverer": recovered.append})
    nest.during_inner = lambda: nest.database.c.update_one({"_id": "inner"}, {"$inc": {"n": 1}})
    await done(nest.on_order(nest.database))
    assert recovered == []
    assert scene.documents() == [{"_id": "inner", "n": 1}, {"_id": "outer"}]


async def test_a_lost_reply_before_the_inner_handler_is_no_case_for_its_recoverer(scene: Scene, proxy: ProxyFactory) -> None:
    recovered: list[Failure] = []
    lossy = proxy(command="update", times=1)
    client = scene.client(lossy.uri())
    nest = Nest(scene, client, inner={"recoverer": recovered.append})

    async def on_batch(database: Any) -> None:
        try:
            await done(database.c.update_one({"_id": "n"}, {"$inc": {"n": 1}}, upsert=True))
        except AutoReconnect:
            pass
        await done(nest.on_item(database))

    await scene.deliver(on_batch, client)
    assert recovered == []
    assert scene.documents() == [{"_id": "inner"}, {"_id": "n", "n": 1}]


async def test_an_inner_handler_without_client_joins(scene: Scene) -> None:
    nest = Nest(scene, scene.client(), inner={"client": None})
    await done(nest.on_order(nest.database))
    assert ids(scene) == ["inner", "outer"]
    assert marked(scene) == ["on_item", "on_order"]


async def test_an_inner_handler_begins_the_transaction_of_an_outer_one_without_client(scene: Scene, log: CommandLog) -> None:
    client = scene.client(log=log)
    nest = Nest(scene, client)

    async def on_batch(database: Any) -> None:
        await done(nest.on_item(database))

    await scene.deliver(on_batch, client, lazily=True)
    assert ids(scene) == ["inner"]
    assert marked(scene) == ["on_batch", "on_item"]
    assert len(in_transaction(log)) == 1


async def test_an_outer_handler_without_client_that_was_done_is_left_at_the_inner_one(scene: Scene) -> None:
    reached: list[Any] = []

    async def on_batch(database: Any) -> None:
        await done(nest.on_item(database))
        reached.append(True)

    for _ in range(2):
        client = scene.client()
        nest = Nest(scene, client)
        await scene.deliver(on_batch, client, lazily=True)
    assert nest.runs["inner"] == 0
    assert reached == [True]


async def test_two_handlers_without_client_are_told_to_name_one(scene: Scene) -> None:
    client = scene.client()
    nest = Nest(scene, client, inner={"client": None})

    async def on_batch(database: Any) -> None:
        await done(nest.on_item(database))

    with pytest.raises(ConfigurationError, match="give client= there or here"):
        await scene.deliver(on_batch, client, lazily=True)
    assert marked(scene) == []


async def test_an_inner_handler_of_another_client_is_refused(scene: Scene, log: CommandLog) -> None:
    nest = Nest(scene, scene.client(log=log))

    async def on_batch(database: Any) -> None:
        await done(database.c.insert_one({"_id": "outer"}))
        await done(nest.on_item(nest.database))

    with pytest.raises(ConfigurationError, match="second client"):
        await scene.deliver(on_batch)
    assert names(log) == []
    assert ids(scene) == []


async def test_inner_handlers_at_once_all_join(scene: Scene) -> None:
    client = scene.client()

    @scene.api.handler(key=lambda number: replace(INNER, position=number), guarantee="transaction", client=client)
    async def on_item(number: int) -> None:
        await done(client[scene.name].c.insert_one({"_id": number}))

    async def on_batch(database: Any) -> None:
        async def one(number: int) -> None:
            await done(on_item(number))

        await scene.at_once(one, 4)

    await scene.deliver(on_batch, client)
    assert ids(scene) == [0, 1, 2, 3]
    assert len(scene.markers()) == 5


async def test_inner_handlers_at_once_begin_one_transaction_of_an_outer_one_without_client(
    scene: Scene, log: CommandLog
) -> None:
    client = scene.client(log=log)

    @scene.api.handler(key=lambda number: replace(INNER, position=number), guarantee="transaction", client=client)
    async def on_item(number: int) -> None:
        await done(client[scene.name].c.insert_one({"_id": number}))

    async def on_batch(database: Any) -> None:
        async def one(number: int) -> None:
            await done(on_item(number))

        await scene.at_once(one, 4)

    await scene.deliver(on_batch, client, lazily=True)
    assert ids(scene) == [0, 1, 2, 3]
    assert len(scene.markers()) == 5
    assert len(in_transaction(log)) == 1


async def test_an_inner_result_that_is_no_bson_undoes_both(scene: Scene) -> None:
    client = scene.client()

    @scene.api.handler(key=INNER, guarantee="transaction", client=client, store_result=True)
    async def on_item(database: Any) -> object:
        await done(database.c.insert_one({"_id": "inner"}))
        return object()

    async def on_batch(database: Any) -> None:
        await done(database.c.insert_one({"_id": "outer"}))
        try:
            await done(on_item(database))
        except ConfigurationError:
            pass

    with pytest.raises(ConfigurationError, match="store_result cannot store"):
        await scene.deliver(on_batch, client)
    assert ids(scene) == marked(scene) == []


async def test_an_inner_record_done_by_another_process_meanwhile_executes_the_whole_again(scene: Scene) -> None:
    nest = Nest(scene, scene.client())
    other = Nest(scene, scene.client())

    async def on_batch(database: Any) -> None:
        await done(database.c.insert_one({"_id": "outer"}))
        if scene.runs == 1:
            identity = {"group": "g", "stream": "items", "partition": 0, "position": 1, "epoch": "", "name": "on_item"}
            scene.there.saferetry_records.insert_one({"_id": identity})
        await done(nest.on_item(database))

    await scene.deliver(on_batch, nest.client)
    assert (scene.runs, nest.runs["inner"], other.runs["inner"]) == (2, 0, 0)
    assert ids(scene) == ["outer"]
    assert marked(scene) == ["on_batch", "on_item"]


# guarantee "process" and records inside


async def test_the_writes_of_a_process_handler_inside_join(scene: Scene, log: CommandLog) -> None:
    @scene.api.handler(key=INNER)
    async def on_item(database: Any) -> str:
        await done(database.c.insert_one({"_id": "inner"}))
        return "done"

    results = []

    async def on_order(database: Any) -> None:
        results.append(await done(on_item(database)))
        if scene.runs == 1:
            raise LookupError

    await scene.deliver(on_order, scene.client(log=log), retry_on=LookupError)
    assert results == ["done", "done"]
    assert ids(scene) == ["inner"]
    assert len(scene.markers()) == 1
    assert log.sends("commitTransaction") == 1


async def test_a_process_handler_inside_is_not_executed_again_by_itself_after_a_write(scene: Scene) -> None:
    runs = []

    @scene.api.handler(key=INNER, retry_on=LookupError)
    async def on_item(database: Any) -> None:
        runs.append(True)
        await done(database.c.insert_one({"_id": len(runs)}))
        raise LookupError

    async def on_order(database: Any) -> None:
        await done(on_item(database))

    with pytest.raises(RetryRefusedError):
        await scene.deliver(on_order)
    assert len(runs) == 1
    assert ids(scene) == marked(scene) == []


async def test_a_process_handler_inside_with_derived_ids_joins(scene: Scene) -> None:
    @scene.api.handler(key=INNER, derive_ids=True)
    async def on_item(database: Any) -> None:
        await done(database.c.insert_one({"n": 1}))

    async def on_order(database: Any) -> None:
        await done(on_item(database))
        await done(on_item(database))

    await scene.deliver(on_order)
    await scene.deliver(on_order)
    assert len(scene.documents()) == 2


async def test_an_error_that_passes_is_no_case_for_the_recoverer_of_a_process_handler_inside(scene: Scene) -> None:
    recovered: list[Failure] = []
    name = app_name()

    @scene.api.handler(key=INNER, recoverer=recovered.append)
    async def on_item(database: Any) -> None:
        await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True))

    async def on_order(database: Any) -> None:
        await done(on_item(database))

    with fail_command(scene.admin, app_name=name, commands=["update"], times=2, errorCode=112):
        await scene.deliver(on_order, scene.client(appName=name))
    assert recovered == []
    assert scene.documents() == [{"_id": 1, "n": 1}]


async def test_the_recoverer_of_a_process_handler_inside_has_an_error_of_its_own(scene: Scene) -> None:
    recovered: list[Failure] = []

    @scene.api.handler(key=INNER, recoverer=recovered.append)
    async def on_item(database: Any) -> None:
        raise LookupError

    async def on_order(database: Any) -> None:
        await done(on_item(database))
        await done(database.c.insert_one({"_id": 1}))

    await scene.deliver(on_order)
    assert [failure.reason for failure in recovered] == ["failed"]
    assert ids(scene) == [1]


async def test_writes_in_a_record_inside_join(scene: Scene, log: CommandLog) -> None:
    async def on_order(database: Any) -> None:
        with saferetry.record(INNER, name="inner") as record:
            await done(database.c.insert_one({"_id": 1}))
            assert current_record() is record
        await done(database.c.insert_one({"_id": 2}))
        if scene.runs == 1:
            raise LookupError

    await scene.deliver(on_order, scene.client(log=log), retry_on=LookupError)
    assert ids(scene) == [1, 2]
    assert len(in_transaction(log)) == 2
    assert log.sends("commitTransaction") == 1


async def test_a_record_inside_cannot_do_what_the_transaction_cannot(scene: Scene) -> None:
    async def on_order(database: Any) -> None:
        with saferetry.record(INNER):
            await done(database.c.create_index("n"))

    with pytest.raises(ConfigurationError, match="cannot join"):
        await scene.deliver(on_order)


async def test_repeatable_inside_changes_nothing(scene: Scene, proxy: ProxyFactory) -> None:
    lossy = proxy(command="update", times=1)

    async def on_order(database: Any) -> None:
        with saferetry.repeatable():
            await done(database.c.update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True))

    await scene.deliver(on_order, scene.client(lossy.uri()))
    assert scene.documents() == [{"_id": 1, "n": 1}]


async def test_a_transaction_handler_inside_a_record_commits_by_itself(scene: Scene) -> None:
    client = scene.client()

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({"_id": 1}))

    with pytest.raises(LookupError), saferetry.record(RecordKey("outer")):
        await scene.deliver(on_order, client)
        raise LookupError
    assert ids(scene) == [1]
    assert len(scene.markers()) == 1


async def test_a_process_handler_is_not_executed_again_after_a_transaction_handler_inside_it(scene: Scene) -> None:
    client = scene.client()

    async def on_order(database: Any) -> None:
        await done(database.c.insert_one({}))

    @scene.api.handler(retry_on=LookupError)
    async def outer(database: Any) -> None:
        await scene.deliver(on_order, client)
        raise LookupError

    if not scene.api.is_async:
        with pytest.raises(RetryRefusedError):
            outer(client[scene.name])
    else:
        with pytest.raises(RetryRefusedError):
            await outer(client[scene.name])
    assert len(scene.documents()) == 1
