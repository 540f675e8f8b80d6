"""Encodes plain data as bytes and back, exactly and without pickle: nothing that arrives from a network is ever executed.

It handles None, bool, int, float, str, bytes, list, tuple and dict. Each value is one letter, then its length or content.
Tuples stay tuples and dicts keep their order and their keys' types, which JSON and msgpack would lose.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_DEPTH = 200  # deeper data are a cycle, or an attack on the reader's stack

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")


def encode(value: Any) -> bytearray:
    """Return the bytes of `value`. TypeError names the first element that is not plain data."""
    out = bytearray()
    _write(out, value, "the object", 0)
    return out


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the value that `encode` got. Raise ValueError if `data` is anything else."""
    value, end = _read(memoryview(data), 0, 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes left over after the value")
    return value


def _write(out: bytearray, value: Any, where: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TypeError(f"{where} is nested more than {MAX_DEPTH} deep: a cycle?")
    kind = type(value)  # not isinstance: a subclass would arrive as its base
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"T" if value else b"F"
    elif kind is int:
        _write_bytes(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is float:
        out += b"f" + _FLOAT.pack(value)
    elif kind is str:
        _write_bytes(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _write_bytes(out, b"b", value)
    elif kind is list or kind is tuple:
        out += (b"l" if kind is list else b"t") + _LENGTH.pack(len(value))
        for i, item in enumerate(value):
            _write(out, item, f"{where}[{i}]", depth + 1)
    elif kind is dict:
        out += b"d" + _LENGTH.pack(len(value))
        for key, item in value.items():
            _write(out, key, f"a key of {where}", depth + 1)
            _write(out, item, f"{where}[{key!r}]", depth + 1)
    else:
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}: objects sent between ranks are None, bool, int, float, str, "
            "bytes, list, tuple and dict; send tensors with the methods without _obj"
        )


def _write_bytes(out: bytearray, letter: bytes, content: bytes) -> None:
    out += letter + _LENGTH.pack(len(content))
    out += content


def _read(data: memoryview, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    letter = bytes(_take(data, at, 1))
    at += 1
    if letter in b"NTF":
        return {b"N": None, b"T": True, b"F": False}[letter], at
    if letter == b"f":
        return _FLOAT.unpack(_take(data, at, 8))[0], at + 8
    (length,) = _LENGTH.unpack(_take(data, at, 8))
    at += 8
    if letter in b"isb":
        content = bytes(_take(data, at, length))
        at += length
        if letter == b"i":
            return int.from_bytes(content, "little", signed=True), at
        return (content.decode("utf-8", "surrogatepass") if letter == b"s" else content), at
    if letter in b"lt":
        items = []
        for _ in range(length):  # a huge count alone allocates nothing, because the list grows only with the data
            item, at = _read(data, at, depth + 1)
            items.append(item)
        return (items if letter == b"l" else tuple(items)), at
    if letter == b"d":
        pairs = {}
        for _ in range(length):
            key, at = _read(data, at, depth + 1)
            try:
                hash(key)
            except TypeError:
                raise ValueError(f"a dict key is a {type(key).__name__}") from None
            pairs[key], at = _read(data, at, depth + 1)
        return pairs, at
    raise ValueError(f"unknown letter {letter!r} at byte {at - 9}")


def _take(data: memoryview, at: int, count: int) -> memoryview:
    if at + count > len(data):
        raise ValueError(f"cut short: {count} bytes wanted at byte {at} of {len(data)}")
    return data[at : at + count]
