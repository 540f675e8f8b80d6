"""List the members of a tar file and where their bytes are. Nothing is ever extracted.

We need our own reader, because `tarfile` is made for trusted archives: it takes a damaged header for the end of the archive
(samples vanish silently), reads extended headers of any size into memory, recurses over chains of them, follows compression, and
returns members that reach beyond the file. This one reads ustar, GNU long names and pax, checks every number against the size
of the file, holds one window of it in memory, and raises `TarError` for an inconsistent archive.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.data.sources.files import read_at

BLOCK = 512
WINDOW = 4 << 10  # bytes read at once: a label with its header, and the header of the next image
MAX_EXTENSION = 64 << 10  # bytes of one extended header: names are short, bombs are not
MAX_EXTENSIONS = 8  # extended headers before one member
MAX_PADDING = 1 << 20  # zeros after the end; writers round up to 10 KiB
ZEROS = bytes(BLOCK)

REGULAR = frozenset(b"0\x007")
WITHOUT_DATA = {ord("1"): "a hard link", ord("2"): "a link", ord("3"): "a device", ord("4"): "a device", ord("6"): "a fifo"}
FOLDER = ord("5")


class TarError(ValueError):
    """Not a tar file, damaged, truncated, or of a kind that cannot be read in place."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive: its bytes are `size` at `offset`. `oddity` says why it is not an ordinary file, if so."""

    name: str
    offset: int
    size: int
    oddity: str = ""


class Window:
    """Reads a file through a window, because headers are small and often close together."""

    def __init__(self, descriptor: int) -> None:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise TarError("not a regular file")
        self.descriptor, self.length = descriptor, about.st_size
        self.start, self.data = 0, b""

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`. Raises if the file is shorter."""
        if offset + size > self.length:
            raise TarError(f"truncated: byte {offset + size} is wanted, the file has {self.length}")
        if not self.start <= offset <= offset + size <= self.start + len(self.data):
            self.start, self.data = offset, read_at(self.descriptor, max(size, WINDOW), offset)
            if len(self.data) < size:
                raise TarError(f"became shorter while it was read: {offset + len(self.data)} of {self.length} bytes")
        return self.data[offset - self.start : offset - self.start + size]


def members(window: Window) -> Iterator[Member]:
    """Yield every member in order, except folders."""
    if window.length == 0:
        raise TarError("an empty file")
    beginning = window.read(0, min(BLOCK, window.length))
    if len(beginning) < BLOCK or (not _sum_is_right(beginning) and beginning != ZEROS):
        raise TarError(_why_not_tar(beginning))
    offset = 0
    while True:
        header = window.read(offset, BLOCK)
        if header == ZEROS:
            _check_end(window, offset)
            return
        long_name, size_of_pax, sparse, extensions = "", None, False, 0
        while (kind := _checked_kind(header, offset)) in b"LKxg":
            size = _number(header, offset)
            extensions += 1
            if size > MAX_EXTENSION or extensions > MAX_EXTENSIONS:
                raise TarError(f"byte {offset}: {extensions} extended headers, the last of {size} bytes: no archive of images")
            payload = window.read(offset + BLOCK, size)
            if kind == ord("L"):
                long_name = _text(payload)
            elif kind == ord("x"):
                records = _pax(payload, offset)
                long_name = records.get("path", long_name)
                size_of_pax = records.get("size", size_of_pax)
                sparse = any(key.startswith("GNU.sparse.") for key in records)
            elif kind == ord("g") and {"path", "size"} & _pax(payload, offset).keys():
                raise TarError(f"byte {offset}: a global header that renames or resizes what follows")
            offset += BLOCK + _rounded(size)
            header = window.read(offset, BLOCK)
            if header == ZEROS:
                raise TarError(f"byte {offset}: an extended header without a member")
        name = long_name or _name(header)
        size = _number(header, offset) if size_of_pax is None else _decimal(size_of_pax, offset)
        if kind == ord("S") or sparse:
            raise TarError(f"byte {offset}: {name!r} is sparse: its bytes do not lie in one piece; repack without --sparse")
        if kind == FOLDER or kind in WITHOUT_DATA:  # no bytes follow, whatever size they claim
            size = 0
        data = offset + BLOCK
        if data + size > window.length:
            raise TarError(f"truncated: {name!r} at byte {offset} has {size} bytes, the file has {window.length}")
        if kind in REGULAR:
            yield Member(name, data, size, _unsafe(name))
        elif kind != FOLDER:
            yield Member(name, data, size, WITHOUT_DATA.get(kind, f"of an unknown type {chr(kind)!r}"))
        offset = data + _rounded(size)


def _checked_kind(header: bytes, offset: int) -> int:
    if not _sum_is_right(header):
        raise TarError(f"byte {offset}: no header where one is expected: damaged, or truncated and written over")
    return header[156]


def _sum_is_right(header: bytes) -> bool:
    claimed = header[148:156].strip(b" \0")
    # the field itself counts as spaces; ancient writers summed signed characters
    if not claimed or not _is_octal(claimed):
        return False
    counted = header[:148] + b" " * 8 + header[156:]
    plain = sum(counted)
    return int(claimed, 8) == plain or int(claimed, 8) == plain - 256 * sum(byte > 127 for byte in counted)


def _why_not_tar(beginning: bytes) -> str:
    for magic, name in ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")):
        if beginning.startswith(magic):
            return f"compressed ({name}): shards are read in place, so unpack it; images are compressed already"
    return "not a tar file: it does not begin with a header"


def _number(header: bytes, offset: int) -> int:
    field = header[124:136]
    if field[0] & 0x80:  # base 256, for sizes beyond 8 GiB; the rest of the first byte is the sign
        value = int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else int.from_bytes(field[1:], "big")
        if field[0] not in (0x80, 0xFF) or value < 0:
            raise TarError(f"byte {offset}: a negative or impossible size")
        return value
    digits = field.strip(b" \0")
    if digits and not _is_octal(digits):
        raise TarError(f"byte {offset}: {field!r} is not a size")
    return int(digits or b"0", 8)


def _is_octal(digits: bytes) -> bool:
    return all(0x30 <= byte <= 0x37 for byte in digits)


def _decimal(text: str, offset: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise TarError(f"byte {offset}: {text[:40]!r} is not a size")
    return int(text)


def _rounded(size: int) -> int:
    return size + -size % BLOCK


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""  # GNU keeps other things there
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(payload: bytes, offset: int) -> dict[str, str]:
    """Records of "LENGTH KEY=VALUE\\n"; the length counts all of it."""
    records: dict[str, str] = {}
    while payload and payload[0] != 0:
        digits, space, _ = payload.partition(b" ")
        length = int(digits) if space and digits.isdigit() and len(digits) < 7 else 0
        record = payload[len(digits) + 1 : length]
        if not record.endswith(b"\n") or length > len(payload) or b"=" not in record:
            raise TarError(f"byte {offset}: a damaged extended header")
        key, _, value = record[:-1].partition(b"=")
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        payload = payload[length:]
    return records


def _unsafe(name: str) -> str:
    """Why a name is suspicious. It does no harm, because nothing is extracted, but it was probably meant to."""
    if name.startswith("/"):
        return "an absolute path"
    if ".." in name.split("/"):
        return "a path that leads out of the archive"
    return "a name with a NUL" if "\0" in name else ""


def _check_end(window: Window, offset: int) -> None:
    rest = window.length - offset
    if rest > MAX_PADDING or window.read(offset, rest).strip(b"\0"):
        raise TarError(f"byte {offset}: {rest} bytes after the end of the archive: were two of them joined by cat?")
