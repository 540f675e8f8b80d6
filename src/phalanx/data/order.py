"""The order of an epoch: a permutation of range(n) that is computed on demand, never stored or sent.

`epoch_order(seed, epoch, n)` is the same on every rank, and its memory does not grow with n: element i is a pure function of
(seed, epoch, n, i). It is a Feistel network on pairs (left, right) with left * right just above n (Black and Rogaway, Ciphers
with arbitrary finite domains, 2002). Each round adds a hash of one half to the other, which can be undone and is therefore a
bijection. The few results outside range(n) pass through the network again until they fall inside.

For small n, a network with so few states would repeat itself between epochs. So up to SMALL elements the order is that of their
sorted 64-bit hashes, which are kept: 32 KiB.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from phalanx.data.position import whole_number
from phalanx.data.splitmix import FIRST, GOLDEN, MASK, SECOND, mix, mix_int

Indices = NDArray[np.int64]

SMALL = 4096  # elements; up to here the order is sorted hashes
ROUNDS = 6  # with 2 an order is visibly regular (tests/data/test_order.py), with 3 it is not; the rest is margin
BLOCK = 8192  # indices at a time: the five arrays of a block stay in the second-level cache
LARGEST = 1 << 62  # left and right below 2**31, so that the product of a 32-bit hash and either fits in 64 bits

_DOMAIN = 0x6F72646572  # "order": so that other uses of the same seed and epoch draw other numbers


def epoch_order(seed: int, epoch: int, n: int) -> Order:
    """The order in which an epoch visits its samples, computed as you read it.

    It is the same on all ranks, and its memory does not grow with `n`.

    Args:
        seed: Any whole number from 0.
        epoch: Any whole number from 0.
        n: The number of samples.

    Returns:
        A permutation of range(n).

    Raises:
        ValueError: If a number is negative, or `n` is more than 2**62.

    Example:
        >>> order = phalanx.data.epoch_order(seed=0, epoch=3, n=10**12)
        >>> len(order), order[:2].shape, sorted(phalanx.data.epoch_order(0, 0, 5)) == [0, 1, 2, 3, 4]
        (1000000000000, (2,), True)
    """
    return Order(whole_number("seed", seed), whole_number("epoch", epoch), whole_number("n", n))


@dataclass(frozen=True)
class Order:
    """A permutation of range(n) that you read like a sequence. Use `epoch_order` to make one.

    Args:
        seed: The seed.
        epoch: The epoch.
        n: The number of elements, at most 2**62.

    Example:
        >>> order = phalanx.data.Order(seed=0, epoch=0, n=1000)
        >>> isinstance(order[0], int), order[10:20].dtype, len(set(order))
        (True, dtype('int64'), 1000)
    """

    seed: int
    epoch: int
    n: int

    def __post_init__(self) -> None:
        if self.n > LARGEST:
            raise ValueError(f"n={self.n}: an order has at most 2**62 elements")

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice | Indices | list[int] | range) -> Indices: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._at(range(self.n)[index])
        if isinstance(index, range | list | np.ndarray):
            places = np.asarray(index) if len(index) else np.empty(0, np.int64)
            if places.dtype.kind not in "iu":
                raise TypeError(f"an order is read at integers, got an array of {places.dtype}")
            return self._at_array(self._inside(places.astype(np.int64)))
        place = operator.index(index)
        return int(self._at_array(self._inside(np.array([place])))[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.n, BLOCK):
            yield from self[start : start + BLOCK].tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("an order is computed: its array is always new")
        return self[:].astype(dtype or np.int64, copy=False)

    def tolist(self) -> list[int]:
        """The whole permutation as a list."""
        return self[:].tolist()

    def _inside(self, places: Indices) -> Indices:
        outside = (places < -self.n) | (places >= self.n)
        if outside.any():
            raise IndexError(f"index {places[outside][0]} of an order of {self.n} elements")
        return np.where(places < 0, places + self.n, places)

    def _at(self, places: range) -> Indices:
        found = np.empty(len(places), np.int64)
        for start in range(0, len(places), BLOCK):
            block = places[start : start + BLOCK]
            found[start : start + len(block)] = self._block(np.arange(block.start, block.stop, block.step))
        return found

    def _at_array(self, places: Indices) -> Indices:
        found = np.empty(places.shape, np.int64)
        flat, out = places.reshape(-1), found.reshape(-1)
        for start in range(0, len(flat), BLOCK):
            out[start : start + BLOCK] = self._block(flat[start : start + BLOCK])
        return found

    def _block(self, places: Indices) -> Indices:
        if self.n <= SMALL:
            return self._sorted_hashes[places]
        return permute(places, self.n, self._keys)

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        return tuple(_hash(self.seed, self.epoch, number) for number in range(ROUNDS))

    @cached_property
    def _sorted_hashes(self) -> Indices:
        counter = np.arange(1, self.n + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return np.argsort(mix(counter + np.uint64(_hash(self.seed, self.epoch, 0))), kind="stable").astype(np.int64)


def permute(places: Indices, n: int, keys: tuple[int, ...]) -> Indices:
    """Apply the permutation of range(n) that `keys` select to `places`, with one round per key."""
    rows = math.isqrt(max(n - 1, 0)) + 1  # rows * columns >= n, and less than n + rows: few fall outside
    columns = -(-n // rows)
    found = _network(places.astype(np.uint64), rows, columns, keys)
    outside = np.flatnonzero(found >= n)
    while outside.size:  # every orbit that starts inside returns inside
        found[outside] = _network(found[outside], rows, columns, keys)
        outside = outside[found[outside] >= n]
    return found.view(np.int64)


def _network(x: NDArray[np.uint64], rows: int, columns: int, keys: tuple[int, ...]) -> NDArray[np.uint64]:
    """The Feistel network on range(rows * columns)."""
    row = x // np.uint64(columns)
    halves, sizes = (row, x - row * np.uint64(columns)), (rows, columns)
    h, t = np.empty_like(x), np.empty_like(x)
    for number, key in enumerate(keys):
        half, other, size = halves[number % 2], halves[1 - number % 2], np.uint64(sizes[number % 2])
        np.add(other, np.uint64(key), out=h)
        np.multiply(h, np.uint64(FIRST), out=h)
        np.right_shift(h, np.uint64(29), out=t)
        np.bitwise_xor(h, t, out=h)
        np.multiply(h, np.uint64(SECOND), out=h)
        np.right_shift(h, np.uint64(32), out=h)
        np.multiply(h, size, out=h)
        np.right_shift(h, np.uint64(32), out=h)  # 32 bits of hash, scaled to range(size)
        np.add(half, h, out=half)
        np.subtract(half, size, out=t)  # wraps to a huge number if half < size already
        np.minimum(half, t, out=half)
    return halves[0] * np.uint64(columns) + halves[1]


def _hash(seed: int, epoch: int, number: int) -> int:
    """Hash (seed, epoch, number) to 64 bits. Seeds and epochs of any length count in full."""
    state = _DOMAIN
    for value in (seed, epoch, number):
        limbs = max(1, -(-value.bit_length() // 64))
        for limb in (limbs, *(value >> (64 * k) & MASK for k in range(limbs))):
            state = mix_int((state ^ limb) + GOLDEN & MASK)
    return state
