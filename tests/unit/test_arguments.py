"""Arguments are bound as ``inspect`` binds them, for every guarded method of the driver, and passed on unchanged."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saferetry._arguments import Parameters
from saferetry._methods import GUARDED
from saferetry._seam import ASYNC_DRIVER_TYPES, DRIVER_TYPES

METHODS = [
    getattr(owner, name)
    for types in (DRIVER_TYPES, ASYNC_DRIVER_TYPES)
    for owner, table in zip(types, GUARDED, strict=True)
    for name in table
    if name in dir(owner)
]
VALUES = st.integers(0, 9)


def expected(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        bound = inspect.signature(method).bind("owner", *args, **kwargs).arguments
    except TypeError:
        return None
    return {name: value for name, value in bound.items() if name != "self"}


@given(method=st.sampled_from(METHODS), data=st.data())
@settings(max_examples=400, deadline=None)
def test_arguments_are_bound_as_inspect_binds_them(method: Any, data: st.DataObject) -> None:
    names = [name for name in inspect.signature(method).parameters if name not in ("self", "args", "kwargs")]
    args = tuple(data.draw(st.lists(VALUES, max_size=len(names) + 1)))
    kwargs = data.draw(st.dictionaries(st.sampled_from([*names, "unknown"]), VALUES, max_size=4))
    wanted = expected(method, args, kwargs)
    if wanted is None:
        with pytest.raises(TypeError):
            Parameters(method).bind("owner", args, kwargs)
    else:
        assert Parameters(method).bind("owner", args, kwargs) == wanted


class Owner:
    """Has methods of both sorts."""

    def plain(self, first: int, second: int = 2, session: Any = None) -> Any:
        return first, second, session

    def starred(self, *args: int, **kwargs: Any) -> Any:
        return args, kwargs


def test_a_call_gets_what_was_bound_and_a_session() -> None:
    plain, starred = Parameters(Owner.plain), Parameters(Owner.starred)
    owner = Owner()
    assert plain.call(owner, plain.bind(owner, (1,), {"second": 3})) == (1, 3, None)
    assert plain.call_in("s", owner, plain.bind(owner, (1,), {})) == (1, 2, "s")
    bound = starred.bind(owner, (1, 2), {"limit": 3})
    assert starred.call(owner, bound) == ((1, 2), {"limit": 3})
    assert starred.call_in("s", owner, bound) == ((1, 2), {"limit": 3, "session": "s"})
    assert bound == {"args": (1, 2), "kwargs": {"limit": 3}}


def test_the_arguments_given_are_not_changed_by_a_session() -> None:
    parameters = Parameters(Owner.plain)
    arguments = parameters.bind(None, (1,), {})
    parameters.call_in("s", Owner(), arguments)
    assert arguments == {"first": 1}
