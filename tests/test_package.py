"""The package as a user gets it: names, documentation of each, types, and what an import costs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import saferetry

API = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^### `([\w.]+)`$", API, re.MULTILINE)
KAFKA_LIBRARIES = {"aiokafka", "confluent_kafka", "faststream", "kafka"}
OPTIONAL = {"click", "dotenv", "environs", "marshmallow", "mongomock", "rich", "typer", *KAFKA_LIBRARIES}


def test_public_names_are_sorted() -> None:
    assert list(saferetry.__all__) == sorted(saferetry.__all__)


@pytest.mark.parametrize("name", saferetry.__all__)
def test_every_public_name_has_a_docstring_and_a_heading_on_the_api_page(name: str) -> None:
    value = getattr(saferetry, name)
    assert (f"saferetry.{name}" if inspect.ismodule(value) else name) in DOCUMENTED
    assert (value.__doc__ or "").strip()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_heading_of_the_api_page_names_something_public(name: str) -> None:
    if name.startswith("saferetry."):
        module, _, attribute = name.removeprefix("saferetry.").partition(".")
        found: object = importlib.import_module(f"saferetry.{module}")
        names = [attribute] if attribute else []
    else:
        found = saferetry
        names = name.split(".")
        assert names[0] in saferetry.__all__
    for attribute in names:
        found = getattr(found, attribute)


def test_types_are_shipped() -> None:
    assert importlib.resources.files("saferetry").joinpath("py.typed").is_file()


def test_the_distribution_tells_its_licence_and_pythons() -> None:
    metadata = importlib.metadata.metadata("saferetry")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}


@pytest.mark.parametrize("module", ["saferetry", "saferetry.kafka"])
def test_an_import_brings_in_nothing_optional(module: str) -> None:
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not OPTIONAL & set(json.loads(done.stdout))
