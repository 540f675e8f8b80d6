"""Folding: extend algorithms for 2^k ranks to any number of ranks.

Each of the n - 2^k extra ranks first adds its buffer to a partner's, then idles, and gets the result at the end. From Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005. Partners are neighbours in rank
order, because those probably share a host.
"""

from __future__ import annotations

from collections.abc import Callable

from .ops import Move, Step


def fold(n: int, chunks: int, core_steps: Callable[[tuple[int, ...]], list[Step]]) -> tuple[Step, ...]:
    """Fold the extra ranks, run `core_steps(core)` on a core of 2^k ranks, and unfold."""
    extra = n - core_size(n)
    pairs = [(2 * i, 2 * i + 1) for i in range(extra)]  # (stays, idles)
    core = (*(stays for stays, _ in pairs), *range(2 * extra, n))
    whole = range(chunks)
    steps = core_steps(core)
    if pairs:
        steps.insert(0, Step(tuple(Move(aside, stays, whole, reduce=True) for stays, aside in pairs), "fold"))
        steps.append(Step(tuple(Move(stays, aside, whole) for stays, aside in pairs), "unfold"))
    return tuple(steps)


def core_size(n: int) -> int:
    """The largest power of two that is at most `n`."""
    return 1 << (n.bit_length() - 1)
