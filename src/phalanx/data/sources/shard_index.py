"""The index of one tar shard: which members are samples, where their images are, and their labels.

Consecutive members that share a key (the name up to the first dot of its last part) are one sample: an image, by its extension,
and a label: `.cls`, a number as text, or `.json` with a "label". Others are ignored. A bad sample is skipped, counted and named;
a bad shard is an error, because a data set must not shrink silently.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.source import Skipped, SourceError
from phalanx.data.sources import saved_index
from phalanx.data.sources.files import EXTENSIONS, MAX_ENCODED, UNREAD, WHY_UNREAD, Names
from phalanx.data.sources.tar import Member, TarError, Window, members

MAX_LABEL = (1 << 31) - 1
MAX_LABEL_BYTES = {"cls": 64, "json": 64 << 10}

Stamp = tuple[int, int]


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard, each with the offset and size of its image, its label and its name."""

    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    names: Names
    skipped: Skipped

    def __post_init__(self) -> None:
        if not len(self.offsets) == len(self.sizes) == len(self.labels) == len(self.names):
            raise ValueError("columns of different lengths")

    def __len__(self) -> int:
        return len(self.offsets)

    def where(self, chosen: np.ndarray) -> ShardIndex:
        """Only the samples of this mask."""
        names = Names.of(self.names[int(k)] for k in np.flatnonzero(chosen))
        return ShardIndex(self.offsets[chosen], self.sizes[chosen], self.labels[chosen], names, self.skipped)


class BadMember(ValueError):  # noqa: N818  says what happened
    """Why a sample is left out."""


class Descriptor:
    """An open file, closed when the last thread releases it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # NONBLOCK: a fifo does not hang us

    def stamp(self) -> Stamp:
        """Size and time of the file, which change when it does."""
        about = os.fstat(self.number)
        return about.st_size, about.st_mtime_ns

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def index_shard(path: str) -> tuple[Stamp, ShardIndex]:
    """The index of the shard's current contents: loaded, or built and saved."""
    beside = Path(f"{path}.index")
    try:
        descriptor = Descriptor(path)
        stamp = descriptor.stamp()
        index = _from_saved(saved_index.load(beside, ["shard", *stamp]), stamp[0])
        if index is None:
            index = make_index(Window(descriptor.number), path)
            if descriptor.stamp() != stamp:
                raise SourceError(f"{path}: changed while it was indexed")
            saved_index.save(_to_save(stamp, index), beside)
    except TarError as error:
        raise SourceError(f"{path}: {error}") from None
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    return stamp, index


def make_index(window: Window, path: str) -> ShardIndex:
    """Read all headers and labels of a shard."""
    images: list[Member] = []
    labels: list[int] = []
    skipped = Skipped()
    seen: set[str] = set()
    for key, group in groupby(members(window), lambda member: split_name(member.name)[0]):
        try:
            found = _sample(key, list(group), window)
            if found is None:
                continue
            if key in seen:
                raise BadMember("the key has come before")
            seen.add(key)
            images.append(found[0])
            labels.append(found[1])
        except BadMember as reason:
            skipped = skipped.plus(f"{path}: {key}", str(reason))
    return ShardIndex(
        np.array([image.offset for image in images], np.int64),
        np.array([image.size for image in images], np.int64),
        np.array(labels, np.int32),
        Names.of(image.name for image in images),
        skipped,
    )


def split_name(name: str) -> tuple[str, str]:
    """Key and extension as in WebDataset: `a/b.seg.png` is `a/b` and `seg.png`. Other names are all key."""
    found = re.fullmatch(r"((?:.*/|)[^./]+)\.([^/]*)", name, re.DOTALL)
    return (found[1], found[2].lower()) if found else (name, "")


def _sample(key: str, group: list[Member], window: Window) -> tuple[Member, int] | None:
    """Image and label of one key, or None if it is not meant to be a sample."""
    for member in group:
        if member.oddity:
            raise BadMember(f"{member.name[:200]!r} is {member.oddity}")
    parts = [(split_name(member.name)[1], member) for member in group]
    images = [member for extension, member in parts if f".{extension}" in EXTENSIONS]
    labels = [(extension, member) for extension, member in parts if extension in MAX_LABEL_BYTES]
    if not images and any(f".{extension}" in UNREAD for extension, _ in parts):
        raise BadMember(WHY_UNREAD)
    if not images and not any(extension == "cls" for extension, _ in labels):
        return None
    if not images:
        raise BadMember("a label without an image")
    if not labels:
        raise BadMember("an image without a label (.cls or .json)")
    if len(images) > 1 or len({extension for extension, _ in labels}) < len(labels):
        raise BadMember(f"several images or labels of one key: {', '.join(member.name for member in group)[:200]}")
    image = images[0]
    if image.size == 0:
        raise BadMember("an empty image")
    if image.size > MAX_ENCODED:
        raise BadMember(f"{image.size} bytes are more than an image has (at most {MAX_ENCODED})")
    return image, _label(*min(labels, key=lambda label: label[0]), window)  # cls takes precedence over json


def _label(extension: str, member: Member, window: Window) -> int:
    if member.size > MAX_LABEL_BYTES[extension]:
        raise BadMember(f"{member.size} bytes are too many for a .{extension}")
    data = window.read(member.offset, member.size)
    if extension == "cls":
        found = re.fullmatch(rb"\s*(-?\d{1,18})\s*", data)
        value: Any = int(found[1]) if found else None
    else:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            raise BadMember("its .json is not JSON") from None
        value = content.get("label") if isinstance(content, dict) else None
    if type(value) is not int:
        raise BadMember(f"its .{extension} holds no whole number for a label: {data[:40]!r}")
    if not 0 <= value <= MAX_LABEL:
        raise BadMember(f"label {str(value)[:20]} is out of range")
    return value


def _to_save(stamp: Stamp, index: ShardIndex) -> saved_index.Saved:
    arrays = {"offsets": index.offsets, "sizes": index.sizes, "labels": index.labels}
    names = {"names": index.names.blob, "name_ends": index.names.ends}
    return saved_index.Saved(["shard", *stamp], [index.skipped.count, index.skipped.examples], arrays | names)


def _from_saved(saved: saved_index.Saved | None, length: int) -> ShardIndex | None:
    """Read a saved index, or return None if a sample lies outside the file: the index is untrusted input."""
    if saved is None:
        return None
    try:
        arrays = saved.arrays
        index = ShardIndex(
            arrays["offsets"],
            arrays["sizes"],
            arrays["labels"],
            Names(arrays["names"], arrays["name_ends"]),
            saved_index.read_skipped(saved.facts),
        )
    except (KeyError, ValueError, TypeError):
        return None
    within = (index.offsets >= 0) & (index.sizes > 0) & (index.sizes <= MAX_ENCODED) & (index.offsets <= length - index.sizes)
    return index if bool((within & (index.labels >= 0)).all()) else None
