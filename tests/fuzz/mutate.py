"""Mutators: from a valid input to one that is nearly valid. Bytes, text with words and numbers, JSON by its structure."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MOST = 64 << 10  # bytes of an input; what grows beyond it is cut

# What numbers should not be. As text, since some of them no Python program would write.
NUMBERS = (
    "0", "-1", "1", "2", "1.5", "-0.0", "0.1", "1e-300", "1e308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "65537",
    "2147483647", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "1000000000", "100000000000",
    "1000000000000000000", "1" + "0" * 400, "9" * 5000, "1e1000000000", "1e-1000000000",
)  # fmt: skip
VALUES = (
    "null", "true", "false", '""', '"1"', '"x"', "[]", "{}", "[[]]", "[0]", '{"a": 1}', '"\\ud800"', '"\\u0000"', '"\\u001b[2J"',
    '"1e1000000000"', '"1/0"', '"S1000000000"', '"O"', '"<f8"', '"float32"', '"../x"', '"' + "y" * 3000 + '"',
    "[" * 150 + "]" * 150, "[" * 900 + "]" * 900, "[" * 20_000 + "]" * 20_000, '{"a":' * 20_000 + "1" + "}" * 20_000,
)  # fmt: skip
INTEGERS = tuple(
    struct.pack(order + kind, value)
    for order in "<>"
    for kind, values in (
        ("H", (0, 1, 2**15, 2**16 - 1, 8000)),
        ("I", (0, 2**31, 2**32 - 1, 10**9)),
        ("Q", (0, 2**63, 2**64 - 1, 10**18)),
    )
    for value in values
)

Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]


# ---- bytes ---------------------------------------------------------------------------------------------------------------------


def flip(rng: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A few bytes changed."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice((0, 255, 127, 128, rng.randrange(256)))
    return bytes(changed)


def cut(rng: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Cut off, at the end or within."""
    start, stop = _slice(rng, data)
    return data[:start] if rng.random() < 0.5 else data[:start] + data[stop:]


def repeat(rng: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A part many times."""
    start, stop = _slice(rng, data, 64)
    return (data[:start] + data[start:stop] * rng.choice((2, 3, 10, 100, 1000)) + data[stop:])[:MOST]


def splice(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """A part of another input, or of this one, in the place of a part."""
    start, stop = _slice(rng, data, 64)
    other = rng.choice((*seeds, data))
    begin, end = _slice(rng, other, 256)
    return (data[:start] + other[begin:end] + data[stop:])[:MOST]


def integers(rng: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A binary number that is odd, written over what is there."""
    word = rng.choice(INTEGERS)
    start = rng.randrange(len(data) + 1)
    return data[:start] + word + data[start + len(word) :]


def _slice(rng: Random, data: bytes, longest: int | None = None) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    room = len(data) - start
    return start, start + rng.randint(0, min(room, longest) if longest else room)


# ---- text ----------------------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_]+|\d+|[^\sA-Za-z_0-9]")


def numbers(rng: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A number replaced by one that is odd."""
    return _replace_one(rng, data, _NUMBER, lambda: rng.choice(NUMBERS).encode())


def words(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """A word replaced by another."""
    other = rng.choice(seeds)
    word = _WORD.search(other, rng.randrange(len(other) + 1))
    return _replace_one(rng, data, _WORD, lambda: word[0] if word else b"")


def lines(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """A line repeated, removed, moved, or taken from another input."""
    found = data.split(b"\n")
    at, other = rng.randrange(len(found)), rng.randrange(len(found))
    match rng.randrange(4):
        case 0:
            found[at:at] = [found[at]] * rng.choice((1, 2, 10, 200))
        case 1:
            del found[at]
        case 2:
            found[at], found[other] = found[other], found[at]
        case _:
            found.insert(at, rng.choice(rng.choice(seeds).split(b"\n")))
    return b"\n".join(found)[:MOST]


def _replace_one(rng: Random, data: bytes, pattern: re.Pattern[bytes], new: Callable[[], bytes]) -> bytes:
    chosen = pattern.search(data, rng.randrange(len(data) + 1)) or pattern.search(data)
    if chosen is None:
        return data
    return data[: chosen.start()] + new() + data[chosen.end() :]


# ---- JSON ----------------------------------------------------------------------------------------------------------------------


def structure(rng: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A value of a JSON text replaced, removed, repeated or moved; what is not JSON stays as it is."""
    try:
        root = [json.loads(data)]
    except (ValueError, RecursionError):
        return data
    raw: dict[str, str] = {}
    owner, key = _spot(rng, root)
    match rng.randrange(6):
        case 0 | 1 | 2:
            raw["\0raw"] = rng.choice(NUMBERS if rng.random() < 0.6 else VALUES)
            owner[key] = "\0raw"
        case 3:
            if owner is not root:
                del owner[key]
        case 4:
            other, place = _spot(rng, root)
            owner[key] = json.loads(json.dumps(other[place]))
        case _:
            if isinstance(owner, list):
                owner[key:key] = [owner[key]] * rng.choice((1, 2, 50))
            else:
                owner[rng.choice((f"{key}x", "", "name", "\0", "é"))] = owner[key]
    text = json.dumps(root[0])
    for name, value in raw.items():
        text = text.replace(json.dumps(name), value)
    return text.encode()[: MOST * 4]


def _spot(rng: Random, root: list[Any]) -> tuple[Any, Any]:
    """A container and a key of it, anywhere below."""
    owner, key = root, 0
    while isinstance(inside := owner[key], dict | list) and inside and rng.random() < 0.85:
        owner, key = inside, rng.choice(list(inside)) if isinstance(inside, dict) else rng.randrange(len(inside))
    return owner, key


BINARY: tuple[Mutator, ...] = (flip, flip, cut, repeat, splice, integers)
TEXT: tuple[Mutator, ...] = (flip, cut, repeat, splice, numbers, numbers, words, lines)
JSON: tuple[Mutator, ...] = (structure, structure, structure, structure, flip, cut, repeat, splice, numbers)
