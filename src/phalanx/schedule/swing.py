"""Swing: halving-doubling for rings and tori, with partners at distances 1, 1, 3, 5, 11, ... on alternating sides.

Paper: De Sensi, Bonato, Saam, Hoefler, "Swing: Short-cutting Rings for Higher Bandwidth Allreduce", NSDI 2024. The partner of
rank r in step s is r + d(s) for even r and r - d(s) for odd r, where d(s) = 1 - 2 + 4 - ... has s + 1 terms: 1, -1, 3, -5, 11.
On a physical ring, these messages share links with fewer others than at halving-doubling's distances 1, 2, 4, 8.

Differences from the paper: only a ring of n ranks, one port. Blocks are numbered in the order in which the halves are cut, so
every message is one run of chunks; in the paper block r belongs to rank r, and a message is scattered. If n is not a power of
two, folding takes 2 more steps.
"""

from __future__ import annotations

from .folding import core_size, fold
from .ops import Move, Op, Schedule, Step


def swing(n: int) -> Schedule:
    """All-reduce by halving and doubling with partners on alternating sides: few steps, short paths on a ring.

    Args:
        n: The number of ranks. It need not be a power of two.

    Returns:
        A schedule of 2 floor(log2 n) steps, plus 2 if n is not a power of two.

    Raises:
        ValueError: If `n` is less than 1.

    Example:
        >>> len(phalanx.schedule.swing(16).steps)
        8
        >>> [move.dst for move in phalanx.schedule.swing(8).steps[2].ops][:4]
        [3, 6, 5, 0]
    """
    if n < 1:
        raise ValueError(f"swing({n}): a world has at least 1 rank; give n >= 1")
    chunks = core_size(n)
    return Schedule(f"swing({n})", n, chunks, fold(n, chunks, _swing))


def _swing(core: tuple[int, ...]) -> list[Step]:
    size = len(core)
    rounds = size.bit_length() - 1
    distances = [(1 - (-2) ** (s + 1)) // 3 for s in range(rounds)]
    partners = [[(i + distance if i % 2 == 0 else i - distance) % size for i in range(size)] for distance in distances]
    owned = [range(size)] * size  # by core index: the chunks it is still responsible for
    halving, doubling = [], []
    for s, partner in enumerate(partners):
        lower = _lower_side(partner, partners[s + 1 :])
        kept = [part[: len(part) // 2] if side else part[len(part) // 2 :] for part, side in zip(owned, lower, strict=True)]
        sends: list[Op] = [Move(core[i], core[j], kept[j], reduce=True) for i, j in enumerate(partner)]
        returns: list[Op] = [Move(core[i], core[j], kept[i]) for i, j in enumerate(partner)]
        halving.append(Step(tuple(sends), f"halve, distance {abs(distances[s])}"))
        doubling.append(Step(tuple(returns), f"double, distance {abs(distances[s])}"))
        owned = kept
    return halving + doubling[::-1]


def _lower_side(partner: list[int], later: list[list[int]]) -> list[bool]:
    """Whether each rank keeps the lower half. Ranks that meet later keep the same half, partners opposite ones."""
    side: dict[int, bool] = {}
    for first in range(len(partner)):
        if first not in side:
            side.update(dict.fromkeys(_reached(first, later), True))
            side.update(dict.fromkeys(_reached(partner[first], later), False))
    return [side[i] for i in range(len(partner))]


def _reached(first: int, later: list[list[int]]) -> set[int]:
    group = {first}
    for partner in later:
        group |= {partner[i] for i in group}
    return group
