"""Settings by name: every value inside nested dataclasses has a path, such as `optimizer.momentum`, that text can change.

    @dataclass(frozen=True, kw_only=True)
    class OptimizerConfig:
        momentum: float = setting(0.9, "Share of the velocity that each step keeps.")

`paths` lists the values of a configuration, `override` changes some of them as `--set optimizer.momentum=0.8` does, and
`describe` documents them. A field without a sentence is an error there, so the reference is complete.

A dataclass with a `HEAD` can be set by it alone: `model=resnet50` is `model.name=resnet50`. A dict field holds arguments for what
the head names, with any names: `model.args.width=64`. Changing the head clears the arguments.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from phalanx.data import Stage
from phalanx.optim import lr
from phalanx.train.argument_text import NAME, read_argument, write_argument
from phalanx.train.setting_text import ConfigError, parse, shorten

Config = TypeVar("Config")


REQUIRED = dataclasses.MISSING  # the default of a setting that every recipe must give


def setting(default: Any, sentence: str, *, parts: Mapping[str, str] | None = None, names: Iterable[str] = ()) -> Any:
    """A dataclass field with a default and a sentence for the reference.

    `names` are the values that Phalanx knows for a text that may also be an import path. `parts` has the sentences for the fields
    of a class from another room, which does not describe them itself.
    """
    words = {"sentence": sentence, "parts": parts or {}, "names": tuple(names)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=words)
    return field(default=default, metadata=words)


# ---- what there is -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the settings reference. `default` is written as `--set` takes it; None if a recipe must set it."""

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
        if typing.get_origin(hint) is dict:
            yield Setting(f"{path}.NAME", "number, text, true or false, none, or a list such as [1, 2]", "", sentence)
            continue
        missing = own.default is REQUIRED
        names = own.metadata.get("names")
        kind_of_value = f"{', '.join(names)}, or an import path such as my_package.module:name" if names else describe_type(hint)
        yield Setting(path, kind_of_value, None if missing else as_text(own.default), sentence)
        if hint == tuple[Stage, ...]:
            yield from describe(Stage, f"{path}.N.", parts)


def describe_type(hint: Any) -> str:
    """Describe a type, for users of `--set`."""
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
    """Every value that can be set, with its path: `optimizer.momentum`, `stages.0.batch`, `model.args.width`."""
    parts = _parts(config)
    if parts is None:
        yield before, config
        return
    for name, value in parts.items():
        yield from paths(value, f"{before}.{name}" if before else name)


def texts(config: Any) -> Iterator[tuple[str, str]]:
    """Every value that can be set, as `--set` takes it."""
    open_ = _open_paths(config)
    for path, value in paths(config):
        is_argument = path.rpartition(".")[0] in open_
        yield path, write_argument(value) if is_argument else as_text(value)


def override(config: Config, settings: Mapping[str, str]) -> Config:
    """Copy `config` with the values at some paths parsed from text. ConfigError for an unknown path or a wrong value.

    All of them change at once: a network and its depth may be valid only together.
    """
    known, open_, heads = [path for path, _ in paths(config)], _open_paths(config), dict(_heads(config))
    whole: dict[str, str] = {}
    for path, text in settings.items():
        place = heads.get(path, path)
        is_argument = place.rpartition(".")[0] in open_ and NAME.fullmatch(place.rpartition(".")[2])
        if place not in known and not is_argument and place != "stages":  # as a whole as well as in parts
            raise ConfigError(_no_such(path, known, open_))
        if place in whole:
            raise ConfigError(f"{place} is set twice, also as {place.rpartition('.')[0]}: leave one of them out")
        whole[place] = text
    changed: Config = _override(config, "", whole)
    return changed


def _override(value: Any, at: str, settings: Mapping[str, str]) -> Any:
    """Apply the settings below path `at` to `value`, which has parts."""
    if isinstance(value, dict):
        return value | {path.removeprefix(f"{at}."): read_argument(text, path) for path, text in settings.items()}
    news: dict[str, Any] = {}
    for name, part in (_parts(value) or {}).items():
        path = f"{at}.{name}" if at else name
        below = {other: text for other, text in settings.items() if other.startswith(f"{path}.")}
        if path in settings:
            news[name] = parse(settings[path], typing.get_type_hints(type(value))[name], path)
        elif isinstance(part, dict) and _has_new_head(value, at, settings):
            news[name] = _override({}, path, below)
        elif below:
            news[name] = _override(part, path, below)
    try:
        if isinstance(value, tuple):
            return tuple(news.get(str(i), item) for i, item in enumerate(value))
        return dataclasses.replace(value, **news)
    except (ValueError, TypeError) as error:
        given = " ".join(f"{path}={shorten(text)}" for path, text in settings.items())
        raise ConfigError(f"{given}: {str(error)[:1000]}") from None


def _has_new_head(value: Any, at: str, settings: Mapping[str, str]) -> bool:
    """Whether the settings change what the arguments of `value` belong to."""
    return settings.get(f"{at}.{value.HEAD}", getattr(value, value.HEAD)) != getattr(value, value.HEAD)


def _heads(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """The paths of values that can be set by their head alone, and the paths of the heads."""
    if at and hasattr(type(value), "HEAD"):
        yield at, f"{at}.{value.HEAD}"
    for name, part in (_parts(value) or {}).items():
        yield from _heads(part, f"{at}.{name}" if at else name)


def _open_paths(value: Any, at: str = "") -> set[str]:
    """The paths of dicts, whose keys the user chooses."""
    if isinstance(value, dict):
        return {at}
    return {path for name, part in (_parts(value) or {}).items() for path in _open_paths(part, f"{at}.{name}" if at else name)}


def _no_such(path: str, known: list[str], open_: set[str]) -> str:
    path = shorten(path)
    if path in open_ or path.rpartition(".")[0] in open_:
        return f"{path}: an argument has a name, such as {path if path in open_ else path.rpartition('.')[0]}.width=64"
    close = difflib.get_close_matches(path, known, n=1)
    inside = [other for other in known if other.startswith(f"{path}.")]
    if inside:
        return f"{path} has its own settings: {', '.join(inside)}"
    return f"{path}: there is no such setting{f' ({close[0]}?)' if close else ''}; there are {', '.join(known)}"


def _parts(value: Any) -> dict[str, Any] | None:
    """The named parts of a value that has settings inside; None for a value that is set as a whole."""
    if _has_settings(type(value)):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return {str(i): item for i, item in enumerate(value)}
    return None


def _has_settings(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and not issubclass(kind, lr.Rule)
