"""Scatter: each rank's share of a data set, as an index into the user's own. Nothing is pickled, broadcast or copied.

    train = scatter_dataset(train, comm, shuffle=True, seed=0)
    loader = torch.utils.data.DataLoader(train, batch_size=32, shuffle=True)

With `equal_length`, as in ChainerMN, all ranks get ceil(n / size) samples, so that all make the same number of steps; neighbours
may share a sample. Without it, shares are disjoint, which is right for evaluation. `phalanx.data.Loader` needs neither: it
divides every batch anew, and each sample comes exactly once.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import numpy as np
import torch

from phalanx.data.order import Indices, epoch_order
from phalanx.data.position import share, whole_number


class Ranked(Protocol):
    """A communicator, or anything else with a rank and a size."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


def scatter_index(n: int, size: int, rank: int, *, equal_length: bool = True) -> range:
    """One rank's share of range(n), by arithmetic only.

    Args:
        n: The number of samples.
        size: The number of ranks.
        rank: The rank whose share you want.
        equal_length: Give every rank ceil(n / size) samples, so that all make the same number of steps; neighbours may share a
            sample. With False, shares are disjoint and their sizes differ by at most 1. Use that for evaluation.

    Returns:
        A range of places.

    Raises:
        ValueError: If a number is invalid, or `n` is 0 with `equal_length`.

    Example:
        >>> [phalanx.scatter_index(10, 3, rank) for rank in range(3)]
        [range(0, 4), range(3, 7), range(6, 10)]
        >>> [phalanx.scatter_index(10, 3, rank, equal_length=False) for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
    """
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
    """This rank's share of a data set, as a view. Nothing is copied or sent.

    Use it with torch's DataLoader. `phalanx.data.Loader` takes the whole data set instead and divides every batch.

    Args:
        dataset: A map-style data set, a list, a tensor or a tuple of tensors; the same on all ranks.
        comm: A communicator, or anything with `rank` and `size`.
        shuffle: Shuffle the samples first, the same way on all ranks.
        seed: Seeds that shuffle.
        equal_length: As in `scatter_index`.

    Returns:
        A `Shard`, which is a torch data set.

    Raises:
        TypeError: If `dataset` has no length or no `[]`.
        ValueError: If an option is invalid.

    Example:
        >>> phalanx.run_local(2, lambda comm: list(phalanx.scatter_dataset("abcdef", comm)))
        [['a', 'b', 'c'], ['d', 'e', 'f']]
    """
    n = length_of(dataset)
    mine = scatter_index(n, comm.size, comm.rank, equal_length=equal_length)
    return Shard(dataset, epoch_order(seed, 0, n)[mine] if shuffle else mine)


class Shard(torch.utils.data.Dataset):
    """A view of some samples of a data set: `shard[i]` is `dataset[shard.indices[i]]`. A slice of it is a view, too.

    Args:
        dataset: The whole data set.
        indices: The samples of this view.

    Example:
        >>> shard = phalanx.data.Shard("abcdef", range(2, 5))
        >>> len(shard), shard[0], list(shard[1:])
        (3, 'c', ['d', 'e'])
    """

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
            raise ValueError(
                f"tensors of {', '.join(map(str, lengths))} rows: the tensors of a tuple must have one row per sample"
            )
        return lengths[0]
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"{type(dataset).__name__} is not a map-style data set: it needs __len__ and __getitem__")
    if isinstance(dataset, torch.Tensor | np.ndarray) and dataset.ndim == 0:
        raise TypeError("a tensor without dimensions has no samples")
    return len(dataset)


def item_of(dataset: Any, i: int) -> Any:
    """Sample i of what `length_of` accepts."""
    return tuple(column[i] for column in dataset) if is_columns(dataset) else dataset[i]


def is_columns(dataset: Any) -> bool:
    """Whether it is a tuple (x, y, ...) of tensors or arrays rather than a sequence of samples."""
    return (
        isinstance(dataset, tuple)
        and len(dataset) > 0
        and all(isinstance(column, torch.Tensor | np.ndarray) and column.ndim > 0 for column in dataset)
    )
