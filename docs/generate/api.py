"""The reference of the public names, from their docstrings: one page per module."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from docstring import escaped, parse, to_markdown

import phalanx

MODULES = ("schedule", "data", "lr", "models")

# methods of a Communicator that only the other rooms of Phalanx call (comm/room_verbs.py): they may change without notice
INTERNAL = {"after_step", "hotline", "multiple", "on_host", "patience", "shared_buffer", "survivors"}
INTERNAL |= {"as_one", "compound_async", "has_left", "is_new"}

ASSUMED = (
    "Examples assume `import phalanx, torch` and `comm = phalanx.create_communicator()`. "
    "Each of them runs as a test, on one rank or on ranks that are threads."
)
GENERATED = "<!-- Generated from the source by `make docs`. Change the docstring, not this page. -->"


@dataclass(frozen=True)
class Name:
    """A public name: the module that shows it, and what it is."""

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_alias(self) -> bool:
        """Whether it is a type alias, which has no docstring."""
        return bool(get_args(self.value)) and not isinstance(self.value, type)


def surface() -> list[Name]:
    """Every public name once: those of the modules below `phalanx`, then what only `phalanx` itself has."""
    below = [name for module in MODULES for name in _names_of(f"phalanx.{module}", getattr(phalanx, module))]
    shown = {id(name.value) for name in below}
    own = [Name("phalanx", name, getattr(phalanx, name)) for name in phalanx.__all__]
    own = [name for name in own if not isinstance(name.value, types.ModuleType) and id(name.value) not in shown]
    return own + below


def _names_of(path: str, module: types.ModuleType) -> Iterator[Name]:
    listed = getattr(module, "__all__", None)
    names = listed or [name for name, value in vars(module).items() if _is_own(module, name, value)]
    for name in names:
        value = getattr(module, name)
        if path == "phalanx.models" and isinstance(value, type):
            continue  # made by the functions, with the same arguments
        yield Name(path, name, value)


def _is_own(module: types.ModuleType, name: str, value: Any) -> bool:
    return not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__


# ---- pages -------------------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """File name to Markdown: an index, and a page for each module."""
    names = surface()
    modules = ["phalanx", *(f"phalanx.{module}" for module in MODULES)]
    made = {"reference.md": _index(names, modules)}
    for module in modules:
        mine = sorted((name for name in names if name.module == module), key=lambda name: name.name.lower())
        made[page_of(module)] = _page(module, mine)
    return made


def page_of(module: str) -> str:
    """The file of a module's page."""
    return f"reference-{module.rpartition('.')[2]}.md"


def _index(names: list[Name], modules: list[str]) -> str:
    blocks = ["# API reference", GENERATED, "Every public name. What is not here may change without notice.", ASSUMED]
    for module in modules:
        mine = sorted((name for name in names if name.module == module), key=lambda name: name.name.lower())
        rows = [f"| [`{name.name}`]({page_of(module)}#{name.name.lower()}) | {_summary(name)} |" for name in mine]
        blocks += [f"## {module}", "\n".join(["| Name | |", "| --- | --- |", *rows])]
    return "\n\n".join(blocks) + "\n"


def _summary(name: Name) -> str:
    if name.is_alias:
        return "A type: " + _choices(name.value)
    return escaped(parse(name.value.__doc__).summary).replace("|", "\\|")


def _page(module: str, names: list[Name]) -> str:
    blocks = [f"# {module}", GENERATED, ASSUMED]
    if module == "phalanx":
        blocks.append("Schedules, data, learning-rate rules and networks have pages of their own: see the [index](reference.md).")
    else:
        blocks += to_markdown(parse(getattr(phalanx, module.rpartition(".")[2]).__doc__))
    for name in names:
        blocks += [f"## {name.name}", *_entry(name)]
    return "\n\n".join(blocks) + "\n"


def _entry(name: Name) -> list[str]:
    if name.is_alias:
        return [f"A type: {_choices(name.value)}."]
    doc = parse(name.value.__doc__)
    hidden = isinstance(name.value, type) and "Args" not in doc.sections  # not made by calling it
    blocks = [f"```python\n{name.path if hidden else signature(name.path, name.value)}\n```", *to_markdown(doc)]
    if isinstance(name.value, type):
        for member, value in members(name.value):
            blocks += [f"### {name.name}.{member}", *_member(member, value)]
    return blocks


def _choices(alias: Any) -> str:
    return ", ".join(f"`{choice.__name__ if isinstance(choice, type) else repr(choice)}`" for choice in get_args(alias))


def _member(member: str, value: Any) -> list[str]:
    if isinstance(value, property | cached_property):
        function = value.fget if isinstance(value, property) else value.func
        drawn = f"{member}: {_annotation(inspect.signature(function).return_annotation)}"
    else:
        drawn = signature(member, value, method=True)
    return [f"```python\n{drawn}\n```", *to_markdown(parse(value.__doc__))]


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring of their own that Phalanx wrote, the class's own before its bases'."""
    seen = set(INTERNAL) if kind is phalanx.Communicator else set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("phalanx"):
            continue
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if name.startswith("_") or name in seen or not isinstance(function, Callable | property | cached_property):
                continue
            seen.add(name)
            if function.__doc__ and not isinstance(function, type):
                yield name, function


def signature(name: str, function: Any, *, method: bool = False) -> str:
    """`name(arguments) -> type`, on lines of their own where they are long."""
    found = inspect.signature(function)
    drawn = [p for p in found.parameters.values() if not p.name.startswith("_")][1 if method else 0 :]
    words = _arguments(drawn)
    result = "" if isinstance(function, type) else f" -> {_annotation(found.return_annotation)}"
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){result}"


def _arguments(parameters: list[inspect.Parameter]) -> list[str]:
    words, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        starred = starred or stars == "*"
        kind = "" if p.annotation is p.empty else f": {_annotation(p.annotation)}"
        default = "" if p.default is p.empty else f" = {getattr(p.default, '__name__', None) or repr(p.default)}"
        words.append(f"{stars}{p.name}{kind}{default}")
    return words


def _annotation(value: Any) -> str:
    if isinstance(value, str):
        return value
    return getattr(value, "__name__", None) or str(value)
