"""Every public name has an entry in the reference with an example that runs, and the generated pages are up to date."""

from __future__ import annotations

import doctest
import runpy
import sys
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.train.config import RunConfig, describe_settings, paths

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

import api  # noqa: E402
from docstring import parse  # noqa: E402

NAMES = [name for name in api.surface() if not name.is_alias]

# of the names themselves, and of methods that have one
EXAMPLES = [(name.path, parse(name.value.__doc__)) for name in NAMES] + [
    (f"{name.path}.{member}", doc)
    for name in NAMES
    if isinstance(name.value, type)
    for member, value in api.members(name.value)
    if (doc := parse(value.__doc__)).examples
]


@pytest.fixture(scope="module")
def comm():
    with phalanx.create_communicator() as comm:
        yield comm


@pytest.mark.parametrize(("path", "doc"), EXAMPLES, ids=[path for path, _ in EXAMPLES])
def test_the_example_runs(path, doc, comm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doc.examples, f"{path}: its docstring needs an `Example:` with a doctest"
    example = doctest.DocTest(doc.examples, {"phalanx": phalanx, "torch": torch, "comm": comm}, path, None, None, None)
    printed: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append)
    assert not printed, "".join(printed)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_every_argument_is_described(name):
    """Those of functions, and of classes that you make by calling them."""
    described = parse(name.value.__doc__).sections.get("Args")
    if described is None:
        return
    words = {line.partition(":")[0].lstrip("*") for line in described.splitlines() if not line.startswith(" ")}
    drawn = api.signature("", name.value).replace("*", "")
    assert {word for word in words if f"{word}:" not in drawn} == set(), drawn
    taken = {p for p in api.inspect.signature(name.value).parameters if not p.startswith("_")}
    assert taken == words


def test_every_setting_is_in_the_reference():
    described = {setting.name for setting in describe_settings()}
    assert {path for path, _ in paths(RunConfig(name="any"))} <= described


def test_the_generated_pages_are_up_to_date():
    for page, text in runpy.run_path(str(ROOT / "docs" / "generate" / "__main__.py"))["pages"]().items():
        assert (ROOT / "docs" / page).read_text(encoding="utf-8") == text, f"docs/{page}: run `make docs` and commit the page"
