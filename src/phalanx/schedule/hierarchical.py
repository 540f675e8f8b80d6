"""Hierarchical all-reduce: reduce to each host's first rank, all-reduce among these leaders, broadcast inside the host.

Papers: Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", arXiv 1807.11205 (Tencent); also the
`hierarchical` communicator of ChainerMN, arXiv 1710.11351.

Differences from the papers: when lowered, reduce and broadcast inside a host of k ranks are chains, so (k-1) + 2(hosts-1) + (k-1)
steps in all. Leaders carry the whole buffer between hosts: k times what each rank of a torus does.
"""

from __future__ import annotations

from .ops import Collective, Kind, Schedule, Step


def hierarchical(hosts: int, per_host: int) -> Schedule:
    """All-reduce of `hosts` hosts of `per_host` contiguous ranks, through one leader per host."""
    name = f"hierarchical({hosts}x{per_host})"
    if hosts < 1 or per_host < 1:
        raise ValueError(f"{name}: there is at least 1 host and 1 rank per host; give sizes >= 1")
    world, whole = hosts * per_host, range(hosts)
    groups = [tuple(range(leader, leader + per_host)) for leader in range(0, world, per_host)]

    def inside(kind: Kind, label: str) -> list[Step]:
        return [Step(tuple(Collective(kind, group, whole) for group in groups), label)] if per_host > 1 else []

    leaders = Collective("all_reduce", tuple(range(0, world, per_host)), whole)
    among = [Step((leaders,), "all-reduce among leaders")] if hosts > 1 else []
    steps = inside("reduce", "reduce to leader") + among + inside("broadcast", "broadcast from leader")
    return Schedule(name, world, hosts, tuple(steps))
