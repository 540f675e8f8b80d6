"""Parsers of numbers for argparse: plain digits within limits, with errors that say what is expected."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from math import nan

MOST = 10**15  # of anything that is counted; a float is exact that far
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """A parser of whole numbers within limits, including 1e6."""
    wanted = f"a whole number of at least {least}" if most == MOST else f"a whole number from {least} to {most}"
    read = number(wanted, lambda x: least <= x <= most and x % 1 == 0)
    return lambda text: int(read(text))


def number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A parser of numbers for which `fits` holds. Stricter than float(), which also takes 1_000 and non-ASCII digits."""

    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else nan
        except ValueError:
            value = nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


not_negative = number("a number of at least 0", lambda x: 0 <= x <= MOST)
positive = number("a number above 0", lambda x: 1 / MOST <= x <= MOST)
at_least_one = whole(1)
part = number("a number from 0 to 1", lambda x: 0 <= x <= 1)


def parse_size(text: str) -> int:
    """`4K`, `64M`, `1G` or a plain number, in bytes."""
    found = re.fullmatch(r"(\d{1,12})([KMG]?)", text.upper(), re.ASCII)
    if not found:
        raise ValueError(f"{text!r} is not a number of bytes such as 4096, 4K, 64M or 1G")
    return int(found[1]) * UNITS[found[2]]


def size(text: str) -> int:
    """A parser of sizes in bytes for argparse."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
