"""Which schedule for which world and which message: rules, each with the measurement or the count that it rests on."""

from __future__ import annotations

from phalanx.comm.hosts import Hosts
from phalanx.schedule import Schedule, halving_doubling, hierarchical, recursive_doubling, relabel, ring, torus

# Bytes up to which the number of steps decides. On one host gloo's steps cost so much that the short way wins up to here
# (4 ranks, 128 KiB: 1.5 ms against 4.4); between hosts all ranks of a host would send the whole message through its one network
# card at once, so the limit is lower.
SMALL_ON_ONE_HOST = 128 << 10
SMALL_BETWEEN_HOSTS = 32 << 10
# Where the ranks of a host share memory, one leader per host speaks for all of them, and is ahead for longer.
SMALL_BETWEEN_LEADERS = 512 << 10


def for_world(hosts: Hosts, *, shared: bool = False, library: bool = False) -> Schedule:
    """The schedule for messages that are not small. `shared`: the ranks of a host share memory. `library`: NCCL is there.

    Several hosts with several ranks each: the torus, whose slow direction carries 1/ranks-per-host of the data. Otherwise one
    level: a single call where all share memory or have NCCL; halving-doubling where the world is a power of two (as few bytes as
    the ring in 2 log2 n steps instead of 2(n-1)); the ring for the rest.
    """
    world = sum(len(ranks) for ranks in hosts.ranks)
    if hosts.grid and min(hosts.grid) > 1:
        return _placed(torus(*hosts.grid), hosts)
    one_call = library or (shared and len(hosts.ranks) == 1)
    if world & (world - 1) == 0 and not one_call:
        return halving_doubling(world)
    return ring(world)


def for_small(hosts: Hosts, *, shared: bool = False) -> tuple[Schedule, int]:
    """The schedule with the fewest steps between hosts, and the number of bytes up to which it serves."""
    world = sum(len(ranks) for ranks in hosts.ranks)
    if shared and hosts.grid and min(hosts.grid) > 1:
        return _placed(hierarchical(*hosts.grid, among=recursive_doubling), hosts), SMALL_BETWEEN_LEADERS
    if shared and len(hosts.ranks) == 1:
        return ring(world), SMALL_ON_ONE_HOST  # one call
    return recursive_doubling(world), SMALL_ON_ONE_HOST if len(hosts.ranks) == 1 else SMALL_BETWEEN_HOSTS


def _placed(schedule: Schedule, hosts: Hosts) -> Schedule:
    """A schedule for ranks in the order of their hosts, handed to the ranks as they are really placed."""
    order = tuple(rank for ranks in hosts.ranks for rank in ranks)
    return schedule if order == tuple(range(len(order))) else relabel(schedule, order)
