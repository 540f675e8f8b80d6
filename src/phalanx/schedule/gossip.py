"""Gossip: instead of an all-reduce, every rank averages its buffer with one other rank's per round.

Paper: Daily, Vishnu, Siegel, Warfel, Amatya, "GossipGraD: Scalable Deep Learning using Gossip Communication based Asynchronous
Gradient Descent", arXiv 1803.05880. O(1) communication per round; after ceil(log2 n) rounds every rank has heard, indirectly,
from every other; then the partners are rotated.

Differences from the paper: any n works, while the authors' code requires a power of two. Dissemination wraps around; in a
hypercube, a rank whose partner does not exist sits the round out. Rotation is a seeded permutation that every rank computes
itself, a new one per period; the authors shuffle n of them on rank 0 and broadcast. We halve before the exchange, not after it:
the result is the same, and the sum cannot overflow.

The topology "exact" pairs ranks with weights other than 1/2 and gives the exact mean after every period, any n (`exact.py`).
"""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import groupby
from typing import Literal

from .exact import HALF, exact_period, exact_rounds
from .ops import ONE, Move, Scale, Schedule, Step
from .runs import runs

Topology = Literal["dissemination", "hypercube", "exact"]
ZERO = Fraction(0)
TOPOLOGIES: tuple[Topology, ...] = ("dissemination", "hypercube", "exact")


def gossip(n: int, round: int, topology: Topology = "dissemination", seed: int = 0, *, rotate: bool = True) -> Schedule:  # noqa: A002  # the paper's word
    """One round of gossip: every rank averages its buffer with that of one other rank.

    Args:
        n: The number of ranks.
        round: The number of the round, from 0. Each round has other partners.
        topology: `"dissemination"` works for any `n`; `"hypercube"` pairs ranks and is meant for powers of two; `"exact"` pairs
            ranks so that the rounds of a period make the exact mean, for any `n`.
        seed: Seeds the permutations of the ranks between periods. All ranks pass the same.
        rotate: Permute the ranks after each period of `gossip_period(n, topology)` rounds. Without it the first period repeats.

    Returns:
        A schedule whose goal is `"mixing"`.

    Raises:
        ValueError: If `n`, `round` or `topology` is invalid.

    Example:
        >>> s = phalanx.schedule.gossip(8, round=0)
        >>> s.goal, len(s.steps)
        ('mixing', 2)
        >>> period = phalanx.schedule.gossip_period(5, "exact")
        >>> rounds = [phalanx.schedule.gossip(5, k, "exact") for k in range(period)]
        >>> phalanx.schedule.verify(phalanx.schedule.chain(rounds, goal="mean"))
    """
    sends = gossip_partners(n, round, topology, seed, rotate=rotate)
    weights = gossip_weights(n, round, topology, seed, rotate=rotate)
    name = f"gossip({n}, round={round}, {topology})"
    by_weight: dict[Fraction, list[int]] = {}
    for weight, ranks in groupby(range(n), key=weights.__getitem__):
        if weight:
            by_weight.setdefault(weight, []).extend(ranks)
    if not by_weight:
        return Schedule(name, n, 1, (), goal="mixing")
    keep, moves, whole = [], [], range(1)
    for weight, own in by_weight.items():
        keep += [Scale(run, whole, 1 - weight) for run in runs(own)]
        # the data were scaled by 1 - w, the share that stays; times w / (1 - w) gives the share w that is sent
        factor = ONE if weight == HALF else weight / (1 - weight)
        moves += [Move(rank, to, whole, True, factor) for rank in own if (to := sends[rank]) is not None]
    label = "halve" if by_weight.keys() == {HALF} else "scale"
    return Schedule(name, n, 1, (Step(tuple(keep), label), Step(tuple(moves), "exchange")), goal="mixing")


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
        topology: `"dissemination"`, `"hypercube"` or `"exact"`.
        seed: Seeds the permutations of the ranks between periods.
        rotate: Permute the ranks after each period.

    Returns:
        One destination per rank, or None for a rank that sits the round out.

    Raises:
        ValueError: If `n`, `round` or `topology` is invalid.

    Example:
        >>> phalanx.schedule.gossip_partners(4, round=1)
        (2, 3, 0, 1)
    """
    _check(n, round, topology)
    sends: list[int | None] = [None] * n
    seat, k = _places_and_round(n, round, topology, seed, rotate)
    if topology == "exact":
        for pair in exact_rounds(n)[k] if n > 1 else ():
            sends[seat[pair.a]], sends[seat[pair.b]] = seat[pair.b], seat[pair.a]
        return tuple(sends)
    for place, rank in enumerate(seat) if n > 1 else ():
        to = (place - 2**k) % n if topology == "dissemination" else place ^ 2**k
        sends[rank] = seat[to] if to < n else None
    return tuple(sends)


def gossip_weights(
    n: int,
    round: int,  # noqa: A002  # the paper's word
    topology: Topology = "dissemination",
    seed: int = 0,
    *,
    rotate: bool = True,
) -> tuple[Fraction, ...]:
    """The weight of what each rank receives in one round of gossip. Its own buffer has the remaining weight.

    Args:
        n: The number of ranks.
        round: The number of the round, from 0.
        topology: `"dissemination"`, `"hypercube"` or `"exact"`.
        seed: Seeds the permutations of the ranks between periods.
        rotate: Permute the ranks after each period.

    Returns:
        One fraction per rank: 0 for a rank that sits the round out, 1/2 for all others unless the topology is `"exact"`.

    Raises:
        ValueError: If `n`, `round` or `topology` is invalid.

    Example:
        >>> [str(weight) for weight in phalanx.schedule.gossip_weights(3, round=1, topology="exact")]
        ['2/3', '0', '2/3']
    """
    if topology != "exact":
        return tuple(ZERO if to is None else HALF for to in gossip_partners(n, round, topology, seed, rotate=rotate))
    _check(n, round, topology)
    weights = [ZERO] * n
    seat, k = _places_and_round(n, round, topology, seed, rotate)
    for pair in exact_rounds(n)[k] if n > 1 else ():
        weights[seat[pair.a]] = weights[seat[pair.b]] = pair.weight
    return tuple(weights)


def _check(n: int, round: int, topology: str) -> None:  # noqa: A002
    if n < 1:
        raise ValueError(f"gossip({n}): a world has at least 1 rank; give n >= 1")
    if round < 0:
        raise ValueError(f"gossip: round {round} is negative; rounds count from 0")
    if topology not in TOPOLOGIES:
        raise ValueError(f"gossip: topology {topology!r} is unknown; give 'dissemination', 'hypercube' or 'exact'")


def _places_and_round(n: int, round: int, topology: Topology, seed: int, rotate: bool) -> tuple[list[int], int]:  # noqa: A002
    """The rank at each place, and the index of the round in its period."""
    rotation, k = divmod(round, gossip_period(n, topology))
    return _permutation(seed, rotation, n) if rotate and rotation > 0 else list(range(n)), k


def gossip_period(n: int, topology: Topology = "dissemination") -> int:
    """The number of rounds after which every rank has heard from every other, directly or not.

    Partners rotate after each period. A hypercube reaches all ranks only if `n` is a power of two.

    Args:
        n: The number of ranks.
        topology: `"dissemination"`, `"hypercube"` or `"exact"`.

    Returns:
        ceil(log2 n), at least 1. With `"exact"`, the rounds until the mean is exact, at most 2 floor(log2 n) + 1.

    Example:
        >>> phalanx.schedule.gossip_period(100), phalanx.schedule.gossip_period(100, "exact")
        (7, 11)
    """
    return exact_period(n) if topology == "exact" else max(1, (n - 1).bit_length())


def _permutation(seed: int, rotation: int, n: int) -> list[int]:
    """A Fisher-Yates shuffle, the same in every process and Python version: only random() is guaranteed not to change."""
    draw = random.Random(f"phalanx gossip {seed} {rotation} {n}").random
    seat = list(range(n))
    for i in reversed(range(1, n)):
        j = int(draw() * (i + 1))
        seat[i], seat[j] = seat[j], seat[i]
    return seat
