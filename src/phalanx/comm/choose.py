"""Chooses a schedule for the hosts and the message size. Each rule names the measurement or count behind it.

The sizes at which the best schedule changes depend on the machine, so they are a value that names its origin. A plan for these
hosts and ranks (planned.py), made from a profile of the real network, replaces both rules and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.comm.hosts import Hosts
from phalanx.comm.planned import planned_for
from phalanx.schedule import Schedule, halving_doubling, hierarchical, recursive_doubling, relabel, ring, torus


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bytes at which another schedule becomes faster, and where that was measured."""

    origin: str
    small_on_one_host: int  # up to here, fewer steps win
    small_between_hosts: int  # the same between hosts
    small_between_leaders: int  # the same, if one leader per host exchanges messages for ranks that share memory
    short_in_a_torus: int  # a torus with messages shorter than this loses to a ring of leaders


LAB = Thresholds(
    origin="the lab of docs/lab.md: 4 hosts of 2 ranks, 1 Gbit/s, gloo; on one host 4 ranks",
    # gloo's steps are slow enough that fewer of them win up to here (4 ranks, 128 KiB: 1.5 ms against 4.4)
    small_on_one_host=128 << 10,
    # lower, because all ranks of a host would send the whole message through its one network card at once
    small_between_hosts=32 << 10,
    # 256 KiB: 6.8 ms against 7.2 with a ring of leaders; 512 KiB: 35 ms against 21
    small_between_leaders=256 << 10,
    # a ring of leaders against a torus: 1 MiB 17 ms against 21, 2 MiB 40 against 45, 4 MiB 61 against 63, 8 MiB 122 against 118
    short_in_a_torus=512 << 10,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The schedules for a world's all-reduces. Each of `smaller` serves messages up to its number of bytes, smallest first."""

    origin: str  # where the sizes come from
    schedule: Schedule
    smaller: tuple[tuple[int, Schedule], ...]  # at least one


def choose(hosts: Hosts, *, shared: bool = False, library: bool = False, thresholds: Thresholds = LAB) -> Choice:
    """Return the plan of PHALANX_SCHEDULES if it is for these hosts, otherwise what the rules choose.

    `shared`: the ranks of a host share memory. `library`: NCCL is available.
    """
    if (plan := planned_for(hosts)) is not None:
        ranges = [(limit, place(schedule, hosts)) for limit, schedule in plan.ranges]
        return Choice(plan.origin, ranges[-1][1], tuple(ranges[:-1] or ranges))
    smaller = _for_small_messages(hosts, thresholds, shared=shared)
    return Choice(thresholds.origin, _for_large_messages(hosts, shared=shared, library=library), smaller)


def _for_large_messages(hosts: Hosts, *, shared: bool, library: bool) -> Schedule:
    """Choose one call with NCCL, or if all ranks share memory: NCCL's own rings and trees pipeline what a torus does in turns.

    Several hosts with several ranks each use the torus, whose slow direction carries 1/ranks-per-host of the data. Any other
    power of two uses halving-doubling, which sends as few bytes as the ring in 2 log2 n steps instead of 2(n-1). The rest use
    the ring.
    """
    world = sum(len(ranks) for ranks in hosts.ranks)
    if library or (shared and len(hosts.ranks) == 1):
        return ring(world)
    if hosts.grid and min(hosts.grid) > 1:
        return place(torus(*hosts.grid), hosts)
    return halving_doubling(world) if world & (world - 1) == 0 else ring(world)


def _for_small_messages(hosts: Hosts, thresholds: Thresholds, *, shared: bool) -> tuple[tuple[int, Schedule], ...]:
    """Choose the fewest steps. If ranks share memory, host leaders exchange: first in the fewest steps, then around a ring."""
    world = sum(len(ranks) for ranks in hosts.ranks)
    if shared and hosts.grid and min(hosts.grid) > 1:
        quick, around = (place(hierarchical(*hosts.grid, among=among), hosts) for among in (recursive_doubling, ring))
        return (thresholds.small_between_leaders, quick), (thresholds.short_in_a_torus * world, around)
    if len(hosts.ranks) > 1:
        return ((thresholds.small_between_hosts, recursive_doubling(world)),)
    return ((thresholds.small_on_one_host, ring(world) if shared else recursive_doubling(world)),)  # shared: one call


def place(schedule: Schedule, hosts: Hosts) -> Schedule:
    """Relabel a schedule, written for ranks in the order of their hosts, for the ranks as they are placed."""
    order = tuple(rank for ranks in hosts.ranks for rank in ranks)
    return schedule if order == tuple(range(len(order))) else relabel(schedule, order)
