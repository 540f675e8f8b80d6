"""JSON from strangers: what it cannot hold as a sensible value is a ValueError, whatever Python's own reader makes of it."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

DIGITS = 19  # of a whole number: no count, size or time of ours needs more than 64 bits
DEPTH = 64  # of lists and objects in each other: who walks through them has a stack, too
DEEP = f"lists and objects are nested more than {DEPTH} deep"


def read_json(text: str | bytes) -> Any:
    """The value of `text`; ValueError also for NaN and infinity, numbers without measure, and nesting without end."""
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_constant)
    except RecursionError:
        raise ValueError(DEEP) from None
    level = [value]
    for _ in range(DEPTH):
        level = [item for found in level for item in _inside(found)]
        if not level:
            return value
    raise ValueError(DEEP)


def _inside(value: Any) -> list[Any]:
    """The lists and objects of a list or an object."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, list | dict)]


def _whole(text: str) -> int:
    if len(text) > DIGITS + text.startswith("-"):
        raise ValueError(f"{text[:DIGITS]}... is a number of {len(text)} digits; at most {DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:DIGITS]} is too large")
    return number


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number")
