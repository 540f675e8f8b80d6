"""What a plan chooses from: every algorithm on every grid that fits a cluster, by the names that the command line knows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from phalanx.schedule import (
    Collective,
    Move,
    Op,
    Scale,
    Schedule,
    Step,
    gossip,
    gossip_partners,
    gossip_period,
    halving_doubling,
    hierarchical,
    ring,
    torus,
    tree,
)

from .machine import Cluster
from .program import Flat, flatten


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One member of a family. With gossip, steps take turns with `rounds` schedules."""

    family: str
    name: str
    make: Callable[[int], Schedule]
    rounds: int = 1

    @property
    def gossips(self) -> bool:
        return self.family.startswith("gossip")


@functools.lru_cache(maxsize=16)  # those of a plan that are asked for again are its best
def flat_rounds(algorithm: Algorithm) -> tuple[Flat, ...]:
    """The schedules of `algorithm`, as arrays."""
    return tuple(flatten(algorithm.make(number)) for number in range(algorithm.rounds))


ROUNDS = 36  # of gossip, as a sample: by chance, a rank's partner is on its own host or on another
FAMILIES = ("ring", "torus", "hierarchical", "tree", "halving-doubling", "gossip", "gossip-hosts")


def algorithms(cluster: Cluster, families: tuple[str, ...] = FAMILIES) -> Iterator[Algorithm]:
    """Every algorithm of `families` that makes sense on `cluster`; a torus for every pair of factors of its ranks."""
    n, hosts, per_host = cluster.ranks, cluster.hosts, cluster.per_host
    if n == 1:
        if "ring" in families:
            yield Algorithm("ring", "ring:1", lambda _: ring(1))
        return
    if "ring" in families:
        yield Algorithm("ring", f"ring:{n}", lambda _: ring(n))
    if "torus" in families:
        for cols in (c for c in range(2, n) if n % c == 0):
            yield Algorithm("torus", f"torus:{n // cols}x{cols}", _grid(n // cols, cols))
    if "hierarchical" in families and hosts > 1 and per_host > 1:
        yield Algorithm("hierarchical", f"hierarchical:{hosts}x{per_host}", lambda _: hierarchical(hosts, per_host))
    if "tree" in families:
        yield Algorithm("tree", f"tree:{n}", lambda _: tree(n))
    if "halving-doubling" in families:
        yield Algorithm("halving-doubling", f"halving-doubling:{n}", lambda _: halving_doubling(n))
    if "gossip" in families:
        period = gossip_period(n)
        turns = period if per_host == 1 else period * -(-ROUNDS // period)
        yield Algorithm("gossip", f"gossip:{n}", lambda number: gossip(n, number), turns)
    if "gossip-hosts" in families and hosts > 1 and per_host > 1:
        make = lambda number: host_gossip(hosts, per_host, number)  # noqa: E731  # one line, like the others
        yield Algorithm("gossip-hosts", f"gossip-hosts:{hosts}x{per_host}", make, gossip_period(hosts))


def always(schedule: Schedule) -> Callable[[int], Schedule]:
    """A function that returns `schedule` for every round."""
    return lambda _: schedule


def _grid(rows: int, cols: int) -> Callable[[int], Schedule]:
    return lambda _: torus(rows, cols)


def host_gossip(hosts: int, per_host: int, number: int) -> Schedule:
    """A round in which hosts average as one: mean inside the host, each rank exchanges its part with a partner host, gather.

    In plain gossip, every rank sends the whole buffer through the host's one card. Here they send one buffer together.
    """
    partners = gossip_partners(hosts, number)
    groups = [tuple(range(first, first + per_host)) for first in range(0, hosts * per_host, per_host)]
    whole = range(per_host)
    sends: list[Op] = []
    for host, partner in enumerate(partners):
        if partner is not None:
            sends.extend(Move(host * per_host + i, partner * per_host + i, range(i, i + 1), reduce=True) for i in range(per_host))
    share = Fraction(1, (2 if sends else 1) * per_host)
    steps = (
        Step((Scale(range(hosts * per_host), whole, share),), "scale"),
        Step(tuple(Collective("reduce_scatter", group, whole) for group in groups), "mean inside hosts"),
        Step(tuple(sends), "exchange between hosts"),
        Step(tuple(Collective("all_gather", group, whole) for group in groups), "gather inside hosts"),
    )
    kept = tuple(step for step in steps if step.ops)
    return Schedule(f"gossip_hosts({hosts}x{per_host}, round={number})", hosts * per_host, per_host, kept, goal="mixing")
