"""Recursive doubling: every rank swaps its whole buffer with r XOR 2^k and adds; log2(n) steps, the fewest possible.

Paper: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005, section 4.

Differences from the paper: none. Best for small messages, where only latency counts. Both partners compute the same sum
of two numbers, and a + b = b + a holds in floating point, so all ranks end bitwise equal.
"""

from __future__ import annotations

from .folding import fold
from .ops import Move, Schedule, Step


def recursive_doubling(n: int) -> Schedule:
    """All-reduce in the fewest possible steps: every rank swaps its whole buffer with rank XOR 2^k and adds. For small messages.

    Args:
        n: The number of ranks. It need not be a power of two.

    Returns:
        A schedule of floor(log2 n) steps, plus 2 if n is not a power of two. All ranks end with equal bits.

    Raises:
        ValueError: If `n` is less than 1.

    Example:
        >>> len(phalanx.schedule.recursive_doubling(8).steps)
        3
    """
    if n < 1:
        raise ValueError(f"recursive_doubling({n}): a world has at least 1 rank; give n >= 1")
    return Schedule(f"recursive_doubling({n})", n, 1, fold(n, 1, _exchange))


def _exchange(core: tuple[int, ...]) -> list[Step]:
    steps, distance = [], 1
    while distance < len(core):
        swaps = (Move(rank, core[i ^ distance], range(1), reduce=True) for i, rank in enumerate(core))
        steps.append(Step(tuple(swaps), f"exchange, distance {distance}"))
        distance *= 2
    return steps
