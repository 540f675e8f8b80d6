"""Scatter: each rank's share of a data set, as an index into the user's own. Nothing is pickled, broadcast or copied.

    train = scatter_dataset(train, comm, shuffle=True, seed=0)
    loader = torch.utils.data.DataLoader(train, batch_size=32, shuffle=True)

With `equal_length`, as ChainerMN has it, all ranks get ceil(n / size) samples, so that all make equally many steps; neighbours
may then have a sample in common. Without it shares are disjoint: what evaluation wants. `phalanx.data.Loader` needs neither: it
shares out every batch anew, exactly once.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import numpy as np
import torch

from phalanx.data.order import Indices, epoch_order
from phalanx.data.position import share, whole_number


class Ranked(Protocol):
    """A communicator, or anything else that knows its rank and the number of ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


def scatter_index(n: int, size: int, rank: int, *, equal_length: bool = True) -> range:
    """The places of range(n) that `rank` of `size` gets: ceil(n/size) each, together all; or disjoint, sizes within one."""
    whole_number("n", n)
    whole_number("size", size, 1)
    whole_number("rank", rank)
    if rank >= size:
        raise ValueError(f"rank={rank} of size={size}: ranks are 0 to {size - 1}")
    strict = share(range(n), size, rank)
    if not equal_length:
        return strict
    if n == 0:
        raise ValueError("n=0: shares of equal length have at least one sample each; equal_length=False allows empty ones")
    return range(strict.start, strict.start - (-n // size))


def scatter_dataset(dataset: Any, comm: Ranked, *, shuffle: bool = False, seed: int = 0, equal_length: bool = True) -> Shard:
    """This rank's share of `dataset`: map-style, a list, a tensor or a tuple of tensors. Shuffled alike on all ranks first."""
    n = length_of(dataset)
    mine = scatter_index(n, comm.size, comm.rank, equal_length=equal_length)
    return Shard(dataset, epoch_order(seed, 0, n)[mine] if shuffle else mine)


class Shard(torch.utils.data.Dataset):
    """A view of some samples of a data set: `shard[i]` is `dataset[shard.indices[i]]`. A slice of it is a view, too."""

    def __init__(self, dataset: Any, indices: range | Indices) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Shard(self.dataset, self.indices[index])
        i = operator.index(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of a shard of {len(self)}")
        return item_of(self.dataset, int(self.indices[i]))

    def __repr__(self) -> str:
        return f"Shard of {len(self)} samples of {type(self.dataset).__name__}"


def length_of(dataset: Any) -> int:
    """How many samples a map-style data set, sequence, tensor or tuple of tensors has."""
    if is_columns(dataset):
        lengths = [len(column) for column in dataset]
        if len(set(lengths)) > 1:
            raise ValueError(f"tensors of {', '.join(map(str, lengths))} rows: a tuple of tensors has one row per sample in each")
        return lengths[0]
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"{type(dataset).__name__} is no map-style data set: it needs __len__ and __getitem__")
    if isinstance(dataset, torch.Tensor | np.ndarray) and dataset.ndim == 0:
        raise TypeError("a tensor without dimensions has no samples")
    return len(dataset)


def item_of(dataset: Any, i: int) -> Any:
    """Sample i of what `length_of` accepts."""
    return tuple(column[i] for column in dataset) if is_columns(dataset) else dataset[i]


def is_columns(dataset: Any) -> bool:
    """Whether it is a tuple of tensors (or arrays), (x, y, ...), rather than a sequence of samples."""
    return (
        isinstance(dataset, tuple)
        and len(dataset) > 0
        and all(isinstance(column, torch.Tensor | np.ndarray) and column.ndim > 0 for column in dataset)
    )
