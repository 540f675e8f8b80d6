"""What `make test` leaves to CI: the table names tests that exist, and what is kept is spread over all cases."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.thinned import KEPT, left_to_ci

TESTS = Path(__file__).parent


class Case(NamedTuple):
    """What `left_to_ci` reads of a test."""

    nodeid: str


@pytest.mark.parametrize("name", KEPT)
def test_a_thinned_test_exists(name):
    file, _, function = name.partition("::")
    defined = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert function in defined


def test_cases_that_stay_are_evenly_spaced(monkeypatch):
    monkeypatch.setitem(KEPT, "a/test_b.py::test_c", 3)
    monkeypatch.setitem(KEPT, "a/test_b.py::test_none", 0)
    cases = [Case(f"tests/a/test_b.py::test_c[{i}]") for i in range(7)]
    others = [Case("tests/a/test_b.py::test_none"), Case("tests/a/test_b.py::test_other")]
    left = {case.nodeid for case in left_to_ci([*cases, *others])}
    assert {f"tests/a/test_b.py::test_c[{i}]" for i in (1, 3, 5, 6)} | {"tests/a/test_b.py::test_none"} == left
