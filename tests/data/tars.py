"""Tar files by hand, right and wrong in every way: headers with any field, for tests of the reader."""

from pathlib import Path

BLOCK = 512
END = bytes(2 * BLOCK)


def header(name, size, kind="0", *, raw_size=None, magic=b"ustar\x0000", prefix=b"", link=b"", raw_sum=None):
    """One header; `raw_size` and `raw_sum` are fields as they shall stand there."""
    fields = [
        name.encode("utf-8")[:100].ljust(100, b"\0"), b"0000644\0", b"0000000\0", b"0000000\0",
        raw_size if raw_size is not None else b"%011o\0" % size,
        b"00000000000\0", b" " * 8, kind.encode("latin-1"), link.ljust(100, b"\0"), magic, b"\0" * 80, prefix.ljust(155, b"\0"),
    ]  # fmt: skip
    block = b"".join(fields).ljust(BLOCK, b"\0")
    assert len(block) == BLOCK
    return block[:148] + (raw_sum if raw_sum is not None else b"%06o\0 " % sum(block)) + block[156:]


def member(name, data, kind="0", **fields):
    """A header and its data, padded."""
    return header(name, len(data), kind, **fields) + data + bytes(-len(data) % BLOCK)


def sample(key, image=b"image", label=b"0", ext="jpg"):
    """An image and its label."""
    return member(f"{key}.{ext}", image) + member(f"{key}.cls", label)


def pax(kind="x", **records):
    """An extended header with these records, whose lengths count themselves."""
    lines = b""
    for key, value in records.items():
        rest = f" {key.replace('__', '.')}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length += 1
        lines += str(length).encode() + rest
    return member("pax", lines, kind)


def base256(value):
    """A size as GNU tar writes it beyond 8 GiB."""
    return b"\x80" + value.to_bytes(11, "big") if value >= 0 else value.to_bytes(12, "big", signed=True)


def write(path: Path, *parts: bytes, end: bytes = END) -> Path:
    path.write_bytes(b"".join(parts) + end)
    return path
