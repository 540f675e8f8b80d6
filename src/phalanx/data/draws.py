"""Random numbers as a function: each is a hash of (seed, epoch, index of the sample, stream, count). There is no state.

So a sample is cropped and flipped the same way on any rank, worker and batch, and differently in the next epoch. The hash
is the finaliser of splitmix64, applied to a counter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from phalanx.data.splitmix import GOLDEN, mix

# Streams of random numbers. A new use takes a new number. Changing a number would change every recorded run.
CROP, PAD_CROP, FLIP = range(3)

TOGETHER = 4096  # the most rows whose numbers are computed together, ahead of requests
_STREAM_BITS = 32  # a counter is stream << 32 | k
_GOLDEN = np.uint64(GOLDEN)
# made once: for a single row, creating them would take most of the time
_COUNTERS = np.arange(1, 65, dtype=np.uint64) * _GOLDEN
_11, _32 = np.uint64(11), np.uint64(32)


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Random numbers as a function of (seed, epoch, sample). A transform gets those of its batch.

    A sample draws the same numbers on any rank, worker and batch, and different ones in the next epoch.

    Args:
        seed: The seed of the run.
        epoch: The epoch, from 0.
        indices: The numbers of the samples, one row each.

    Example:
        >>> draws = phalanx.data.Draws(seed=0, epoch=1, indices=[7, 8])
        >>> draws.uniform(stream=0).shape, draws.integers(stream=1, high=10).max() < 10
        ((2,), np.True_)
    """

    seed: int
    epoch: int
    indices: np.ndarray
    _whole: tuple[Draws, int] | None = field(default=None, repr=False)  # of one row: the draws it belongs to, and its row number
    _asked: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)  # by stream and count, for all rows

    def __post_init__(self) -> None:
        if self.seed < 0 or self.epoch < 0:
            raise ValueError(f"seed={self.seed}, epoch={self.epoch}: both must be 0 or more")
        object.__setattr__(self, "indices", np.asarray(self.indices, dtype=np.int64).reshape(-1))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, rows: int | slice | np.ndarray) -> Draws:
        """The draws of some rows, or of one row for an int.

        If one row is requested, the others follow, so all are computed at once, in the time of one.
        """
        whole = (self, rows) if isinstance(rows, int) and len(self) <= TOGETHER else None
        return Draws(self.seed, self.epoch, self.indices[rows], whole)

    def uniform(self, stream: int, count: int | None = None) -> np.ndarray:
        """Numbers in [0, 1): one per row, or rows x `count`. Each use has its own `stream`."""
        numbers = self._numbers(stream, 1 if count is None else count)
        return numbers[:, 0] if count is None else numbers

    def integers(self, stream: int, high: int | np.ndarray) -> np.ndarray:
        """One whole number in [0, high) per row. `high` is a number or one number per row, up to 2**32."""
        limits = np.asarray(high, dtype=np.int64)
        if limits.size and (limits.min() < 1 or limits.max() > 1 << 32):
            raise ValueError(f"high={high}: must be from 1 to 2**32")
        upper = self._bits(stream, 1)[:, 0] >> _32
        return ((upper * limits.astype(np.uint64)) >> _32).astype(np.int64)  # the bias is at most high / 2**32

    def words(self, stream: int) -> np.ndarray:
        """64 random bits per row, as unsigned numbers, to seed another generator."""
        return self._bits(stream, 1)[:, 0]

    def _numbers(self, stream: int, count: int) -> np.ndarray:
        if self._whole is None:
            return (self._bits(stream, count) >> _11) * 2.0**-53  # the full precision of a double
        whole, row = self._whole
        asked = whole._asked.get((stream, count))
        if asked is None:
            asked = whole._asked[stream, count] = whole._numbers(stream, count)
            asked.flags.writeable = False
        return asked[[row]]

    def _bits(self, stream: int, count: int) -> np.ndarray:
        """64 bits for each of rows x `count`."""
        samples = mix(self.indices.view(np.uint64) * _GOLDEN + _key(self.seed, self.epoch))
        counters = _COUNTERS[:count] if count <= len(_COUNTERS) else np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        return mix(samples[:, None] + (counters + _stream_offset(stream)))


@functools.lru_cache(maxsize=64)
def _stream_offset(stream: int) -> np.uint64:
    if not 0 <= stream < 1 << (64 - _STREAM_BITS):
        raise ValueError(f"stream={stream}: must be from 0 to 2**{64 - _STREAM_BITS} - 1")
    return (np.array([stream << _STREAM_BITS], dtype=np.uint64) * _GOLDEN)[0]


@functools.lru_cache(maxsize=64)
def _key(seed: int, epoch: int) -> np.uint64:
    """64 bits of both, for numbers of any length."""
    key = np.zeros(1, dtype=np.uint64)
    for number in (seed, epoch):
        words = [number >> shift & (1 << 64) - 1 for shift in range(0, max(1, number.bit_length()), 64)]
        for word in (len(words), *words):
            key = mix(mix(key + _GOLDEN) ^ np.array([word], dtype=np.uint64))
    return key[0]
