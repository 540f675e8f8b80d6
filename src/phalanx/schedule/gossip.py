"""Gossip: one round in which every rank averages its buffer with one other's, instead of an all-reduce.

Paper: Daily, Vishnu, Siegel, Warfel, Amatya, "GossipGraD: Scalable Deep Learning using Gossip Communication based Asynchronous
Gradient Descent", arXiv 1803.05880. O(1) communication per round; after ceil(log2 n) rounds every rank has heard, indirectly,
from every other; then the partners are rotated.

Differences from the paper: any n, where the authors' code demands a power of two: dissemination wraps around, and in a hypercube
a rank whose partner does not exist sits the round out. Rotation is a seeded permutation that every rank computes by itself, a new
one for each period, where the authors shuffle n of them on rank 0 and broadcast. Halving comes before the exchange, not after it:
the same number, and the sum cannot overflow.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Literal

from .ops import Move, Scale, Schedule, Step
from .runs import runs

Topology = Literal["dissemination", "hypercube"]


def gossip(n: int, round: int, topology: Topology = "dissemination", seed: int = 0, *, rotate: bool = True) -> Schedule:  # noqa: A002  # the paper's word
    """One round of gossip: every rank averages its buffer with that of one other rank.

    Args:
        n: The number of ranks.
        round: The number of the round, from 0. Rounds differ in the partners.
        topology: `"dissemination"` works for any `n`; `"hypercube"` pairs ranks and is meant for powers of two.
        seed: Seeds the permutations of the ranks between periods. All ranks pass the same.
        rotate: Permute the ranks after each period of `gossip_period(n)` rounds. Without it the first period repeats.

    Returns:
        A schedule whose goal is `"mixing"`.

    Raises:
        ValueError: If `n`, `round` or `topology` makes no sense.

    Example:
        >>> s = phalanx.schedule.gossip(8, round=0)
        >>> s.goal, len(s.steps)
        ('mixing', 2)
    """
    sends = gossip_partners(n, round, topology, seed, rotate=rotate)
    name = f"gossip({n}, round={round}, {topology})"
    moves = tuple(Move(rank, to, range(1), reduce=True) for rank, to in enumerate(sends) if to is not None)
    if not moves:
        return Schedule(name, n, 1, (), goal="mixing")
    active = [rank for rank, to in enumerate(sends) if to is not None]
    halve = tuple(Scale(ranks, range(1), Fraction(1, 2)) for ranks in runs(active))
    return Schedule(name, n, 1, (Step(halve, "halve"), Step(moves, "exchange")), goal="mixing")


def gossip_partners(
    n: int,
    round: int,  # noqa: A002  # the paper's word
    topology: Topology = "dissemination",
    seed: int = 0,
    *,
    rotate: bool = True,
) -> tuple[int | None, ...]:
    """The rank that each rank sends to in one round of gossip.

    Args:
        n: The number of ranks.
        round: The number of the round, from 0.
        topology: `"dissemination"` or `"hypercube"`.
        seed: Seeds the permutations of the ranks between periods.
        rotate: Permute the ranks after each period.

    Returns:
        One destination per rank, or None for a rank that sits the round out.

    Raises:
        ValueError: If `n`, `round` or `topology` makes no sense.

    Example:
        >>> phalanx.schedule.gossip_partners(4, round=1)
        (2, 3, 0, 1)
    """
    if n < 1:
        raise ValueError(f"gossip({n}): a world has at least 1 rank; give n >= 1")
    if round < 0:
        raise ValueError(f"gossip: round {round} is negative; rounds count from 0")
    if topology not in ("dissemination", "hypercube"):
        raise ValueError(f"gossip: topology {topology!r} is unknown; give 'dissemination' or 'hypercube'")
    if n == 1:
        return (None,)
    period = gossip_period(n)
    rotation, k = divmod(round, period)
    seat = _permutation(seed, rotation, n) if rotate and rotation > 0 else list(range(n))  # the rank at each place
    sends: list[int | None] = [None] * n
    for place, rank in enumerate(seat):
        to = (place - 2**k) % n if topology == "dissemination" else place ^ 2**k
        sends[rank] = seat[to] if to < n else None
    return tuple(sends)


def gossip_period(n: int) -> int:
    """The number of rounds after which every rank has heard from every other, directly or not.

    Partners rotate after each period. A hypercube reaches all ranks only where `n` is a power of two.

    Args:
        n: The number of ranks.

    Returns:
        ceil(log2 n), at least 1.

    Example:
        >>> phalanx.schedule.gossip_period(100)
        7
    """
    return max(1, (n - 1).bit_length())


def _permutation(seed: int, rotation: int, n: int) -> list[int]:
    """A Fisher-Yates shuffle, the same in every process and every Python: of `random` only random() is promised not to change."""
    draw = random.Random(f"phalanx gossip {seed} {rotation} {n}").random
    seat = list(range(n))
    for i in reversed(range(1, n)):
        j = int(draw() * (i + 1))
        seat[i], seat[j] = seat[j], seat[i]
    return seat
