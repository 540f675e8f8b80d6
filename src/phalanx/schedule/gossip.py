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
    """Round number `round` of gossip among `n` ranks; `rotate=False` keeps the partners of the first period for ever."""
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
    """To whom each rank sends in this round; None where it sits the round out."""
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
    """Rounds until every rank has heard from every other (hypercube: where n is a power of two), and partners rotate."""
    return max(1, (n - 1).bit_length())


def _permutation(seed: int, rotation: int, n: int) -> list[int]:
    """A Fisher-Yates shuffle, the same in every process and every Python: of `random` only random() is promised not to change."""
    draw = random.Random(f"phalanx gossip {seed} {rotation} {n}").random
    seat = list(range(n))
    for i in reversed(range(1, n)):
        j = int(draw() * (i + 1))
        seat[i], seat[j] = seat[j], seat[i]
    return seat
