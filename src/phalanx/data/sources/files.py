"""Store the names of many files in little memory, and read one file safely."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence

import numpy as np

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".webp"})  # torchvision's, except
UNREAD = frozenset({".tif", ".tiff"})  # which no decoder here reads; they are skipped by name
WHY_UNREAD = "TIFF is not read: convert it to PNG"
MAX_ENCODED = 256 << 20  # bytes of one encoded image; more is no photograph
NOT_THE_FILES_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Names:
    """A list of names as one block of bytes and where each ends: a million names in 30 MB instead of 100."""

    def __init__(self, blob: np.ndarray, ends: np.ndarray) -> None:
        self.blob, self.ends = blob, ends
        if len(ends) and (int(ends[0]) < 0 or int(ends[-1]) != len(blob) or bool((np.diff(ends) < 0).any())):
            raise ValueError("ends do not fit the names")

    @staticmethod
    def of(names: Iterable[str]) -> Names:
        encoded = [os.fsencode(name) for name in names]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), dtype=np.int64)
        return Names(np.frombuffer(b"".join(encoded), np.uint8), ends)

    @staticmethod
    def joined(parts: Sequence[Names]) -> Names:
        before = np.cumsum([0, *(len(part.blob) for part in parts)], dtype=np.int64)
        ends = [part.ends + start for part, start in zip(parts, before)]
        return Names(np.concatenate([part.blob for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        return os.fsdecode(self.blob[self.ends[i - 1] if i else 0 : self.ends[i]].tobytes())


def is_image(name: str) -> bool:
    """Whether the name has an image extension (torchvision's, in any case) and does not begin with a dot."""
    return name[name.rfind(".") :].lower() in EXTENSIONS and not name.startswith(".")


def is_unread(name: str) -> bool:
    """Whether it is an image of a kind that we skip."""
    return name[name.rfind(".") :].lower() in UNREAD and not name.startswith(".")


def read_regular(path: str) -> bytes:
    """Read a regular file. `OSError` for anything else, and for more than MAX_ENCODED bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # NONBLOCK: a fifo does not hang us
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if about.st_size > MAX_ENCODED:
            raise OSError(errno.EFBIG, f"{about.st_size} bytes are more than an image has (at most {MAX_ENCODED})")
        return read_at(descriptor, about.st_size, 0)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read `size` bytes at `offset`; fewer only at the end of the file."""
    data = os.pread(descriptor, size, offset)
    if len(data) == size:
        return data
    parts = [data]  # the kernel returns less if a signal arrives, and at most 2 GiB
    while parts[-1] and (missing := size - sum(map(len, parts))) > 0:
        parts.append(os.pread(descriptor, missing, offset + size - missing))
    return b"".join(parts)
