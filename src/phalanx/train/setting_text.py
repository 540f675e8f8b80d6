"""Parse a setting's value from the text of `--set`, by the type of its field."""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal

from phalanx.data import Stage

LARGEST = 1 << 53  # of a whole number: JSON and floats are exact up to here


class ConfigError(ValueError):
    """An invalid configuration. The message says what is valid."""


def parse(text: str, kind: Any, path: str) -> Any:
    """Parse `text` as a value of the annotated type `kind`. Errors begin with `path`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in inner and text.lower() in ("none", ""):
            return None
        (one,) = (k for k in inner if k is not type(None))  # a setting has one type, or is None
        return parse(text, one, path)
    if origin is Literal:
        if text in inner:
            return text
        raise ConfigError(f"{path}={shorten(text)}: one of {', '.join(map(str, inner))}")
    if origin is tuple:
        items = [item for item in text.strip("()[] ").split(",") if item.strip()]
        fixed = inner if inner[-1] is not Ellipsis else inner[:1] * len(items)
        if len(items) != len(fixed):
            raise ConfigError(f"{path}={shorten(text)}: {len(fixed)} values, separated by commas")
        return tuple(parse(item.strip(), one, path) for item, one in zip(items, fixed))
    if kind is bool:
        if text.lower() in ("true", "1", "yes", "on", "false", "0", "no", "off"):
            return text.lower() in ("true", "1", "yes", "on")
        raise ConfigError(f"{path}={shorten(text)}: true or false")
    if kind in (int, float):
        return _number(text, kind, path)
    if kind is str:
        return text
    if kind is Stage:
        return _stage(text, path)
    raise ConfigError(f"{path}: a {getattr(kind, '__name__', kind)} is written in a recipe, not on the command line")


def _number(text: str, kind: Any, path: str) -> Any:
    try:
        number = kind(text.replace("_", ""))
    except ValueError:
        raise ConfigError(f"{path}={shorten(text)}: {'a whole number' if kind is int else 'a number'}") from None
    if kind is int and abs(number) > LARGEST:
        raise ConfigError(f"{path}={shorten(text)}: a whole number of at most {LARGEST:,}")
    if not math.isfinite(number):
        raise ConfigError(f"{path}={shorten(text)}: a finite number")
    return number


def _stage(text: str, path: str) -> Stage:
    """`30x32768` or, with micro-steps, `30x32768x4`."""
    try:
        return Stage(*(int(number.replace("_", "")) for number in text.split("x")))
    except (ValueError, TypeError):
        form = "EPOCHSxBATCH or EPOCHSxBATCHxMICRO_STEPS, such as 30x32768,60x65536"
        raise ConfigError(f"{path}={shorten(text)}: stages are written {form}") from None


def shorten(text: str) -> str:
    """Shorten a user's text for a message."""
    return text if len(text) <= 100 else f"{text[:100]}..."
