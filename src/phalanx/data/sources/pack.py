"""Pack a folder of images into tar shards: WebDataset's layout, images unchanged, reproducible shards.

Nothing has its final name before everything is written: shards are renamed together at the end, and then indexed, which
reads every header back. A pack that fails leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from phalanx.data.source import Encoded, Skipped, SourceError
from phalanx.data.sources.shards import CLASSES_FILE, open_shards, read_classes

BLOCK = 512
END = bytes(2 * BLOCK)  # of an archive


@dataclass(frozen=True)
class ShardNames:
    """Names of shards that differ in a number: `train-%06d.tar` is `train-000000.tar` and so on."""

    before: str
    digits: int
    after: str

    @staticmethod
    def parse(pattern: str) -> ShardNames:
        """Parse a pattern with one number. Characters with a meaning in `shards:PATTERN` are rejected."""
        found = re.fullmatch(r"([^%*?\[\]{}]*)%(?:0(\d))?d([^%*?\[\]{}/]*)", pattern, re.ASCII)
        if not found:
            raise SourceError(f"{pattern!r}: wanted a name with one number and no wildcard, such as train-%06d.tar")
        return ShardNames(found[1], int(found[2] or 1), found[3])

    @property
    def folder(self) -> str:
        return os.path.dirname(self.before) or "."

    def path(self, k: int) -> str:
        return f"{self.before}{k:0{self.digits}d}{self.after}"

    def spec(self, count: int) -> str:
        """The spec that opens the first `count` of them."""
        if count == 1:
            return f"shards:{self.path(0)}"
        return f"shards:{self.before}{{{0:0{self.digits}d}..{count - 1:0{self.digits}d}}}{self.after}"

    def existing(self) -> list[str]:
        """Existing files with such a name."""
        if not os.path.isdir(self.folder):
            return []
        name = re.compile(re.escape(os.path.basename(self.before)) + r"\d+" + re.escape(self.after))
        return sorted(os.path.join(self.folder, file) for file in os.listdir(self.folder) if name.fullmatch(file))


@dataclass(frozen=True)
class Limit:
    """When a shard is full: before it passes this many bytes, or at this many samples. A larger sample gets its own shard."""

    bytes: int | None = None
    samples: int | None = None

    def is_full(self, size: int, samples: int, more: int) -> bool:
        """Whether one more sample, of `more` bytes, goes into the next shard."""
        too_long = self.bytes is not None and size + more + len(END) > self.bytes
        return samples > 0 and (too_long or (self.samples is not None and samples >= self.samples))


@dataclass(frozen=True)
class Packed:
    """The result of packing."""

    paths: tuple[str, ...]
    samples: int
    skipped: Skipped


def pack(
    source: Encoded,
    names: ShardNames,
    limit: Limit,
    *,
    order: Iterable[int],
    skip_bad: bool = False,
    told: Callable[[int, int], None] = lambda samples, shards: None,
) -> Packed:
    """Write the samples of `source` in this order. Calls `told(samples, shards)` with the counts after each sample."""
    if taken := names.existing():
        raise SourceError(f"{taken[0]} exists: remove it and its siblings, or choose another name")
    os.makedirs(names.folder, exist_ok=True)
    classes_file = Path(names.folder) / CLASSES_FILE
    there = read_classes([names.folder])
    if there not in (None, source.classes):
        raise SourceError(f"{classes_file} names other classes: choose another directory")
    parts: list[str] = []
    try:
        samples, skipped = _write(source, names, limit, order, skip_bad, told, parts)
        if not samples:
            raise SourceError(f"nothing to pack: all {skipped.count} samples were left out")
        if there is None:
            _write_classes(classes_file, source.classes)
        paths = tuple(map(names.path, range(len(parts))))
        for part, path in zip(parts, paths):
            os.rename(part, path)
    finally:
        for part in parts:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
    found = len(open_shards(list(paths), names.spec(len(paths))))  # makes the index, and reads back what was written
    if found != samples:
        raise SourceError(f"{names.spec(len(paths))}: {samples} samples were written, but {found} are read back")
    return Packed(paths, samples, skipped)


def _write(
    source: Encoded,
    names: ShardNames,
    limit: Limit,
    order: Iterable[int],
    skip_bad: bool,
    told: Callable[[int, int], None],
    parts: list[str],
) -> tuple[int, Skipped]:
    """Write shards under temporary names, which are appended to `parts` as they are started."""
    from phalanx.data.image import BadSample

    written, in_shard, size, skipped = 0, 0, 0, Skipped()
    with contextlib.ExitStack() as opened:
        for i in order:
            try:
                data = source.read(i)
            except BadSample as bad:
                if not skip_bad:
                    raise
                skipped = skipped.plus(source.name(i), str(bad))
                continue
            sample = as_members(written, source.name(i), data, source.label(i))
            if not parts or limit.is_full(size, in_shard, len(sample)):
                opened.close()  # the previous shard is complete
                final = names.path(len(parts))
                parts.append(os.path.join(names.folder, f".{os.path.basename(final)}.{os.getpid()}.part"))
                file = opened.enter_context(Path(parts[-1]).open("xb"))
                opened.callback(_finish, file)
                in_shard = size = 0
            file.write(sample)
            written, in_shard, size = written + 1, in_shard + 1, size + len(sample)
            told(written, len(parts))
    return written, skipped


def _finish(file: BinaryIO) -> None:
    file.write(END)
    file.flush()
    os.fsync(file.fileno())


def as_members(number: int, name: str, data: bytes, label: int) -> bytes:
    """Image and label as two tar members. Names are rewritten: dots would change the key, long ones need extended headers."""
    stem, extension = os.path.splitext(os.path.basename(name))
    key = f"{number:08d}-{re.sub('[^A-Za-z0-9_-]', '_', stem)[:60]}"
    return _member(f"{key}{extension.lower()}", data) + _member(f"{key}.cls", str(label).encode("ascii"))


def _member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)  # time 0, owner 0, mode 0644: the same bytes in every run
    info.size = len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def _write_classes(path: Path, classes: tuple[str, ...]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(list(classes), indent=0) + "\n", encoding="ascii")
    os.replace(part, path)
