"""Which schedule for which world and which message: rules, each with the measurement or the count that it rests on.

Where a plan for as many hosts and ranks is at hand (planned.py) it decides instead.
"""

from __future__ import annotations

from phalanx.comm.hosts import Hosts
from phalanx.comm.planned import planned_for
from phalanx.schedule import Schedule, halving_doubling, hierarchical, recursive_doubling, relabel, ring, torus

# Bytes up to which the number of steps decides. On one host gloo's steps cost so much that the short way wins up to here
# (4 ranks, 128 KiB: 1.5 ms against 4.4); between hosts all ranks of a host would send the whole message through its one network
# card at once, so the limit is lower.
SMALL_ON_ONE_HOST = 128 << 10
SMALL_BETWEEN_HOSTS = 32 << 10
# Where the ranks of a host share memory, one leader per host speaks for all of them: in the fewest steps up to here
# (4 hosts of 2, 1 Gbit/s: 256 KiB 6.8 ms against 7.2 with a ring of leaders, 512 KiB 35 against 21),
SMALL_BETWEEN_LEADERS = 256 << 10
# then around a ring while a torus's messages, 1/ranks of the buffer, would be shorter than this (there 1 MiB 17 ms against 21
# with a torus, 2 MiB 40 against 45, 4 MiB 61 against 63, 8 MiB 122 against 118).
SHORT_IN_A_TORUS = 512 << 10


def for_world(hosts: Hosts, *, shared: bool = False, library: bool = False) -> Schedule:
    """The schedule for messages that are not small. `shared`: the ranks of a host share memory. `library`: NCCL is there.

    Several hosts with several ranks each: the torus, whose slow direction carries 1/ranks-per-host of the data. Otherwise one
    level: a single call where all share memory or have NCCL; halving-doubling where the world is a power of two (as few bytes as
    the ring in 2 log2 n steps instead of 2(n-1)); the ring for the rest.
    """
    if planned := planned_for(hosts):
        return _placed(planned[-1][1], hosts)
    world = sum(len(ranks) for ranks in hosts.ranks)
    if hosts.grid and min(hosts.grid) > 1:
        return _placed(torus(*hosts.grid), hosts)
    one_call = library or (shared and len(hosts.ranks) == 1)
    if world & (world - 1) == 0 and not one_call:
        return halving_doubling(world)
    return ring(world)


def for_less(hosts: Hosts, *, shared: bool = False) -> tuple[tuple[int, Schedule], ...]:
    """Schedules for smaller messages, each with the number of bytes up to which it serves, the smallest first; at least one."""
    if planned := planned_for(hosts):
        return tuple((limit, _placed(schedule, hosts)) for limit, schedule in planned[:-1] or planned)
    world = sum(len(ranks) for ranks in hosts.ranks)
    if shared and hosts.grid and min(hosts.grid) > 1:
        quick, ring_of_leaders = (_placed(hierarchical(*hosts.grid, among=among), hosts) for among in (recursive_doubling, ring))
        return (SMALL_BETWEEN_LEADERS, quick), (SHORT_IN_A_TORUS * world, ring_of_leaders)
    if shared and len(hosts.ranks) == 1:
        return ((SMALL_ON_ONE_HOST, ring(world)),)  # one call
    return ((SMALL_ON_ONE_HOST if len(hosts.ranks) == 1 else SMALL_BETWEEN_HOSTS, recursive_doubling(world)),)


def _placed(schedule: Schedule, hosts: Hosts) -> Schedule:
    """A schedule for ranks in the order of their hosts, handed to the ranks as they are really placed."""
    order = tuple(rank for ranks in hosts.ranks for rank in ranks)
    return schedule if order == tuple(range(len(order))) else relabel(schedule, order)
