"""The double binary tree: two complementary trees, each reducing half of the buffer upwards and broadcasting it downwards.

Papers: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009;
used for training since NCCL 2.4. A leaf of one tree is an interior rank of the other, so all ranks share the work. Latency grows
with log n: 2 * height + pipeline - 1 steps.

Differences from the papers: no edge colouring, so a rank may receive from both children of a tree in one step, as in NCCL. The
broadcast of a chunk starts as soon as the root has it, while later chunks still go up. The second tree mirrors the first in even
worlds and is shifted by one rank in odd ones, again as in NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .ops import Move, Op, Schedule, Step


def tree(n: int, *, pipeline: int | None = None) -> Schedule:
    """All-reduce along two complementary binary trees, as in NCCL. Latency grows with log n.

    Args:
        n: The number of ranks.
        pipeline: The number of chunks of each tree's half of the buffer. The default is twice the height of the tree. The
            pipeline is then as long as the path up and down, and half of the steps run at full width.

    Returns:
        A schedule of 2 * height + pipeline - 1 steps.

    Raises:
        ValueError: If `n` or `pipeline` is less than 1.

    Example:
        >>> len(phalanx.tree(16).steps), len(phalanx.tree(16, pipeline=1).steps)
        (15, 8)
    """
    name = f"tree({n})" if pipeline is None else f"tree({n}, pipeline={pipeline})"
    if n < 1:
        raise ValueError(f"{name}: a world has at least 1 rank; give n >= 1")
    if pipeline is not None and pipeline < 1:
        raise ValueError(f"{name}: a pipeline has at least 1 chunk per tree; give pipeline >= 1, or leave it out")
    height = (n - 1).bit_length()
    length = pipeline or max(1, 2 * height)
    ups: list[list[Op]] = [[] for _ in range(2 * height + length - 1)] if n > 1 else []
    downs: list[list[Op]] = [[] for _ in ups]
    for half, edges in enumerate(tree_edges(n)):
        for edge in edges:
            for c in range(length):
                chunk = range(half * length + c, half * length + c + 1)
                ups[edge.height + c].append(Move(edge.rank, edge.parent, chunk, reduce=True))
                downs[height + edge.depth - 1 + c].append(Move(edge.parent, edge.rank, chunk))
    steps = tuple(Step((*up, *down), _label(up, down)) for up, down in zip(ups, downs, strict=True))
    return Schedule(name, n, 2 * length, steps)


class Edge(NamedTuple):
    """A rank of a tree and its parent, with the rank's height above the leaves and its depth below the root."""

    rank: int
    parent: int
    height: int
    depth: int


def tree_edges(n: int) -> tuple[list[Edge], list[Edge]]:
    """The edges of the two trees of `n` ranks, in the order of the places below their roots."""
    second = [(n - 1 - r) if n % 2 == 0 else (r + 1) % n for r in range(n)]  # the rank at each place of the second tree
    parents = [0, *(_parent(place, n) for place in range(1, n))]
    heights = [0, *((place & -place).bit_length() - 1 for place in range(1, n))]
    depths = [0] * n
    for height in range((n - 1).bit_length() - 1, -1, -1):  # parents are higher than their children
        for place in range(1 << height, n, 2 << height):
            depths[place] = depths[parents[place]] + 1

    def edges(ranks: Sequence[int]) -> list[Edge]:
        return [Edge(ranks[i], ranks[parents[i]], heights[i], depths[i]) for i in range(1, n)]

    return edges(range(n)), edges(second)


def _parent(place: int, n: int) -> int:
    """Parent in an in-order binary tree below place 0: odd places are leaves; k trailing zeros mean height k."""
    reach = place & -place  # distance to the parent; children are half as far
    left = place & (2 * reach) or place + reach >= n  # also `left` if the tree is cut off on the right
    return place - reach if left else place + reach


def _label(up: list[Op], down: list[Op]) -> str:
    return "reduce up, broadcast down" if up and down else "reduce up" if up else "broadcast down"
