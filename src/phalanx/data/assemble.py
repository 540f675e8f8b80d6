"""Make one micro-batch of a source: read, decode, collate and transform its samples. Bad samples are skipped or raise by name.

Everything here is a pure function of the requested micro-batch, so any thread or process of any rank may run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phalanx.data import generators
from phalanx.data.collate import Collate, UnknownBatchError, collated, collated_images, pinned, without_rows
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

EXAMPLES_TRIED = 100  # samples to try, to learn the shape of a batch whose samples are all bad


class SampleError(RuntimeError):
    """A sample could not be loaded, and the sample itself is not the cause.

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
    """A micro-batch: the user's data, the number of samples, and (name, reason) of those that were skipped."""

    data: Any
    samples: int
    skipped: tuple[tuple[str, str], ...] = ()

    def pinned(self) -> Made:
        """Copy it to pinned memory."""
        return replace(self, data=pinned(self.data))


def ignore(index: int) -> None:
    """Do nothing: the default for `reading`."""


@dataclass(frozen=True)
class Maker:
    """Makes micro-batches of `source`. Picklable if its parts are.

    With `seeds`, the global generators are seeded for each sample of a user's data set. Not for threads; see generators.py.
    """

    source: Any
    shuffle: bool
    decode: Decode | None = None
    transform: Transform | None = None
    on_bad: OnBad = "error"
    seeds: bool = False
    collate_fn: Collate | None = None

    def __call__(self, wanted: MicroBatch, reading: Callable[[int], None] = ignore) -> Made:
        """Make the micro-batch `wanted`. Calls `reading(index)` before it reads a sample."""
        indices = self._indices(wanted, wanted.places)
        if self.takes_at_once:
            if indices.size:
                reading(int(indices[0]))
            data = self.source.take(indices) if isinstance(self.source, Takes) else _rows(self.source, indices)
            if self.transform is not None:
                data = self._transformed(data, Draws(wanted.seed, wanted.epoch, indices))
            return Made(data, len(indices))
        with borrowed() if self.is_seeding() else nullcontext():
            samples, kept, skipped = self._read(wanted, indices, reading)
            if samples:
                return Made(self.assembled(samples, Draws(wanted.seed, wanted.epoch, kept)), len(samples), skipped)
            return Made(self._empty(wanted, reading), 0, skipped)

    @property
    def takes_at_once(self) -> bool:
        """Whether the source is in memory and returns many samples in one indexing operation."""
        return self.collate_fn is None and (is_columns(self.source) or isinstance(self.source, Takes))

    def name(self, index: int) -> str:
        """The name of the sample for error messages."""
        return self.source.name(index) if isinstance(self.source, Encoded) else f"sample {index}"

    def is_seeding(self) -> bool:
        """Whether to seed the global generators for the user's code."""
        return self.seeds and self.decode is None and generators.are_ours()

    def assembled(self, samples: list[Any], draws: Draws) -> Any:
        """Collate and transform `samples`, using these draws."""
        if self.collate_fn is None:
            try:
                data = collated(samples) if self.decode is None else collated_images(samples)
            except Exception as error:
                raise SampleError(f"{self._names(draws)} do not make one batch: {error}") from error
        else:
            if self.is_seeding():
                seed_all(int(draws[:1].words(generators.COLLATING)[0]))
            try:
                data = self.collate_fn(samples)
            except Exception as error:
                raise SampleError(f"collate_fn failed on {self._names(draws)}: {type(error).__name__}: {error}") from error
        return self._transformed(data, draws)

    def empty_like(self, sample: Any, seed: int, epoch: int, index: int) -> Any:
        """A batch without rows, with the shape and type of the others. Made from a sample that is then cut off."""
        one, two = (self.assembled([sample] * count, Draws(seed, epoch, np.full(count, index))) for count in (1, 2))
        try:
            return without_rows(one, two)
        except UnknownBatchError as error:
            raise SampleError(
                f"this rank has no sample in the last batch of the epoch, and {error}: use last='drop' or 'pad', or let "
                "collate_fn return tensors, lists, dicts or dataclasses"
            ) from error

    def _indices(self, wanted: MicroBatch, places: range) -> Indices:
        n = length_of(self.source)
        wrapped = listed(stands_for(places, wanted.owed_at, wanted.owed)) % max(n, 1)
        return epoch_order(wanted.seed, wanted.epoch, n)[wrapped] if self.shuffle else wrapped

    def _read(
        self, wanted: MicroBatch, indices: Indices, reading: Callable[[int], None]
    ) -> tuple[list[Any], Indices, tuple[tuple[str, str], ...]]:
        """Read the samples one by one. Returns them, which of the indices they have, and what was skipped."""
        samples, kept, skipped = [], [], []
        draws = Draws(wanted.seed, wanted.epoch, indices)
        seeds = draws.words(generators.SAMPLES).tolist() if self.is_seeding() else None
        for row, index in enumerate(indices.tolist()):
            reading(index)
            if seeds is not None:
                seed_all(seeds[row])
            try:
                samples.append(self._sample(index, draws[row] if self.decode is not None else None))
                kept.append(row)
            except BadSample as bad:
                if self.on_bad == "error":
                    raise bad.named(self.name(index)) from bad
                skipped.append((bad.name or self.name(index), bad.reason))
            except Exception as error:
                raise SampleError(f"{self.name(index)}: {type(error).__name__}: {error}") from error
        return samples, indices[kept], tuple(skipped)

    def _sample(self, index: int, draws: Draws | None) -> Any:
        if self.decode is None or draws is None:
            return item_of(self.source, index)
        return self.decode(self.source.read(index), draws), self.source.label(index)

    def _transformed(self, data: Any, draws: Draws) -> Any:
        if self.transform is None:
            return data
        try:
            if isinstance(data, Tensor):
                return self.transform(data, draws)
            if isinstance(data, tuple | list) and data and isinstance(data[0], Tensor):
                changed = (self.transform(data[0], draws), *data[1:])
                return changed if isinstance(data, tuple) else list(changed)
        except Exception as error:
            raise SampleError(f"the transform failed on {self._names(draws)}: {type(error).__name__}: {error}") from error
        raise TypeError(f"a transform needs batches x or (x, y, ...) with a tensor x; this one is a {type(data).__name__}")

    def _empty(self, wanted: MicroBatch, reading: Callable[[int], None]) -> Any:
        skipped: Sequence[tuple[str, str]] = ()
        for place in range(wanted.step.start, wanted.step.start + min(length_of(self.source), EXAMPLES_TRIED)):
            samples, kept, skipped = self._read(wanted, self._indices(wanted, range(place, place + 1)), reading)
            if samples:
                return self.empty_like(samples[0], wanted.seed, wanted.epoch, int(kept[0]))
        raise SampleError(f"none of {EXAMPLES_TRIED} samples in a row can be read, the last because {skipped[0]}")

    def _names(self, draws: Draws) -> str:
        return ", ".join(self.name(i) for i in draws.indices[:8].tolist()) + (", ..." if len(draws) > 8 else "")


def _rows(columns: tuple[Any, ...], indices: Indices) -> tuple[Any, ...]:
    rows = torch.from_numpy(indices)
    return tuple(column[rows] if isinstance(column, Tensor) else torch.as_tensor(column[indices]) for column in columns)
