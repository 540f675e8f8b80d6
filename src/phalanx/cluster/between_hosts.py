"""Schedules in which each host acts as one, and the data that leaves a host in one run of a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from phalanx.schedule import Collective, Kind, Move, Op, Scale, Schedule, Step, Topology, gossip, gossip_period

from .candidates import ROUNDS, Algorithm
from .machine import Cluster


def leaving(schedule: Schedule, per_host: int, code: float = 1.0) -> float:
    """The data that leaves the busiest host in one run of `schedule`, in buffers. Encoded chunks have `code` times their size."""
    by_host = np.zeros(-(-schedule.world // per_host))
    for op in schedule.ops():
        if isinstance(op, Move):
            if op.src // per_host != op.dst // per_host:
                by_host[op.src // per_host] += op.count * (code if op.coded else 1.0)
        elif isinstance(op, Collective):
            for host, share in _ring_edges(op, per_host):
                by_host[host] += share * op.count
    return float(by_host.max()) / schedule.chunks


def _ring_edges(call: Collective, per_host: int) -> Iterator[tuple[int, float]]:
    """The hosts that a library's ring leaves, each with the part of the buffer that leaves it."""
    size, group = len(call.group), call.group
    if call.kind in ("reduce", "broadcast"):
        edges = [(a, b) if call.kind == "broadcast" else (b, a) for a, b in pairwise(group)]
        share = 1.0
    else:
        edges = list(zip(group, (*group[1:], group[0])))
        share = (2 if call.kind == "all_reduce" else 1) * (size - 1) / size
    yield from ((a // per_host, share) for a, b in edges if a // per_host != b // per_host)


def on_hosts(between: Schedule, per_host: int) -> Schedule:
    """A schedule of hosts, run by ranks: average inside every host, exchange one part per rank, then gather inside the hosts."""
    hosts = between.world
    groups = [tuple(range(first, first + per_host)) for first in range(0, hosts * per_host, per_host)]
    whole = range(per_host)

    def of_ranks(op: Op) -> Iterator[Op]:
        if isinstance(op, Move):
            for i in whole:
                yield replace(op, src=op.src * per_host + i, dst=op.dst * per_host + i, chunks=range(i, i + 1))
        elif isinstance(op, Scale):
            yield Scale(range(op.ranks.start * per_host, op.ranks.stop * per_host), whole, op.factor)

    def inside(kind: Kind) -> Step:
        return Step(tuple(Collective(kind, group, whole) for group in groups), "inside hosts")

    steps = [Step(tuple(new for op in step.ops for new in of_ranks(op)), step.label) for step in between.steps]
    mean = Step((Scale(range(hosts * per_host), whole, Fraction(1, per_host)),), "scale")
    both = [mean, inside("reduce_scatter"), *steps, inside("all_gather")]
    return Schedule(f"{between.name} of hosts", hosts * per_host, per_host, tuple(both), goal="mixing")


def inside_hosts(cluster: Cluster) -> Schedule:
    """One all-reduce inside each host, which its ranks run in every local step."""
    per_host = cluster.per_host
    groups = (tuple(range(first, first + per_host)) for first in range(0, cluster.ranks, per_host))
    calls = tuple(Collective("all_reduce", group, range(per_host)) for group in groups)
    return Schedule("inside hosts", cluster.ranks, per_host, (Step(calls, "inside hosts"),), goal="mixing")


def gossip_of(cluster: Cluster, *, exact: bool) -> Algorithm:
    """What `phalanx.Gossip` does on these hosts: hosts of several ranks act as one."""
    topology: Topology = "exact" if exact else "dissemination"
    hosts = cluster.hosts > 1 and cluster.per_host > 1
    n = cluster.hosts if hosts else cluster.ranks
    period = gossip_period(n, topology)

    def make(number: int) -> Schedule:
        one = gossip(n, number, topology)
        return on_hosts(one, cluster.per_host) if hosts else one

    turns = period * -(-min(ROUNDS, 4 * period) // period)
    return Algorithm("gossip", f"gossip{'-hosts' if hosts else ''} {topology}", make, turns)
