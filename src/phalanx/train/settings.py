"""Settings by name: every value inside nested dataclasses has a path, such as `optimizer.momentum`, that text can change.

    @dataclass(frozen=True, kw_only=True)
    class OptimizerConfig:
        momentum: float = setting(0.9, "Share of the velocity that each step keeps.")

`paths` lists the values of a configuration, `override` changes some of them as `--set optimizer.momentum=0.8` does, and
`describe` explains them. A field without a sentence is an error there, so the reference is complete.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from phalanx.data import Stage
from phalanx.optim import lr
from phalanx.train.setting_text import ConfigError, parse, shorten

Config = TypeVar("Config")


REQUIRED = dataclasses.MISSING  # the default of a setting that every recipe must give


def setting(default: Any, sentence: str, *, parts: Mapping[str, str] | None = None) -> Any:
    """A dataclass field with a default and a sentence for the reference.

    `parts` has the sentences for a value of a class that belongs to another room and says nothing about its own fields.
    """
    return field(default=default, metadata={"sentence": sentence, "parts": parts or {}})


# ---- what there is -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the settings reference. `default` is written as `--set` takes it; None where a recipe must give a value."""

    name: str
    type: str
    default: str | None
    sentence: str


def describe(kind: type, before: str = "", sentences: Mapping[str, str] | None = None) -> Iterator[Setting]:
    """Every setting of a dataclass and of those inside it, in the order of their fields."""
    hints = typing.get_type_hints(kind)
    for own in dataclasses.fields(kind):
        hint, path = hints[own.name], f"{before}{own.name}"
        parts = own.metadata.get("parts", {})
        if _has_settings(hint):
            yield from describe(hint, f"{path}.", parts)
            continue
        sentence = (sentences or {}).get(own.name) or own.metadata.get("sentence")
        if not sentence:
            raise AssertionError(f"{kind.__name__}.{own.name} has no sentence: write `{own.name} = setting(default, sentence)`")
        missing = own.default is REQUIRED
        yield Setting(path, describe_type(hint), None if missing else as_text(own.default), sentence)
        if hint == tuple[Stage, ...]:
            yield from describe(Stage, f"{path}.N.", parts)


def describe_type(hint: Any) -> str:
    """A type in words, for people who write `--set`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return f"{describe_type(next(kind for kind in inner if kind is not type(None)))}, or none"
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin is tuple:
        if inner[0] is Stage:
            return "EPOCHSxBATCH or EPOCHSxBATCHxMICRO_STEPS, separated by commas"
        return f"{'numbers' if inner[-1] is Ellipsis else f'{len(inner)} numbers'}, separated by commas"
    known = {int: "whole number", float: "number", str: "text", bool: "true or false", lr.Rule: "rule, in a recipe only"}
    return known[hint]


def as_text(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# ---- what is set ---------------------------------------------------------------------------------------------------------------


def paths(config: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that can be set, with its path: `optimizer.momentum`, `stages.0.batch`."""
    parts = _parts(config)
    if parts is None:
        yield before, config
        return
    for name, value in parts.items():
        yield from paths(value, f"{before}.{name}" if before else name)


def override(config: Config, settings: Mapping[str, str]) -> Config:
    """A copy of `config` in which the values at some paths are read from text; ConfigError for an unknown path or a wrong value.

    All of them change at once: a network and its depth make sense together, and may not one after the other.
    """
    known = [path for path, _ in paths(config)]
    for path in settings:
        if path not in known and path != "stages":  # as a whole as well as in parts
            raise ConfigError(_no_such(path, known))
    changed: Config = _override(config, "", settings)
    return changed


def _override(value: Any, at: str, settings: Mapping[str, str]) -> Any:
    """`value`, which has parts and is found at path `at`, with the settings below it."""
    news: dict[str, Any] = {}
    for name, part in (_parts(value) or {}).items():
        path = f"{at}.{name}" if at else name
        below = {other: text for other, text in settings.items() if other.startswith(f"{path}.")}
        if path in settings:
            news[name] = parse(settings[path], typing.get_type_hints(type(value))[name], path)
        elif below:
            news[name] = _override(part, path, below)
    try:
        if isinstance(value, tuple):
            return tuple(news.get(str(i), item) for i, item in enumerate(value))
        return dataclasses.replace(value, **news)
    except (ValueError, TypeError) as error:
        given = " ".join(f"{path}={shorten(text)}" for path, text in settings.items())
        raise ConfigError(f"{given}: {str(error)[:1000]}") from None


def _no_such(path: str, known: list[str]) -> str:
    path = shorten(path)
    close = difflib.get_close_matches(path, known, n=1)
    inside = [other for other in known if other.startswith(f"{path}.")]
    if inside:
        return f"{path} has settings of its own: {', '.join(inside)}"
    return f"{path}: there is no such setting{f' ({close[0]}?)' if close else ''}; there are {', '.join(known)}"


def _parts(value: Any) -> dict[str, Any] | None:
    """The named parts of a value that has settings inside; None for a value that is set as a whole."""
    if _has_settings(type(value)):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return {str(i): item for i, item in enumerate(value)}
    return None


def _has_settings(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and not issubclass(kind, lr.Rule)
