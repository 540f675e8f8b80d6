"""One rank's share of a data set in memory, and the messages that carry samples between shares.

A `Share` has slots of one size. `take_out` copies samples into a `SampleMessage` and frees their slots; `put` fills free slots.
So the memory never grows. A message is one flat buffer of bytes. Its parts are views: writing to them fills the message.

    | rows x 8 bytes: global indices, -1 where a row is empty | rows of x | rows of y |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.comm.envelope import bytes_of
from phalanx.data.exchange import Indices

Rows = NDArray[np.void]

ALIGNED = 16  # bytes: a view of any dtype may begin there
READ_AT_ONCE = 4096  # samples read at a time while a share is filled
EMPTY = -1  # the index of a slot or row without a sample


@dataclass(frozen=True)
class SampleLayout:
    """The dtypes and shapes of a sample's x and y."""

    x: torch.dtype
    x_shape: tuple[int, ...]
    y: torch.dtype
    y_shape: tuple[int, ...]

    @staticmethod
    def of(x: torch.Tensor, y: torch.Tensor) -> SampleLayout:
        """The layout of the batches x and y."""
        return SampleLayout(x.dtype, tuple(x.shape[1:]), y.dtype, tuple(y.shape[1:]))

    def nbytes(self, rows: int) -> int:
        """The size of a message."""
        return self._offsets(rows)[-1]

    def message(self, flat: torch.Tensor, rows: int) -> SampleMessage:
        """A message of `rows` rows at the beginning of `flat`, whose contents are kept."""
        x_start, y_start, end = self._offsets(rows)
        return SampleMessage(
            flat[:end],
            flat[: 8 * rows].view(torch.int64).numpy(),
            _rows(flat[x_start : x_start + rows * _size(self.x, self.x_shape)], rows),
            _rows(flat[y_start : y_start + rows * _size(self.y, self.y_shape)], rows),
        )

    def _offsets(self, rows: int) -> tuple[int, int, int]:
        x_start = _aligned(8 * rows)
        y_start = x_start + _aligned(rows * _size(self.x, self.x_shape))
        return x_start, y_start, y_start + _aligned(rows * _size(self.y, self.y_shape))


@dataclass(frozen=True)
class SampleMessage:
    """Samples in transit: `flat` is sent, the others are views of it; x and y are rows of bytes."""

    flat: torch.Tensor
    ids: Indices
    x: Rows
    y: Rows


class Share:
    """The samples `ids` of `source`, in `capacity` slots."""

    def __init__(self, source: Any, ids: Indices, capacity: int) -> None:
        self._ids = np.full(capacity, EMPTY, np.int64)
        self._ids[: len(ids)] = ids
        self._free = list(range(len(ids), capacity))
        for start in range(0, len(ids), READ_AT_ONCE):  # a source on disk is never copied as a whole
            x, y = read(source, ids[start : start + READ_AT_ONCE])
            if start == 0:
                self.layout = SampleLayout.of(x, y)
                self._x, self._y = (like.new_empty(capacity, *like.shape[1:], device="cpu") for like in (x, y))
            elif SampleLayout.of(x, y) != self.layout:
                raise ValueError(f"samples differ: {self.layout} and {SampleLayout.of(x, y)}; a share holds samples of one size")
            self._x[start : start + len(x)], self._y[start : start + len(y)] = x, y
        self._x_rows, self._y_rows = _rows(self._x, capacity), _rows(self._y, capacity)
        self.index()

    def ids(self) -> Indices:
        """The samples that are here, ascending."""
        return np.sort(self._ids[self._ids != EMPTY])

    def index(self) -> None:
        """Record where every sample is. It stays there until it is taken out."""
        occupied = np.flatnonzero(self._ids != EMPTY)
        by_id = np.argsort(self._ids[occupied])
        self._slots, self._sorted = occupied[by_id], self._ids[occupied][by_id]
        if (np.diff(self._sorted) == 0).any():
            raise RuntimeError("a sample arrived twice: do all ranks iterate over their AsyncShuffles in the same order?")

    def read(self, ids: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of these samples, which were here when `index` was called."""
        slots = torch.from_numpy(self._find(ids))
        return self._x.index_select(0, slots), self._y.index_select(0, slots)

    def take_out(self, ids: Indices, message: SampleMessage) -> None:
        """Copy these samples into the message, whose other rows stay empty, and free their slots."""
        slots, count = self._find(ids), len(ids)
        for rows, out in ((self._x_rows, message.x), (self._y_rows, message.y), (self._ids, message.ids)):
            np.take(rows, slots, out=out[:count], mode="clip")  # "raise" would copy twice
        message.ids[count:] = EMPTY
        self._ids[slots] = EMPTY
        self._free += slots.tolist()

    def put(self, message: SampleMessage) -> None:
        """Copy the samples of a message into free slots."""
        count = int(np.count_nonzero(message.ids != EMPTY))  # only rows at the end are empty
        slots = np.array(self._free[:count], np.int64)
        del self._free[:count]
        self._ids[slots], self._x_rows[slots], self._y_rows[slots] = message.ids[:count], message.x[:count], message.y[:count]

    def _find(self, ids: Indices) -> Indices:
        return self._slots[np.searchsorted(self._sorted, ids)]


def read(source: Any, ids: Indices) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of a source in memory, or of one that reads them now."""
    if hasattr(source, "take"):
        x, y = source.take(ids)
    else:
        places = torch.from_numpy(ids)
        x, y = (part[places] for part in source)
    return x.detach(), y.detach()


def check_source(source: Any) -> int:
    """Check that a share can be read from `source`. Returns its number of samples."""
    pair = isinstance(source, tuple | list) and len(source) == 2 and all(isinstance(part, torch.Tensor) for part in source)
    if pair and len(source[0]) == len(source[1]):
        return len(source[0])
    if hasattr(source, "take") and hasattr(source, "__len__") and not isinstance(source, torch.Tensor):
        return len(source)
    raise TypeError(
        "AsyncShuffle holds samples of one size in memory: pass phalanx.data.Arrays, a pair (x, y) of tensors of one length, or "
        f"an object with len() and take(indices) -> (x, y); got {type(source).__name__}. Encoded images are for Loader"
    )


def _rows(x: torch.Tensor, count: int) -> Rows:
    """The memory of a contiguous tensor as `count` rows of bytes: numpy copies each with one memcpy, index_copy_ byte by byte."""
    flat = bytes_of(x).numpy()
    return flat.view(f"V{flat.size // count}") if flat.size else np.empty(count, "V1")


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
