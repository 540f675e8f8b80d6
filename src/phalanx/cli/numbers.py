"""Numbers that make sense, as readers for argparse: plain digits within limits, and an error that says what is wanted."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import nan

MOST = 10**15  # of anything that is counted; floats count that far, too


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """A reader of whole numbers within limits; 1e6 is one, too."""
    wanted = f"a whole number, at least {least}" if most == MOST else f"a whole number from {least} to {most}"
    read = number(wanted, lambda x: least <= x <= most and x % 1 == 0)
    return lambda text: int(read(text))


def number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A reader of numbers that make sense. Python's own also take 1_000 and the digits of every script."""

    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else nan
        except ValueError:
            value = nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


not_negative = number("a number, 0 or more", lambda x: 0 <= x <= MOST)
positive = number("a number, more than 0", lambda x: 1 / MOST <= x <= MOST)
at_least_one = whole(1)
part = number("a part, from 0 to 1", lambda x: 0 <= x <= 1)
