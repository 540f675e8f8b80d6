"""Tar shards in WebDataset's layout, read in place: any sample by its number, one `pread` each.

    train-000.tar:  00000000.jpg 00000000.cls  00000001.jpg 00000001.cls ...

Each shard is indexed once (shard_index.py) and its index is saved beside it. `classes.json` beside the shards, which
`phalanx pack` writes, lists the names of the classes. Without it, classes are numbers.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from phalanx.data.source import Skipped, SourceError, at
from phalanx.data.sources.files import NOT_THE_FILES_FAULT, Names, read_at
from phalanx.data.sources.pattern import find_files
from phalanx.data.sources.shard_index import Descriptor, ShardIndex, Stamp, index_shard

CLASSES_FILE = "classes.json"
MAX_CLASSES_FILE = 64 << 20  # bytes
MAX_UNNAMED_CLASSES = 1 << 16  # without names, a wrong label of two billion would make two billion classes
OPEN_SHARDS = 64  # descriptors kept open: the limit of a process is often 1024


@dataclass(frozen=True)
class Shards:
    """The samples of several shards in one numbering: an `Encoded` source."""

    paths: tuple[str, ...]
    stamps: tuple[Stamp, ...] = field(repr=False)  # of the shards, taken when they were indexed
    classes: tuple[str, ...] = field(repr=False)
    firsts: np.ndarray = field(repr=False)  # the number of the first sample of each shard; one more at the end
    index: ShardIndex = field(repr=False)  # of all shards
    _open: dict[int, Descriptor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def skipped(self) -> Skipped:
        """The samples that were skipped during indexing."""
        return self.index.skipped

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: SupportsIndex) -> tuple[bytes, int]:
        return self.read(i), self.label(i)

    def label(self, i: SupportsIndex) -> int:
        return int(self.index.labels[at(i, len(self))])

    def name(self, i: SupportsIndex) -> str:
        k = at(i, len(self))
        return f"{self.paths[self._shard_of(k)]}: {self.index.names[k]}"

    def read(self, i: SupportsIndex) -> bytes:
        from phalanx.data.image import BadSample

        k = at(i, len(self))
        size = int(self.index.sizes[k])
        try:
            descriptor = self._descriptor(self._shard_of(k))
            data = read_at(descriptor.number, size, int(self.index.offsets[k]))
        except OSError as error:
            if error.errno in NOT_THE_FILES_FAULT:
                raise
            raise BadSample(self.name(k), error.strerror or str(error)) from None
        if len(data) < size:
            raise BadSample(self.name(k), f"{len(data)} of its {size} bytes exist: the shard was truncated")
        return data

    def _shard_of(self, k: int) -> int:
        return int(np.searchsorted(self.firsts, k, "right")) - 1

    def _descriptor(self, shard: int) -> Descriptor:
        """The open shard. No lock, which a fork could leave held: if two threads open one, the second is dropped."""
        descriptor = self._open.get(shard)
        if descriptor is None:
            descriptor = Descriptor(self.paths[shard])
            if descriptor.stamp() != self.stamps[shard]:
                raise SourceError(f"{self.paths[shard]} has changed since it was indexed: open the source again")
            self._open[shard] = descriptor
            for oldest in list(self._open)[:-OPEN_SHARDS]:
                self._open.pop(oldest, None)  # a thread that reads from it keeps it open
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # descriptors are of one process


def load(pattern: str, split: str) -> Shards:
    """Open the samples of a split, whose name replaces `{split}` in the pattern."""
    source = open_shards(find_files(pattern, split), f"shards:{pattern}")
    source.skipped.warn(f"shards:{pattern}")
    return source


def open_shards(paths: list[str], spec: str) -> Shards:
    """Open the samples of these files, in order."""
    classes = read_classes(sorted({os.path.dirname(path) for path in paths}))
    limit = len(classes) if classes is not None else MAX_UNNAMED_CLASSES
    why = f"there are {limit} classes" if classes is not None else f"without {CLASSES_FILE} there are at most {limit} classes"
    stamps, parts, skipped = [], [], Skipped()
    for path in paths:
        stamp, index = index_shard(path)
        stamps.append(stamp)
        skipped = skipped.joined(index.skipped)
        right = index.labels < limit
        for k in np.flatnonzero(~right):
            skipped = skipped.plus(f"{path}: {index.names[int(k)]}", f"label {int(index.labels[k])}, but {why}")
        parts.append(index if right.all() else index.where(right))
    whole = ShardIndex(
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.labels for part in parts]),
        Names.joined([part.names for part in parts]),
        skipped,
    )
    if not len(whole):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.examples[:3])
        raise SourceError(
            f"{spec}: no sample in {len(paths)} shards: {reasons or 'no member is an image with a label beside it'}"
        )
    if classes is None:
        classes = tuple(map(str, range(int(whole.labels.max()) + 1)))
    firsts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Shards(tuple(paths), tuple(stamps), classes, firsts, whole)


def read_classes(folders: list[str]) -> tuple[str, ...] | None:
    """Read the names from `classes.json` of the folders. All that have one must agree."""
    found: dict[tuple[str, ...], str] = {}
    for folder in folders:
        path = Path(folder) / CLASSES_FILE
        try:
            if not path.is_file():
                continue
            if path.stat().st_size > MAX_CLASSES_FILE:
                raise SourceError(f"{path}: too long for a list of names")
            names = json.loads(path.read_bytes())
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise SourceError(f"{path}: is not JSON: wanted a list of the names of the classes") from None
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise SourceError(f"{path}: wanted a list of the names of the classes")
        found[tuple(names)] = str(path)
    if len(found) > 1:
        raise SourceError(f"{' and '.join(sorted(found.values()))} name different classes: open such shards one by one")
    return next(iter(found), None)
