"""JSON from files that anybody may have written: plain, finite and flat, or ValueError says what is wrong.

Python's own reader takes NaN and numbers beyond all floats, and raises RecursionError for deep nesting, which callers forget.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any, NoReturn

DEEPEST = 100  # levels of a file of settings or records; what walks through it recursively has room for many more


def loads(text: str | bytes, *, deepest: int | None = DEEPEST) -> Any:
    """The value of a JSON text. With `deepest=None` its nesting is bounded by Python's stack alone: walk through it in a loop."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if deepest is not None and _is_deeper(value, deepest):
        raise ValueError(f"it is nested more than {deepest} deep")
    return value


def brief(value: Any) -> str:
    """`repr(value)` in a few words: a message stays short whatever a file holds."""
    return _SHORT.repr(value)


def read_number(value: Any, name: str, least: float, most: float) -> float:
    """A number within bounds, which is called `name` in the error otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name} is {brief(value)}; a number from {least:g} to {most:g}")
    return value


def read_whole(value: Any, name: str, least: int, most: int) -> int:
    """A whole number within bounds; 1.0 and true are none."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {brief(value)}; a whole number from {least} to {most}")
    return value


def read_text(value: Any, name: str, longest: int = 1000) -> str:
    """A text of not too many characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{name} is {brief(value)}; a text of at most {longest} characters")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond all numbers")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_deeper(value: Any, deepest: int) -> bool:
    level = [value]
    for _ in range(deepest):
        level = [
            inner for own in level if isinstance(own, (list, dict)) for inner in (own.values() if isinstance(own, dict) else own)
        ]
        if not level:
            return False
    return True


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
