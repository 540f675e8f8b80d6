"""The product with one mistake at a time: what the simulation must catch.

    drop          a `wait_event`, `record_stream`, `set_device` ... is deleted
    unrecorded    an event is never recorded, so that nothing waits for it
    swap          two statements that enqueue something change places

A mutant is made from the source of a module and replaces the code of one function, in memory, while it is applied.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# what orders, in which modules; a call of one of these that is a statement is dropped
ORDERING = {"wait_event", "wait_stream", "record_stream", "set_device", "claim_thread"}
MODULES: dict[str, set[str]] = {
    "phalanx.comm.streams": ORDERING | {"synchronize"},
    "phalanx.comm.queued": ORDERING,
    "phalanx.comm.issuer": ORDERING,
    "phalanx.comm.pending": {"join"},
    "phalanx.comm.transports.torch.transport": {"wait"},
    "phalanx.grad.exchange": {"note", "wait"},
    "phalanx.grad.finite": ORDERING,
    "phalanx.grad.reducer": {"wait"},
}
# calls of the same names that order nothing on a device: waits of the host for gloo, and books about the user's writes
OF_THE_HOST = ("message.wait(limit)", "work.wait(", "self.traffic.", "self._untouched.")
ENQUEUES = ORDERING | {
    "record_event",
    "copy_",
    "zero_",
    "logical_or_",
    "HostCopy",
    "work",
    "wait",
    "__enter__",
    "__exit__",
    "append",
}


@dataclass(frozen=True)
class Mutant:
    """One mistake in function `qualname` of `module`."""

    module: str
    qualname: str
    kind: str
    line: int
    text: str
    make: Callable[[], ast.Module] = field(compare=False, repr=False)  # the whole module with the mistake: 0.1 s

    def __str__(self) -> str:
        return f"{self.module.removeprefix('phalanx.')}:{self.line} {self.kind} {self.text}"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The product has the mistake inside."""
        module = importlib.import_module(self.module)
        scratch = types.ModuleType(self.module)
        scratch.__dict__.update({"__file__": module.__file__, "__package__": module.__package__})
        exec(compile(self.make(), str(module.__file__), "exec"), scratch.__dict__)
        target, source = _function(module, self.qualname), _function(scratch, self.qualname)
        before = target.__code__
        target.__code__ = source.__code__
        try:
            yield
        finally:
            target.__code__ = before


def _function(module: Any, qualname: str) -> Any:
    found = module
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name)
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return found


def mutants() -> list[Mutant]:
    """All of them."""
    return [mutant for module, calls in MODULES.items() for mutant in _of_module(module, calls)]


def _of_module(name: str, calls: set[str]) -> Iterator[Mutant]:
    module = importlib.import_module(name)
    tree = ast.parse(inspect.getsource(module))
    for path, qualname, body in _blocks(tree):
        for i, statement in enumerate(body):
            called = _called(statement)
            if isinstance(statement, ast.Expr) and _outermost(statement) in calls and not _is_of_the_host(statement):
                yield _mutant(name, qualname, "drop", statement, tree, path, i, [ast.Pass()])
            if isinstance(statement, ast.Assign) and _outermost(statement) == "record_event":
                never = ast.parse("torch.cuda.Event()", mode="eval").body
                changed = ast.Assign(targets=statement.targets, value=never)
                yield _mutant(name, qualname, "unrecorded", statement, tree, path, i, [changed])
            if (
                i
                and calls >= ORDERING
                and called & ENQUEUES
                and _called(body[i - 1]) & ENQUEUES
                and _is_simple(body[i - 1 : i + 1])
            ):
                yield _mutant(name, qualname, "swap", body[i - 1], tree, path, i - 1, [statement, body[i - 1]], width=2)


def _is_simple(statements: list[ast.stmt]) -> bool:
    return all(isinstance(s, ast.Expr | ast.Assign | ast.For) for s in statements)


def _is_of_the_host(statement: ast.stmt) -> bool:
    return ast.unparse(statement).startswith(OF_THE_HOST)


def _called(statement: ast.stmt) -> set[str]:
    """The names of the methods that it calls."""
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}


def _outermost(statement: Any) -> str:
    value = getattr(statement, "value", None)
    return value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else ""


Path = tuple[tuple[str, int], ...]  # from the module to a block: (field, index) of each statement on the way, and the field


def _blocks(tree: ast.Module) -> Iterator[tuple[Path, str, list[ast.stmt]]]:
    """Every list of statements inside of a function, with the function's name."""

    def walk(node: ast.AST, path: Path, names: tuple[str, ...], inside: bool) -> Iterator[tuple[Path, str, list[ast.stmt]]]:
        for name, value in ast.iter_fields(node):
            if not isinstance(value, list) or not value or not isinstance(value[0], ast.stmt | ast.ExceptHandler):
                continue
            here = (*path, (name, -1))
            if inside and isinstance(value[0], ast.stmt):
                yield here, ".".join(names), value
            for i, child in enumerate(value):
                below = (*path, (name, i))
                if isinstance(child, ast.FunctionDef) and not inside:
                    yield from walk(child, below, (*names, child.name), True)
                elif isinstance(child, ast.ClassDef) and not inside:
                    yield from walk(child, below, (*names, child.name), False)
                else:
                    yield from walk(child, below, names, inside)

    yield from walk(tree, (), (), False)


def _mutant(
    module: str, qualname: str, kind: str, at: ast.stmt, tree: ast.Module, path: Path, i: int, new: list[ast.stmt], width: int = 1
) -> Mutant:
    text = ast.unparse(at) if kind != "swap" else f"{ast.unparse(new[1])} | {ast.unparse(new[0])}"
    make = functools.partial(_changed, tree, path, i, new, width)
    return Mutant(module, qualname, kind, at.lineno, " ".join(text.split())[:90], make)


def _changed(tree: ast.Module, path: Path, i: int, new: list[ast.stmt], width: int) -> ast.Module:
    changed = copy.deepcopy(tree)
    block: Any = changed
    for name, index in path[:-1]:
        block = getattr(block, name)[index]
    getattr(block, path[-1][0])[i : i + width] = copy.deepcopy(new)
    return ast.fix_missing_locations(changed)
