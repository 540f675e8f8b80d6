"""Save an index that took long to build, and load it only if it is intact and matches the current data.

    magic | crc32 of the rest | length of the header | header: JSON with the stamp, facts and [name, dtype, length] | arrays, raw

The **stamp** records what the index was made from (sizes, times). A file with another stamp, or a damaged one, is ignored. It is
stored beside the data, where all ranks and users find it, or else in the user's cache. If neither is writable, nothing is saved.
Writers rename a finished file, so readers never see a partial one, even if many ranks write at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phalanx.data.source import Skipped

MAGIC = b"phalanx index 1\n"
HEAD = struct.Struct("<IQ")
MAX_BYTES = 1 << 30  # ImageNet's has 40 MB
DTYPES = frozenset({"|u1", "<i4", "<i8"})


class Saved(NamedTuple):
    """The contents of an index."""

    stamp: Any  # plain JSON, compared with the current one
    facts: Any  # plain JSON
    arrays: Mapping[str, np.ndarray]  # flat, of one of DTYPES


def places(beside: Path) -> list[Path]:
    """Where the index for `beside` may be stored, the best place first."""
    found = [beside]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):  # no home: no cache
        key = hashlib.sha256(os.fsencode(os.path.realpath(beside))).hexdigest()[:32]
        found.append(Path(cache) / "phalanx" / f"{key}.index")
    return found


def read_skipped(facts: Any) -> Skipped:
    """Read the skipped samples from an index's facts. ValueError if they are not in the saved form."""
    if not isinstance(facts, list | tuple) or len(facts) != 2 or type(facts[0]) is not int:
        raise ValueError("not a number and examples")
    pairs = [tuple(pair) for pair in facts[1]]
    if not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs):
        raise ValueError("examples are pairs of texts")
    return Skipped(facts[0], tuple(pairs))


def save(index: Saved, beside: Path) -> Path | None:
    """Write the index to the first writable place. None if there is none; the index is then rebuilt next time."""
    arrays = {name: np.ascontiguousarray(array) for name, array in index.arrays.items()}
    layout = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    header = json.dumps({"stamp": index.stamp, "facts": index.facts, "arrays": layout}).encode("ascii")
    header += b" " * (-(len(MAGIC) + HEAD.size + len(header)) % 8)  # so that arrays are aligned
    body = b"".join([header, *(_padded(array.tobytes()) for array in arrays.values())])
    for path in places(beside):
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            if path != beside:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError:
            continue
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + HEAD.pack(zlib.crc32(body), len(header)))
                file.write(body)
            os.replace(part, path)
            return path
        except OSError:  # a full disk
            with contextlib.suppress(OSError):
                os.unlink(part)
    return None


def load(beside: Path, stamp: Any) -> Saved | None:
    """Load the index saved for `beside`, if it has this stamp and is intact."""
    for path in places(beside):
        index = read(path)
        if index is not None and index.stamp == stamp:
            return index
    return None


def read(path: Path) -> Saved | None:
    """Read the index in this file, with any stamp. None if it is missing or damaged."""
    try:
        data = _content(path)
    except OSError:
        return None
    begin = len(MAGIC) + HEAD.size
    if len(data) < begin or not data.startswith(MAGIC):
        return None
    checksum, header_length = HEAD.unpack_from(data, len(MAGIC))
    if header_length > len(data) - begin or zlib.crc32(memoryview(data)[begin:]) != checksum:
        return None
    try:
        header = json.loads(data[begin : begin + header_length])
        arrays, offset = {}, begin + header_length
        for name, dtype, length in header["arrays"]:
            if dtype not in DTYPES or type(length) is not int or not 0 <= length <= len(data):
                return None
            arrays[name] = np.frombuffer(data, dtype, length, offset)
            offset += arrays[name].nbytes + -arrays[name].nbytes % 8
        return Saved(header["stamp"], header["facts"], arrays)
    except (ValueError, KeyError, TypeError, RecursionError):  # a checksum does not stop a malicious file
        return None


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 8)


def _content(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # NONBLOCK: a fifo of that name does not hang us
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
            return b""
        return file.read(about.st_size)
