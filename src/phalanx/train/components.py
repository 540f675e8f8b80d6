"""Typed parts of a configuration, and their flat form in `--set` and records.

A component is a frozen dataclass with the options of one network or one update rule, and it builds what it describes. A flat
configuration has a `name` and the options of all components of its table:

    ModelConfig.of(ResNet50Config(zero_gamma=True))  ==  ModelConfig(name="resnet50", zero_gamma=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

Component = TypeVar("Component")


def pick(table: Mapping[str, type[Component]], settings: Any) -> Component:
    """Build the component that `settings.name` names from the settings. None keeps the component's default."""
    kind: Any = table[settings.name]
    values = {f.name: getattr(settings, f.name) for f in fields(kind)}
    made: Component = kind(**{name: value for name, value in values.items() if value is not None})
    return made


def settings_of(table: Mapping[str, type[Any]], component: Any) -> dict[str, Any]:
    """The name and fields of a component, in the flat form."""
    name = next((name for name, kind in table.items() if type(component) is kind), None)
    if name is None:
        kinds = ", ".join(kind.__name__ for kind in table.values())
        raise TypeError(f"{component!r} is none of {kinds}")
    return {"name": name} | {f.name: getattr(component, f.name) for f in fields(component)}


def names_with(table: Mapping[str, type[Any]], field: str) -> list[str]:
    """The components that have this field."""
    return [name for name, kind in table.items() if field in {f.name for f in fields(kind)}]
