"""Hierarchical all-reduce: reduce to each host's first rank, all-reduce among these leaders, broadcast inside the host.

Papers: Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", arXiv 1807.11205 (Tencent); also the
`hierarchical` communicator of ChainerMN, arXiv 1710.11351.

Differences from the papers: when lowered, reduce and broadcast inside a host of k ranks are chains, so (k-1) + 2(hosts-1) + (k-1)
steps in all. Leaders carry the whole buffer between hosts: k times what each rank of a torus does.
"""

from __future__ import annotations

from collections.abc import Callable

from .ops import Collective, Kind, Move, Op, Schedule, Step
from .ring import ring


def hierarchical(hosts: int, per_host: int, *, among: Callable[[int], Schedule] = ring) -> Schedule:
    """All-reduce through one leader per host.

    Args:
        hosts: The number of hosts.
        per_host: The ranks per host, with contiguous numbers.
        among: Makes the all-reduce of the leaders. `phalanx.schedule.recursive_doubling` takes the fewest steps.

    Returns:
        A schedule: reduce to each leader, all-reduce among the leaders, broadcast inside each host.

    Raises:
        ValueError: If there is not at least 1 host and 1 rank per host.

    Example:
        >>> [step.label for step in phalanx.hierarchical(4, 8).steps]
        ['reduce to leader', 'leaders: all-reduce', 'broadcast from leader']
    """
    name = f"hierarchical({hosts}x{per_host}{'' if among is ring else ', ' + among.__name__})"
    if hosts < 1 or per_host < 1:
        raise ValueError(f"{name}: there is at least 1 host and 1 rank per host; give sizes >= 1")
    leaders = among(hosts)
    world, whole = hosts * per_host, range(leaders.chunks)
    groups = [tuple(range(leader, leader + per_host)) for leader in range(0, world, per_host)]

    def inside(kind: Kind, label: str) -> list[Step]:
        return [Step(tuple(Collective(kind, group, whole) for group in groups), label)] if per_host > 1 else []

    between = [Step(tuple(_spread(op, per_host) for op in step.ops), f"leaders: {step.label}") for step in leaders.steps]
    steps = inside("reduce", "reduce to leader") + between + inside("broadcast", "broadcast from leader")
    return Schedule(name, world, leaders.chunks, tuple(steps))


def _spread(op: Op, per_host: int) -> Op:
    """Translate an op among the leaders to global rank numbers."""
    if isinstance(op, Move):
        return Move(op.src * per_host, op.dst * per_host, op.chunks, op.reduce, op.factor)
    if isinstance(op, Collective):
        return Collective(op.kind, tuple(rank * per_host for rank in op.group), op.chunks)
    raise ValueError(f"the leaders' all-reduce has a {op}: a sum needs no scaling")
