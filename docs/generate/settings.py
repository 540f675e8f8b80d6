"""The reference of the settings of `phalanx train --set`, from the configuration's dataclasses."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from phalanx.optim.lr import Rule
from phalanx.train import config as configuration
from phalanx.train.config import RunConfig

GENERATED = "<!-- Generated from the source by `make docs`. Change the configuration in src/phalanx/train, not this page. -->"
INTRODUCTION = """
A recipe is a Python file with one `config = RunConfig(...)`. These are all its settings. Change a value by its path:

```
phalanx train cifar10 --set epochs=5 --set optimizer.momentum=0.95
phalanx train cifar10 --show        # print the resolved recipe and train nothing
```

Defaults are those of `RunConfig`. A recipe may have others.
""".strip()


@dataclasses.dataclass(frozen=True)
class Setting:
    """One value that can be set."""

    path: str
    kind: str
    default: str
    said: str


def settings() -> list[Setting]:
    """All of them, in the order of the dataclasses."""
    describe = getattr(configuration, "describe_settings", None)
    if describe is not None:
        return [Setting(one.name, one.type, one.default, one.sentence) for one in describe()]
    return list(_walk(RunConfig, ""))


def page() -> str:
    """One table for the run, and one for each part of it."""
    found = settings()
    parts = list(dict.fromkeys(setting.path.rpartition(".")[0] for setting in found))
    blocks = ["# Settings", GENERATED, INTRODUCTION]
    for part in parts:
        mine = [setting for setting in found if setting.path.rpartition(".")[0] == part]
        blocks += [
            f"## {part or 'The run'}",
            "\n".join(["| Setting | Type | Default | |", "| --- | --- | --- | --- |", *map(_row, mine)]),
        ]
    return "\n\n".join(blocks) + "\n"


def _row(setting: Setting) -> str:
    cells = [f"`{setting.path}`", f"`{setting.kind}`", f"`{setting.default}`" if setting.default else "", setting.said]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _walk(kind: Any, before: str) -> Iterator[Setting]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        path = f"{before}.{field.name}" if before else field.name
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _walk(hint, path)
        else:
            yield Setting(path, _kind(hint), _default(field), "")


def _kind(hint: Any) -> str:
    """The type as a reader of the command line wants it."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, inner))
    if typing.get_origin(hint) is tuple:
        return "numbers, separated by commas" if inner[0] in (int, float) else "EPOCHSxBATCH, separated by commas"
    if inner:
        return " or ".join("none" if one is type(None) else _kind(one) for one in inner)
    if hint is Rule:
        return "phalanx.lr rule, in a recipe only"
    return {"int": "whole number", "float": "number", "str": "text", "bool": "true, false"}.get(hint.__name__, hint.__name__)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    if isinstance(field.default, tuple):
        return "none" if not field.default else ", ".join(f"{value:.6g}" for value in field.default)
    return str(field.default).lower() if field.default in (None, True, False) else str(field.default)
