"""One micro-batch of a source: its samples read, decoded, collated and transformed; bad ones left out or raised by name.

Everything here is a pure function of what is wanted, so any thread or process of any rank may do it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import default_collate

from phalanx.data import generators
from phalanx.data.draws import Draws
from phalanx.data.generators import borrowed, seed_all
from phalanx.data.image import BadSample
from phalanx.data.order import Indices, epoch_order
from phalanx.data.owed import listed, stands_for
from phalanx.data.route import MicroBatch
from phalanx.data.scatter import is_columns, item_of, length_of
from phalanx.data.source import Encoded, Takes
from phalanx.data.transforms import Transform

OnBad = Literal["error", "skip"]
Decode = Callable[[bytes, Draws], Tensor]

SEEDS = (1 << 32) - 1  # the stream of Draws that seeds global generators; transforms count theirs from 0
EXAMPLES_TRIED = 100  # samples that are tried in order to know the shape of a batch in which all are bad


class SampleError(RuntimeError):
    """A sample could not be made, for a reason that is not in the sample.

    The data set, the decoder or the worker failed. The message names the sample.

    Example:
        >>> class Broken:
        ...     def __len__(self): return 4
        ...     def __getitem__(self, i): raise KeyError("no such column")
        >>> try:
        ...     next(iter(phalanx.data.Loader(Broken(), batch=2)))
        ... except phalanx.data.SampleError as error:
        ...     "no such column" in str(error)
        True
    """


@dataclass(frozen=True, slots=True)
class Made:
    """A micro-batch: what the user gets, how many samples are in it, and (name, reason) of those that were left out."""

    data: Any
    samples: int
    skipped: tuple[tuple[str, str], ...] = ()


def ignore(index: int) -> None:
    """The default: do not record which sample is being read."""


@dataclass(frozen=True)
class Maker:
    """Makes micro-batches of `source`; picklable where source, decode and transform are.

    `seeds`: the global generators are seeded for each sample of a user's data set. Not for threads, see generators.py.
    """

    source: Any
    shuffle: bool
    decode: Decode | None = None
    transform: Transform | None = None
    on_bad: OnBad = "error"
    seeds: bool = False

    def __call__(self, wanted: MicroBatch, reading: Callable[[int], None] = ignore) -> Made:
        """The micro-batch of `wanted`; calls `reading(index)` before it touches a sample."""
        indices = self._indices(wanted, wanted.places)
        if self.takes_at_once:
            if indices.size:
                reading(int(indices[0]))
            data = self.source.take(indices) if isinstance(self.source, Takes) else _rows(self.source, indices)
            return Made(self._transformed(data, wanted, indices), len(indices))
        with borrowed() if self._seeding() else nullcontext():
            made = self._one_by_one(wanted, indices, reading)
            return made if made.samples else Made(self._empty(wanted, reading), 0, made.skipped)

    @property
    def takes_at_once(self) -> bool:
        """Whether the source is in memory and gives many samples in one indexing operation."""
        return is_columns(self.source) or isinstance(self.source, Takes)

    def name(self, index: int) -> str:
        """What an error message calls the sample."""
        return self.source.name(index) if isinstance(self.source, Encoded) else f"sample {index}"

    def _indices(self, wanted: MicroBatch, places: range) -> Indices:
        n = length_of(self.source)
        wrapped = listed(stands_for(places, wanted.owed_at, wanted.owed)) % max(n, 1)
        return epoch_order(wanted.seed, wanted.epoch, n)[wrapped] if self.shuffle else wrapped

    def _one_by_one(self, wanted: MicroBatch, indices: Indices, reading: Callable[[int], None]) -> Made:
        samples, kept, skipped = [], [], []
        draws = self._draws(wanted, indices) if self.decode else None
        seeds = self._draws(wanted, indices).words(SEEDS).tolist() if self._seeding() else None
        for row, index in enumerate(indices.tolist()):
            reading(index)
            if seeds is not None:
                seed_all(seeds[row])
            try:
                samples.append(self._sample(index, draws[row] if draws is not None else None))
                kept.append(row)
            except BadSample as bad:
                if self.on_bad == "error":
                    raise bad.named(self.name(index)) from bad
                skipped.append((bad.name or self.name(index), bad.reason))
            except Exception as error:
                raise SampleError(f"{self.name(index)}: {type(error).__name__}: {error}") from error
        if not samples:
            return Made(None, 0, tuple(skipped))
        try:
            data = default_collate(samples) if self.decode is None else _collate_images(samples)
        except Exception as error:
            raise SampleError(f"{self._names(indices[kept])} do not make one batch: {error}") from error
        data = tuple(data) if isinstance(data, list) else data
        return Made(self._transformed(data, wanted, indices[kept]), len(samples), tuple(skipped))

    def _sample(self, index: int, draws: Draws | None) -> Any:
        if self.decode is None or draws is None:
            return item_of(self.source, index)
        return self.decode(self.source.read(index), draws), self.source.label(index)

    def _transformed(self, data: Any, wanted: MicroBatch, indices: Indices) -> Any:
        if self.transform is None:
            return data
        draws = self._draws(wanted, indices)
        try:
            if isinstance(data, Tensor):
                return self.transform(data, draws)
            if isinstance(data, tuple) and isinstance(data[0], Tensor):
                return (self.transform(data[0], draws), *data[1:])
        except Exception as error:
            raise SampleError(f"the transform failed on {self._names(indices)}: {type(error).__name__}: {error}") from error
        raise TypeError(f"a transform needs samples x or (x, y, ...) with a tensor x; this source gives {type(data).__name__}")

    def _empty(self, wanted: MicroBatch, reading: Callable[[int], None]) -> Any:
        """A batch without rows, of the shape and type that others have: a sample is read for it and cut off again."""
        for place in range(wanted.step.start, wanted.step.start + min(length_of(self.source), EXAMPLES_TRIED)):
            made = self._one_by_one(wanted, self._indices(wanted, range(place, place + 1)), reading)
            if made.samples:
                return without_rows(made.data)
        raise SampleError(f"none of {EXAMPLES_TRIED} samples in a row can be read, the last because {made.skipped[0]}")

    def _draws(self, wanted: MicroBatch, indices: Indices) -> Draws:
        return Draws(wanted.seed, wanted.epoch, indices)

    def _seeding(self) -> bool:
        return self.seeds and self.decode is None and generators.are_ours()

    def _names(self, indices: Indices) -> str:
        return ", ".join(self.name(i) for i in indices[:8].tolist()) + (", ..." if len(indices) > 8 else "")


def _rows(columns: tuple[Any, ...], indices: Indices) -> tuple[Any, ...]:
    rows = torch.from_numpy(indices)
    return tuple(column[rows] if isinstance(column, Tensor) else torch.as_tensor(column[indices]) for column in columns)


def _collate_images(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A batch in the memory order of its images: decoders leave colours side by side, and turning them costs five copies."""
    y = torch.tensor([label for _, label in samples])
    pixels = [image.permute(1, 2, 0) for image, _ in samples if image.dim() == 3]
    if len(pixels) == len(samples) and all(image.is_contiguous() for image in pixels):
        return torch.stack(pixels).permute(0, 3, 1, 2), y
    return torch.stack([image for image, _ in samples]), y


def map_tensors(change: Callable[[Any], Any], data: Any, kind: type = Tensor) -> Any:
    """`data` with every `kind` in its tuples, lists and dicts replaced by `change` of it."""
    if isinstance(data, kind):
        return change(data)
    if isinstance(data, dict):
        return {key: map_tensors(change, value, kind) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(change, value, kind) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(map_tensors(change, value, kind) for value in data)
    return data


def without_rows(data: Any) -> Any:
    """A collated batch, emptied: tensors have 0 rows, lists of texts none."""
    if isinstance(data, tuple | list) and all(isinstance(value, str | bytes) for value in data):
        return type(data)()
    if isinstance(data, dict):
        return {key: without_rows(value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        emptied = [without_rows(value) for value in data]
        return type(data)(*emptied) if hasattr(data, "_fields") else type(data)(emptied)
    return data[:0] if isinstance(data, Tensor) else data
