"""The documentation is executed: its examples on a real mongod, its links, its tables against the code."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pymongo
import pytest

import saferetry
from saferetry import errors
from saferetry._settings import settings_table
from tests.support import Mongod

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^(?:<!-- no-run: (?P<reason>[^\n]+?) -->\n+)?```python\n(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE_URI = "mongodb://localhost:27017/shop?replicaSet=rs0"
LINK = re.compile(r"\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")
SETTINGS_TABLE = re.compile(
    r"(?P<begin><!-- settings-table:begin -->\n)(?P<table>.*?)(?P<end><!-- settings-table:end -->)", re.DOTALL
)


@dataclass(frozen=True)
class Example:
    """One block of Python on a page."""

    page: Path
    line: int  # of the first line of code
    source: str
    reason: str | None  # why it is not run

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def code(self) -> Any:
        """Compile it, with the page's own line numbers in tracebacks."""
        padded = "\n" * (self.line - 1) + self.source
        return compile(padded, str(self.page), "exec", dont_inherit=True)


def examples(page: Path) -> Iterator[Example]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("source")) + 1
        yield Example(page, line, match["source"], match["reason"])


EXAMPLES = [example for page in PAGES for example in examples(page)]
RUNNABLE_PAGES = [page for page in PAGES if any(example.reason is None for example in examples(page))]


def real_uri(mongod: Mongod) -> str:
    """The server's own URI, with the database and in the form that examples append options to."""
    parts = urlsplit(mongod.uri)
    return f"mongodb://{parts.netloc}/shop?{parts.query or 'retryWrites=true'}"


def with_real_uri(source: str, mongod: Mongod) -> str:
    return source.replace(EXAMPLE_URI, real_uri(mongod))


def empty_shop(mongod: Mongod) -> None:
    with pymongo.MongoClient[dict[str, Any]](mongod.uri) as raw:
        raw.drop_database("shop")


def close_clients(names: dict[str, Any]) -> None:
    for value in list(names.values()):
        if isinstance(value, pymongo.MongoClient):
            value.close()


@contextmanager
def executed(page: Path, mongod: Mongod) -> Iterator[ModuleType]:
    """Execute a page's examples in order, in one module on an empty database; close the clients they leave."""
    empty_shop(mongod)
    module = ModuleType(f"docs_{page.stem.lower()}")
    sys.modules[module.__name__] = module
    try:
        for example in examples(page):
            if example.reason is None:
                real = replace(example, source=with_real_uri(example.source, mongod))
                exec(real.code(), module.__dict__)
        yield module
    finally:
        close_clients(module.__dict__)
        del sys.modules[module.__name__]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_found(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("```python") == len(list(examples(page)))


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_example_compiles(example: Example) -> None:
    example.code()


@pytest.mark.parametrize("page", RUNNABLE_PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, mongod: Mongod) -> None:
    with executed(page, mongod):
        pass


class OrderMessage:
    """A confluent-kafka message as the README's handler sees it."""

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 42

    def key(self) -> bytes:
        return b"A-1"

    def value(self) -> bytes:
        return b"{}"

    def timestamp(self) -> tuple[int, int]:
        return (1, 1_700_000_000_000)

    def headers(self) -> None:
        return None


def test_the_handler_of_the_readme_stores_the_order_and_takes_one_from_stock(mongod: Mongod) -> None:
    with executed(ROOT / "README.md", mongod) as module:
        shop = module.client.shop
        shop.stock.insert_one({"sku": 7, "left": 10})
        module.on_order(OrderMessage())
        assert shop.orders.count_documents({"order": "A-1"}) == 1
        assert shop.stock.find_one({"sku": 7})["left"] == 9


def test_the_pytest_example_passes(tmp_path: Path) -> None:
    page = ROOT / "docs" / "testing.md"
    source = "\n\n".join(example.source for example in examples(page))
    test = tmp_path / "test_example.py"
    test.write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    count = len(re.findall(r"^def test_", source, re.MULTILINE)) + 2  # one of them has three cases
    assert f"{count} passed" in done.stdout, done.stdout


def docstring_examples() -> list[doctest.DocTest]:
    """The `>>>` examples of the package, but for the lab, which has its own extra."""
    names = ["saferetry", *(info.name for info in pkgutil.iter_modules(saferetry.__path__, "saferetry."))]
    modules = [importlib.import_module(name) for name in names if name not in {"saferetry._cli", "saferetry.lab"}]
    return [found for module in modules for found in doctest.DocTestFinder().find(module) if found.examples]


@pytest.mark.parametrize("found", docstring_examples(), ids=lambda found: found.name)
def test_examples_in_docstrings_hold(found: doctest.DocTest, mongod: Mongod) -> None:
    empty_shop(mongod)
    for example in found.examples:
        example.source = with_real_uri(example.source, mongod)
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    try:
        results = runner.run(found, out=told.append, clear_globs=False)
    finally:
        close_clients(found.globs)
    assert results.failed == 0, "".join(told)


def slugs(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        linked = (page.parent / target) if target else page
        assert linked.is_file(), match["target"]
        assert not anchor or anchor in slugs(linked), match["target"]


def test_every_page_is_linked_from_the_overview() -> None:
    overview = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in overview


def test_the_settings_table_is_the_one_the_code_makes() -> None:
    page = ROOT / "docs" / "settings.md"
    text = page.read_text(encoding="utf-8")
    match = SETTINGS_TABLE.search(text)
    assert match is not None
    table = settings_table().strip() + "\n"
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(text[: match.start("table")] + table + text[match.end("table") :], encoding="utf-8")
        return
    assert match["table"] == table, "docs/settings.md is out of date: run `make docs`"


def test_the_tree_of_errors_is_the_one_of_the_code() -> None:
    tree = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").split("```")[1]
    drawn = set(re.findall(r"── (\w+)", tree))
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.SafeRetryError)
    }
    assert drawn == classes
