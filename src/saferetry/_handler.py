"""The decorator that runs a handler as a record, again where that is safe, and hands over what it cannot do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, overload

import wrapt

from saferetry import _process, _transaction
from saferetry._budget import Budget
from saferetry._handling import BudgetOf, Exceptions, Failure, Handling, KeyOf, Rules, as_tuple
from saferetry._identity import RecordKey
from saferetry._seam import guarded_client
from saferetry._transaction_handling import TransactionHandling
from saferetry.errors import ConfigurationError

# A function's type is kept whole, as that of a static or class method, whichever decorator comes first.
Function = TypeVar("Function", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")

_NAMELESS = ("__main__", "<locals>", "<lambda>")


class Keeping(Protocol):
    """Be the decorator that ``handler(...)`` returns: it keeps the type of what it decorates."""

    def __call__(self, fn: Function, /) -> Function:
        """Return the handler."""


@overload
def handler(fn: Function, /) -> Function: ...


@overload
def handler(
    fn: None = None,
    *,
    key: KeyOf | None = None,
    guarantee: Literal["process", "transaction"] = "process",
    client: Any = None,
    budget: BudgetOf | None = None,
    retry_on: Exceptions = (),
    fatal: Exceptions = (),
    recoverer: Callable[[Failure], Any] | None = None,
    digest: Callable[[Any], bytes] | None = None,
    store_result: bool = False,
    derive_ids: bool = False,
    name: str | None = None,
) -> Keeping: ...


def handler(
    fn: Any = None,
    *,
    key: KeyOf | None = None,
    guarantee: Literal["process", "transaction"] = "process",
    client: Any = None,
    budget: BudgetOf | None = None,
    retry_on: Exceptions = (),
    fatal: Exceptions = (),
    recoverer: Callable[[Failure], Any] | None = None,
    digest: Callable[[Any], bytes] | None = None,
    store_result: bool = False,
    derive_ids: bool = False,
    name: str | None = None,
) -> Any:
    """Run every call of a function as a record.

    Works on functions, coroutine functions, methods, class and static methods, with or without arguments.

    Args:
        fn: The function, where the decorator is used bare.
        key: A key, or a callable that makes it from the handler's first argument (after ``self``).
        guarantee: "process": executed again only while nothing was written. "transaction": its operations and a marker are
            one transaction, so that it can always be executed again, here or after a redelivery.
        client: The guarded client whose settings hold, and whose operations join; else ``SAFERETRY_*`` and the client of the
            first operation.
        budget: Seconds, or a callable from the first argument to seconds or a ``Budget``.
        retry_on: Exceptions after which the handler is executed again, if that is safe.
        fatal: Exceptions after which it never is.
        recoverer: Is given a ``Failure`` for every exception that leaves the record; its result becomes the handler's, and
            should be of the same type.
        digest: With "transaction": makes bytes from the first argument that stand for its content; else the key's digest.
        store_result: With "transaction": a record that was done before returns what it returned then (a BSON value).
        derive_ids: With "process": an insert without ``_id`` gets one from key, name and content, so that a redelivered record
            finds its own document instead of inserting another.
        name: Names the handler in identities and messages; else ``module.qualname``.

    Example:
        >>> @handler(retry_on=ConnectionError)
        ... def on_order(order: dict[str, int]) -> int:
        ...     return order["left"]
        >>> on_order({"left": 3})
        3

    Raises:
        ConfigurationError: An argument or the function cannot work; or, at a call, its key, budget or result.
    """
    if guarantee not in ("process", "transaction"):
        raise ConfigurationError(f'handler: guarantee is {guarantee!r}: give "process" or "transaction"')
    if guarantee == "process" and (digest is not None or store_result):
        raise ConfigurationError('handler: digest and store_result need guarantee="transaction", whose marker holds them')
    if guarantee == "transaction" and key is None:
        raise ConfigurationError('handler: guarantee "transaction" needs key=, which names the record in every process')
    if derive_ids and (key is None or guarantee == "transaction"):
        raise ConfigurationError(
            'handler: derive_ids is for guarantee "process" with key=: ids follow from the key, and a transaction needs none'
        )
    if isinstance(budget, Budget):
        raise ConfigurationError(
            "handler: a Budget counts from its making, here once for all records: give seconds, or a callable that makes one"
        )
    if client is not None and (client := guarded_client(client)) is None:
        raise ConfigurationError("handler: client= must be a saferetry.MongoClient, AsyncMongoClient or a wrapped client")
    if not (key is None or callable(key)):
        key = RecordKey.of(key)
    for argument, given in (("retry_on", retry_on), ("fatal", fatal)):
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in as_tuple(given)):
            raise ConfigurationError(f"handler: {argument} must be an exception class or a tuple of them")

    def decorate(function: Any) -> Any:
        plain = getattr(function, "__func__", function)
        if inspect.iscoroutinefunction(recoverer) and not inspect.iscoroutinefunction(plain):
            raise ConfigurationError("handler: an async recoverer needs an async handler: give a plain function")
        own_name = _name_of(plain, name, has_key=key is not None)
        rules = Rules(
            key, client, budget, retry_on, fatal, recoverer, own_name, digest, store_result, name is not None, derive_ids
        )

        joins = guarantee == "transaction"
        if inspect.iscoroutinefunction(plain):

            async def run_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - wrapt's signature
                own = _without_class(decorated, args)
                work = functools.partial(wrapped, *args, **kwargs)
                if joins and not rules.settings.disabled:
                    return await _transaction.handle_async(TransactionHandling(rules, own, kwargs), work)
                return await _process.handle_async(Handling(rules, own, kwargs), work)

            decorated: Any = wrapt.FunctionWrapper(function, run_async)
            decorated._self_guarantee = guarantee
            return decorated

        def run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - wrapt's signature
            own = _without_class(decorated, args)
            work = functools.partial(wrapped, *args, **kwargs)
            if joins and not rules.settings.disabled:
                return _transaction.handle(TransactionHandling(rules, own, kwargs), work)
            return _process.handle(Handling(rules, own, kwargs), work)

        decorated = wrapt.FunctionWrapper(function, run)
        decorated._self_guarantee = guarantee
        return decorated

    return decorate if fn is None else decorate(fn)


def guarantee_of(function: Any) -> str | None:
    """Return the guarantee of a handler, also of a method of an instance; None: it is none."""
    wrapper = function if isinstance(function, wrapt.FunctionWrapper) else getattr(function, "_self_parent", None)
    return getattr(wrapper, "_self_guarantee", None)


def _without_class(decorated: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without the class, which a classmethod around a handler puts first (from Python 3.13 on)."""
    if not args or not isinstance(args[0], type):
        return args
    members = (member for owner in args[0].__mro__ for member in vars(owner).values())
    is_its_own = any(isinstance(member, classmethod) and member.__func__ is decorated for member in members)
    return args[1:] if is_its_own else args


def _name_of(function: Any, given: str | None, *, has_key: bool) -> str:
    if not callable(function):
        raise ConfigurationError(f"handler: decorate a function, not {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"handler: {getattr(function, '__qualname__', 'this')} is a generator function, whose work runs after the call: "
            "decorate a function that does the work, or open a record inside with 'with record(...)'"
        )
    if given is not None and not (isinstance(given, str) and given):
        raise ConfigurationError("handler: name must be text that is not empty")
    name = given or f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    if given is None and has_key and any(part in name for part in _NAMELESS):
        raise ConfigurationError(
            f"handler: {name} is not the same name in every process, and it is part of the record's identity: give name="
        )
    return name
