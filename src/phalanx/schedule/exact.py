"""The gossip topology "exact": rounds of pairs that end in the exact mean, for any number of ranks.

In a round every rank has at most one partner. The two ranks a and b of a pair mix with one weight w:

    a becomes (1 - w) a + w b         b becomes (1 - w) b + w a

so a round is doubly stochastic for any w. Three rules produce the mean of n ranks; the shortest is used:

    power of two    log2 n rounds: a hypercube, w = 1/2
    product         n = q * m: average every row of q ranks, then every column of m
    split           n = 2^p + r: the first 2^p ranks average; r of them meet the other r with w = 2^p / n, which gives these r
                    their share of the mean of all; then the 2^p average again. Meanwhile, the r average among themselves.
                    2 p + 1 rounds

A rank that a rule leaves out does not sit the round out if another one of its group is left out too: they mix values that the
rules have made equal, which changes no mean, and bring what was added since closer together. With an even n nobody sits out.

Paper: Takezawa, Sato, Bao, Niwa, Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized Learning
via Finite-time Convergence", NeurIPS 2023, arXiv 2305.11420: the Base-2 graph (k = 1). Differences: it splits n into all its
powers of two at once, and uses a product only if one factor is a power of two. Any product is allowed here, so 332 of the 1,023
numbers up to 1,024 need fewer rounds (9 ranks: 6, not 7), and none needs more. There, ranks that are left out do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import cycle, islice
from math import isqrt

HALF = Fraction(1, 2)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two places that exchange in a round, and the weight of what each receives."""

    a: int
    b: int
    weight: Fraction

    def at(self, offset: int, stride: int = 1) -> Pair:
        """The same pair, moved to other places."""
        return Pair(offset + stride * self.a, offset + stride * self.b, self.weight)


Round = tuple[Pair, ...]


@lru_cache(maxsize=4096)
def exact_period(n: int) -> int:
    """The number of rounds until the mean of `n` places is exact: at most 2 floor(log2 n) + 1, and 1 for a single place."""
    return max(1, _length(n))


@lru_cache(maxsize=4096)
def _length(n: int) -> int:
    power = n.bit_length() - 1
    if n == 1 << power:
        return power
    return min([2 * power + 1, *(_length(q) + _length(n // q) for q in _divisors(n))])


def _divisors(n: int) -> list[int]:
    """The divisors from 2 to the square root of `n`."""
    return [q for q in range(2, isqrt(n) + 1) if n % q == 0]


@lru_cache(maxsize=64)
def exact_rounds(n: int) -> tuple[Round, ...]:
    """The rounds of one period."""
    power = n.bit_length() - 1
    if n == 1 << power:
        return tuple(tuple(Pair(a, a | 1 << k, HALF) for a in range(n) if not a >> k & 1) for k in range(power))
    q = next((q for q in _divisors(n) if _length(q) + _length(n // q) == _length(n)), None)
    return _split(power, n - (1 << power)) if q is None else _product(*sorted((q, n // q), key=_left_out))


def _left_out(n: int) -> Fraction:
    """The mean share of ranks that sit a round out."""
    return 1 - Fraction(2 * sum(map(len, exact_rounds(n))), n * exact_period(n))


def _product(q: int, m: int) -> tuple[Round, ...]:
    """The values of a row are equal when the columns begin, so a row that a round of the columns leaves out may mix its own."""
    rows = [tuple(pair.at(row * q) for row in range(m) for pair in pairs) for pairs in exact_rounds(q)]
    within = cycle(exact_rounds(q))
    columns = []
    for pairs in exact_rounds(m):
        left_out = set(range(m)) - {place for pair in pairs for place in (pair.a, pair.b)}
        beside = next(within) if left_out else ()
        columns.append(
            (
                *(pair.at(column, q) for column in range(q) for pair in pairs),
                *(pair.at(row * q) for row in sorted(left_out) for pair in beside),
            )
        )
    return (*rows, *columns)


def _split(power: int, rest: int) -> tuple[Round, ...]:
    """The `rest` have time for one period at least. Those of the core that do not meet one of them have equal values."""
    core = 1 << power
    average = exact_rounds(core)
    meet = (
        *(Pair(i, core + i, Fraction(core, core + rest)) for i in range(rest)),
        *(Pair(i, i + 1, HALF) for i in range(rest, core - 1, 2)),
    )
    beside = [tuple(pair.at(core) for pair in pairs) for pairs in islice(cycle(exact_rounds(rest) or [()]), 2 * power)]
    both = [(*own, *others) for own, others in zip((*average, *average), beside, strict=True)]
    return (*both[:power], meet, *both[power:])
