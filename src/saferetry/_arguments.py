"""The arguments of a call by name, as ``inspect.Signature.bind`` gives them, for methods that are called very often."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any


class Parameters:
    """Know the parameters of a method, the first of which is its owner.

    Args:
        method: A function that takes its owner (``self``) first.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._signature = inspect.signature(method)
        self._owner, *others = self._signature.parameters.values()
        self.names = tuple(parameter.name for parameter in others)
        self._known = frozenset(self.names)
        self._required = frozenset(parameter.name for parameter in others if parameter.default is Parameter.empty)
        self.has_no_stars = all(parameter.kind is Parameter.POSITIONAL_OR_KEYWORD for parameter in others)

    def bind(self, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, those of ``**kwargs`` and ``*args`` under the names of these.

        Raises:
            TypeError: They do not fit.
        """
        if self.has_no_stars and len(args) <= len(self.names):
            arguments = dict(zip(self.names, args, strict=False))
            if not kwargs and len(args) >= len(self._required):
                return arguments
            arguments.update(kwargs)
            is_whole = arguments.keys() <= self._known and self._required <= arguments.keys()
            if is_whole and len(arguments) == len(args) + len(kwargs):
                return arguments
        arguments = dict(self._signature.bind(owner, *args, **kwargs).arguments)
        del arguments[self._owner.name]
        return arguments

    def call(self, owner: Any, arguments: Mapping[str, Any]) -> Any:
        """Call the method."""
        if self.has_no_stars:
            return self._method(owner, **arguments)
        bound = inspect.BoundArguments(self._signature, {self._owner.name: owner, **arguments})
        return self._method(*bound.args, **bound.kwargs)

    def calling(self, arguments: Mapping[str, Any]) -> Callable[[Any], Any]:
        """Return what calls the method, given its owner."""
        if self.has_no_stars:
            return functools.partial(self._method, **arguments)
        return lambda owner: self.call(owner, arguments)

    def call_in(self, session: Any, owner: Any, arguments: Mapping[str, Any]) -> Any:
        """Call the method with a session, which some methods take among ``**kwargs``."""
        if "session" not in self._known:
            return self.call(owner, {**arguments, "kwargs": {**arguments.get("kwargs", {}), "session": session}})
        if self.has_no_stars:
            return self._method(owner, **{**arguments, "session": session})
        return self.call(owner, {**arguments, "session": session})
