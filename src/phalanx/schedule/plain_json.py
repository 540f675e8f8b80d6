"""Read untrusted JSON: plain, finite and shallow, or a ValueError that says what is wrong.

Python's own parser accepts NaN and infinite floats, and raises RecursionError for deep nesting, which callers forget to catch.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any, NoReturn

DEEPEST = 100  # levels of nesting in settings or records; far below Python's recursion limit


def loads(text: str | bytes, *, deepest: int | None = DEEPEST) -> Any:
    """Parse JSON. With `deepest=None` only Python's stack limits the nesting: traverse the result in a loop."""
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
    """A shortened `repr(value)`, so that messages stay short for any file."""
    return _SHORT.repr(value)


def read_number(value: Any, name: str, least: float, most: float) -> float:
    """Return a number within bounds. Errors call it `name`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name} is {brief(value)}; give a number from {least:g} to {most:g}")
    return value


def read_whole(value: Any, name: str, least: int, most: int) -> int:
    """Return an integer within bounds; 1.0 and true are rejected."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {brief(value)}; give a whole number from {least} to {most}")
    return value


def read_text(value: Any, name: str, longest: int = 1000) -> str:
    """Return a text of at most `longest` characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{name} is {brief(value)}; give a text of at most {longest} characters")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


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
