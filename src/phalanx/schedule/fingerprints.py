"""What slots hold, as fingerprints: every input is a random number, and everything is computed modulo a prime.

They show the weight of every input, but not the order of the additions. A claim about weights needs no more, and this takes
a third of the time of `expressions.py`. They follow moves and scales only; library calls need expressions.

The numbers and the primes are secrets of the process, because a schedule may come from a file. If they were known, a file could
scale one input so that its product looks like the sum of all, or add a multiple of the prime to a weight. A weight that is wrong
by a number of b bits goes unnoticed with a probability of about (b + 1) / 2^59: either the prime divides that number, which at
most b / 59 of the 2^53.6 primes of 60 bits do, or the random numbers happen to cancel it.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache


def _is_prime(n: int) -> bool:
    """Miller and Rabin's test, exact for odd n from 39 to 3 * 10^24."""
    zeros = ((n - 1) & (1 - n)).bit_length() - 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        power = pow(base, n >> zeros, n)
        if power != 1 and n - 1 not in (pow(power, 1 << k, n) for k in range(zeros)):
            return False
    return True


def _random_prime() -> int:
    """A prime from 2^59 to 2^60. Larger numbers would make the arithmetic slower."""
    while not _is_prime(n := 1 << 59 | secrets.randbits(59) | 1):
        pass
    return n


PRIME = _random_prime()
# A number modulo the product of both primes holds two values: a fingerprint modulo PRIME and, if every input is 1 modulo SECOND,
# the sum of a slot's weights modulo SECOND.
SECOND = _random_prime()
BOTH = PRIME * SECOND
_ONE_AND_ZERO = SECOND * pow(SECOND, -1, PRIME)  # 1 modulo PRIME, 0 modulo SECOND
_ZERO_AND_ONE = PRIME * pow(PRIME, -1, SECOND)
_SEED = secrets.randbits(128)


@lru_cache(maxsize=1)
def random_inputs(count: int) -> tuple[int, ...]:
    """One number per input, below PRIME: the same every time in this process, and not known outside it."""
    rng = random.Random(_SEED)
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
