"""splitmix64 for numbers and arrays (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: its multiples visit all 64-bit numbers before repeating
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
MASK = (1 << 64) - 1

# made once: for a single row of draws, creating them would take most of the time
_27, _30, _31 = (np.uint64(bits) for bits in (27, 30, 31))
_FIRST, _SECOND = np.uint64(FIRST), np.uint64(SECOND)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser: a bijection of 64 bits in which every input bit affects every output bit."""
    x = x ^ (x >> _30)
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


def mix_int(x: int) -> int:
    """The same for one number, without numpy's overhead."""
    x = (x ^ x >> 30) * FIRST & MASK
    x = (x ^ x >> 27) * SECOND & MASK
    return x ^ x >> 31
