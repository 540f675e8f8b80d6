"""Broadcasts: `binomial` has the fewest steps, for small messages; in `scatter_gather` no rank sends twice the buffer.

Papers: binomial tree: folklore, as in MPICH. Scatter and gather: van de Geijn, "On global combine operations", JPDC 1994; Thakur,
Rabenseifner, Gropp, IJHPCA 2005.

Differences from the papers: the farthest ranks are served first, so few messages cross between hosts with contiguous ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from .ops import Collective, Move, Schedule, Step


def binomial(n: int, root: int = 0) -> Schedule:
    """Broadcast along a binomial tree: the fewest steps, for small messages.

    Args:
        n: The number of ranks.
        root: The rank whose buffer all ranks get.

    Returns:
        A schedule of ceil(log2 n) steps, whose goal is `"copy"`.

    Raises:
        ValueError: If `n` is less than 1 or `root` is not a rank.

    Example:
        >>> len(phalanx.schedule.binomial(8).steps)
        3
    """
    name = _checked("binomial", n, root)
    steps = []
    for distance, senders in _rounds(n):
        moves = (Move((root + v) % n, (root + v + distance) % n, range(1)) for v in senders)
        steps.append(Step(tuple(moves), f"broadcast, distance {distance}"))
    return Schedule(name, n, 1, tuple(steps), goal="copy", root=root)


def scatter_gather(n: int, root: int = 0) -> Schedule:
    """Broadcast large messages: scatter the buffer down a binomial tree, then all-gather it around a ring.

    Args:
        n: The number of ranks.
        root: The rank whose buffer all ranks get.

    Returns:
        A schedule whose goal is `"copy"`. No rank sends twice the buffer.

    Raises:
        ValueError: If `n` is less than 1 or `root` is not a rank.

    Example:
        >>> phalanx.schedule.verify(phalanx.schedule.scatter_gather(5, root=2))
    """
    name = _checked("scatter_gather", n, root)
    steps = []
    for distance, senders in _rounds(n):
        moves = (Move((root + v) % n, (root + v + distance) % n, range(v + distance, min(v + 2 * distance, n))) for v in senders)
        steps.append(Step(tuple(moves), f"scatter, distance {distance}"))
    if n > 1:
        group = tuple((root + v) % n for v in range(n))
        steps.append(Step((Collective("all_gather", group, range(n)),), "all-gather"))
    return Schedule(name, n, n, tuple(steps), goal="copy", root=root)


def _rounds(n: int) -> Iterator[tuple[int, range]]:
    """Distance and senders of each round of a binomial tree, ranks counted from the root."""
    distance = 1 << max(0, (n - 1).bit_length() - 1)
    while distance and n > 1:
        yield distance, range(0, n - distance, 2 * distance)
        distance //= 2


def _checked(algorithm: str, n: int, root: int) -> str:
    name = f"{algorithm}({n})" if root == 0 else f"{algorithm}({n}, root={root})"
    if n < 1:
        raise ValueError(f"{name}: a world has at least 1 rank; give n >= 1")
    if not 0 <= root < n:
        raise ValueError(f"{name}: root {root} is not a rank; give 0 <= root < {n}")
    return name
