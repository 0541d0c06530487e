"""The sync and the async half of every loop say the same: their syntax trees are equal without async and await."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from saferetry import _attempts, _collections, _handler, _process, _retry, _seam, _transaction

# What stands in the async half for a name of the sync half.
NAMES = {
    "AsyncRetrying": "Retrying",
    "AsyncDatabase": "Database",
    "AsyncClientSession": "ClientSession",
    "AsyncGuardedSession": "GuardedSession",
    "AsyncMongoClient": "MongoClient",
    "DriverAsyncMongoClient": "DriverMongoClient",
    "asyncio": "time",
    "make_async": "make_sync",
    "call_async": "call_sync",
    "run_async": "run",
}
# Helpers that one half needs: `helper(fn, ...)` is `fn(...)`, and `helper(..., value)` is `value`.
CALLERS, WRAPPERS = {"_shielded"}, {"awaited"}


class Synchronous(ast.NodeTransformer):
    """Turn async code into what its sync twin must be."""

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        arguments = {name: getattr(node, name) for name in node._fields}
        return self.visit(ast.FunctionDef(**arguments))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.name = NAMES.get(node.name, node.name.removesuffix("_async"))
        node.returns = None
        return self.generic_visit(without_docstring(node))

    def visit_arg(self, node: ast.arg) -> Any:
        return ast.arg(node.arg)  # without its annotation: Awaitable[Any] stands for Any

    def visit_Await(self, node: ast.Await) -> Any:
        return self.visit(node.value)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> Any:
        return self.visit(ast.With(node.items, node.body))

    def visit_AsyncFor(self, node: ast.AsyncFor) -> Any:
        return self.visit(ast.For(node.target, node.iter, node.body, node.orelse))

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.Name(NAMES.get(node.id, node.id.removesuffix("_async")), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        attribute = ast.Attribute(node.value, node.attr.removesuffix("_async").removeprefix("async_"), node.ctx)
        return self.generic_visit(attribute)

    def visit_Call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in CALLERS:
            return self.visit(ast.Call(node.args[0], node.args[1:], node.keywords))
        if name in WRAPPERS:
            return self.visit(node.args[-1])
        return self.generic_visit(node)


def without_docstring(node: Any) -> Any:
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        node.body = node.body[1:] or [ast.Pass()]
    return node


def functions(module: ModuleType) -> dict[str, ast.AST]:
    """Return the functions and classes at the top of a module by name."""
    tree = ast.parse(inspect.getsource(module))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def shape(node: ast.AST) -> str:
    return ast.dump(Synchronous().visit(node))


TWINS = [
    (_attempts, "attempts", "attempts_async"),
    (_attempts, "more_attempts", "more_attempts_async"),
    (_retry, "write", "write_async"),
    (_retry, "_send", "_send_async"),
    (_retry, "read", "read_async"),
    (_retry, "_ask", "_ask_async"),
    (_retry, "join", "join_async"),
    (_retry, "_look_for", "_look_for_async"),
    (_process, "handle", "handle_async"),
    (_process, "_execute", "_execute_async"),
    (_transaction, "handle", "handle_async"),
    (_transaction, "_execute", "_execute_async"),
    (_transaction, "_begin", "_begin_async"),
    (_transaction, "_begun", "_begun_async"),
    (_transaction, "_begin_with_first_operation", "_begin_with_first_operation_async"),
    (_transaction, "_prepare_markers", "_prepare_markers_async"),
    (_transaction, "_lacks_index", "_lacks_index_async"),
    (_transaction, "_find_committed", "_find_committed_async"),
    (_transaction, "_find_marker", "_find_marker_async"),
    (_transaction, "_ask", "_ask_async"),
    (_transaction, "_store_result", "_store_result_async"),
    (_transaction, "_commit", "_commit_async"),
    (_transaction, "_settle_commit", "_settle_commit_async"),
    (_transaction, "_abort", "_abort_async"),
    (_transaction, "_was_done", "_was_done_async"),
    (_transaction, "_join_outer", "_join_outer_async"),
    (_collections, "_fetch", "_fetch_async"),
    (_seam, "_cancel", "cancel_async"),
]


@pytest.mark.parametrize(("module", "name", "name_async"), TWINS, ids=[name_async for _, _, name_async in TWINS])
def test_both_halves_say_the_same(module: ModuleType, name: str, name_async: str) -> None:
    found = functions(module)
    half = shape(found[name_async]).replace(f"name='{name_async.removesuffix('_async')}'", f"name='{name}'")
    assert half == shape(found[name])


@pytest.mark.parametrize("module", [_attempts, _retry, _process, _transaction, _collections])
def test_every_async_loop_has_its_twin(module: ModuleType) -> None:
    named = {name_async for owner, _, name_async in TWINS if owner is module}
    helpers = CALLERS | WRAPPERS
    assert {n for n, node in functions(module).items() if isinstance(node, ast.AsyncFunctionDef)} - helpers == named


def test_both_sessions_say_the_same() -> None:
    found = functions(_seam)
    bodies = [
        "".join(shape(part) for part in without_docstring(found[name]).body)
        for name in ("GuardedSession", "AsyncGuardedSession")
    ]
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("maker", ["_guarded_method", "_adopting"])
def test_both_wrappers_say_the_same(maker: str) -> None:
    parts = list(ast.walk(functions(_collections)[maker]))
    (asynchronous,) = [node for node in parts if isinstance(node, ast.AsyncFunctionDef)]
    (synchronous,) = [node for node in parts if isinstance(node, ast.FunctionDef) and node.name.endswith("_sync")]
    assert shape(asynchronous) == shape(synchronous)


def test_both_wrappers_of_a_handler_say_the_same() -> None:
    parts = list(ast.walk(functions(_handler)["handler"]))
    (asynchronous,) = [node for node in parts if isinstance(node, ast.AsyncFunctionDef)]
    (synchronous,) = [node for node in parts if isinstance(node, ast.FunctionDef) and node.name == "run"]
    assert shape(asynchronous) == shape(synchronous)


def test_a_difference_is_seen() -> None:
    drifted = "async def write_async(call):\n    return await call.finish(1)"
    assert shape(ast.parse(drifted).body[0]) != shape(ast.parse("def write(call):\n    return call.finish()").body[0])


def test_only_the_loops_sleep() -> None:
    sleeping = set()
    for path in Path(_retry.__file__).parent.glob("_*.py"):
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        if names & {"_world.sleep", "_world.sleep_async"}:
            assert names >= {"_world.sleep", "_world.sleep_async"}
            sleeping.add(path.stem)
        assert path.stem == "_world" or not names & {"time.sleep", "asyncio.sleep"}
    assert sleeping == {"_attempts", "_transaction"}
