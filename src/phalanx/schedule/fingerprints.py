"""What slots hold, as fingerprints: every input is a random number, and everything is computed modulo a prime.

They show the weight of every input, but not the order of the additions. A claim about weights needs no more, and this takes
a third of the time of `expressions.py`. They follow moves and scales only; library calls need expressions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

# The largest safe prime below 2^60. Safe means that (PRIME - 1) / 2 is prime, too, so no short product of small factors is 1
# again: modulo 2^61 - 1, sixty-one doublings would look like none.
PRIME = 2**60 - 3677
# The safe prime before it. A number modulo the product of both holds two values: a fingerprint modulo PRIME and, if every input
# is 1 modulo SECOND, the sum of a slot's weights modulo SECOND.
SECOND = 2**60 - 5849
BOTH = PRIME * SECOND
_ONE_AND_ZERO = SECOND * pow(SECOND, -1, PRIME)  # 1 modulo PRIME, 0 modulo SECOND
_ZERO_AND_ONE = PRIME * pow(PRIME, -1, SECOND)


@lru_cache(maxsize=1)
def random_inputs(count: int) -> tuple[int, ...]:
    """One number per input, below PRIME: the same every time, so that a failure can be repeated."""
    rng = random.Random(0)
    return tuple(rng.randrange(1, PRIME) for _ in range(count))


@lru_cache(maxsize=1)
def with_sums(count: int) -> tuple[int, ...]:
    """Numbers equal to `random_inputs(count)` modulo PRIME, and to 1 modulo SECOND."""
    return tuple((value * _ONE_AND_ZERO + _ZERO_AND_ONE) % BOTH for value in random_inputs(count))


class Fingerprints:
    """Arithmetic modulo `modulus`. `whole` converts a factor."""

    def __init__(self, modulus: int, whole: Callable[[Fraction], int]) -> None:
        self.modulus = modulus
        self._whole = whole
        self._factors: dict[
            int, tuple[int, Fraction]
        ] = {}  # by identity; the fraction is kept, so that no other gets its identity

    def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return (a + b) % self.modulus

    def add_all(self, left: list[int], right: list[int]) -> list[int]:
        """The sums of many pairs."""
        modulus = self.modulus
        return [(a + b) % modulus for a, b in zip(left, right, strict=True)]

    def scale_all(self, values: list[int], factor: Fraction) -> list[int]:
        """Many numbers times one factor."""
        times, modulus = self._times(factor), self.modulus
        return [value * times % modulus for value in values]

    def scale_each(self, values: list[int], factors: list[Fraction]) -> list[int]:
        """Many numbers, each times its own factor."""
        times = {key: self._times(factor) for key, factor in dict(zip(map(id, factors), factors, strict=True)).items()}
        modulus = self.modulus
        return [value * times[key] % modulus for value, key in zip(values, map(id, factors), strict=True)]

    def _times(self, factor: Fraction) -> int:
        known = self._factors.get(id(factor))
        if known is None:
            known = self._factors[id(factor)] = (self._whole(factor), factor)
        return known[0]
