"""Copying and pickling does with saferetry what it does with PyMongo, and works for what is made to be carried about."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pymongo
import pytest

import saferetry
from saferetry import Outcome, RecordKey, Settings, WriteView, errors, wrap
from tests.support.driving import done

NOWHERE = "mongodb://127.0.0.1:1"
WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),  # noqa: S301 - our own
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
THINGS: dict[str, Callable[[Any], Any]] = {
    "client": lambda client: client,
    "database": lambda client: client.d,
    "collection": lambda client: client.d.c,
    "cursor": lambda client: client.d.c.find({"n": 1}),
    "options": lambda client: client.options.pool_options,
    "codec_options": lambda client: client.d.c.codec_options,
}


def came_of(way: Callable[[Any], Any], thing: Any) -> tuple[str, Any]:
    """Return what a way comes to: the type that it gives, without its package, or the error."""
    try:
        made = way(thing)
    except Exception as exc:  # noqa: BLE001 - whatever it is
        return type(exc).__name__, None
    return type(made).__name__, made == thing


@pytest.mark.parametrize("half", ["MongoClient", "AsyncMongoClient"])
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("way", WAYS)
async def test_it_is_as_with_plain_pymongo(way: str, thing: str, half: str) -> None:
    made = []
    for client in (
        getattr(pymongo, half)(NOWHERE, connect=False),
        getattr(saferetry, half)(NOWHERE, connect=False),
        wrap(getattr(pymongo, half)(NOWHERE, connect=False)),
    ):
        kind, is_equal = came_of(WAYS[way], THINGS[thing](client))
        made.append((kind, is_equal))
        await done(client.close())
    assert made[1:] == [made[0]] * 2


WRITE = WriteView("insert_one", "d.c", Outcome.UNKNOWN, 1, 2, 50)
CARRIED: tuple[Any, ...] = (
    Settings(max_attempts=2, group="g"),
    RecordKey("orders", 0, 7, group="g", digest=b"x"),
    WRITE,
    errors.ConfigurationError("wrong"),
    errors.DriverMismatchError("wrong"),
    errors.KeyReusedError("again"),
    errors.PartitionLostError("lost"),
    errors.RetryRefusedError("refused", writes=(WRITE,)),
    errors.TakenOverError("taken"),
    errors.UnprotectedWriteError("unprotected"),
    errors.UnsettledWriteError("open", writes=(WRITE,)),
)


@pytest.mark.parametrize("thing", CARRIED, ids=lambda thing: type(thing).__name__)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_carried_about_comes_out_as_it_went_in(way: str, thing: Any) -> None:
    made = WAYS[way](thing)
    assert type(made) is type(thing)
    if isinstance(thing, Exception):
        assert (made.args, vars(made)) == (thing.args, vars(thing))
    else:
        assert made == thing
        assert hash(made) == hash(thing)
