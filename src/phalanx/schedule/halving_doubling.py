"""Halving-doubling: recursive halving reduce-scatter, recursive doubling all-gather; 2 log2(n) steps, bandwidth-optimal.

Paper: Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004; Thakur, Rabenseifner, Gropp, IJHPCA 2005.

Differences from the paper: vector halving with distance *doubling*, so that the largest messages go to the nearest ranks. For n
not a power of two, folding sends the whole buffer once each way (2 more steps) instead of the halves of the 2005 paper.
"""

from __future__ import annotations

from .folding import core_size, fold
from .ops import Move, Op, Schedule, Step


def halving_doubling(n: int) -> Schedule:
    """All-reduce by recursive halving and doubling: few steps, and no more bytes than a ring.

    Args:
        n: The number of ranks. It need not be a power of two.

    Returns:
        A schedule of 2 floor(log2 n) steps, plus 2 if n is not a power of two.

    Raises:
        ValueError: If `n` is less than 1.

    Example:
        >>> len(phalanx.halving_doubling(16).steps), len(phalanx.halving_doubling(17).steps)
        (8, 10)
    """
    if n < 1:
        raise ValueError(f"halving_doubling({n}): a world has at least 1 rank; give n >= 1")
    chunks = core_size(n)
    return Schedule(f"halving_doubling({n})", n, chunks, fold(n, chunks, _halve_and_double))


def _halve_and_double(core: tuple[int, ...]) -> list[Step]:
    owned = [range(len(core))] * len(core)  # by core index: the chunks it is still responsible for
    halving, doubling = [], []
    distance = 1
    while distance < len(core):
        kept = [_half(part, upper=bool(i & distance)) for i, part in enumerate(owned)]
        partner = [i ^ distance for i in range(len(core))]
        sends: list[Op] = [Move(core[i], core[j], kept[j], reduce=True) for i, j in enumerate(partner)]
        returns: list[Op] = [Move(core[i], core[j], kept[i]) for i, j in enumerate(partner)]
        halving.append(Step(tuple(sends), f"halve, distance {distance}"))
        doubling.append(Step(tuple(returns), f"double, distance {distance}"))
        owned = kept
        distance *= 2
    return halving + doubling[::-1]


def _half(part: range, *, upper: bool) -> range:
    middle = len(part) // 2
    return part[middle:] if upper else part[:middle]
