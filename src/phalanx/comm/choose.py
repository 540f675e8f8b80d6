"""Which schedule for which world and which message: rules, each with the measurement or the count that it rests on."""

from __future__ import annotations

from phalanx.comm.hosts import Hosts
from phalanx.schedule import Schedule, halving_doubling, recursive_doubling, relabel, ring, torus

# Bytes up to which the number of steps decides. On one host gloo's steps cost so much that the short way wins up to here
# (4 ranks, 128 KiB: 1.5 ms against 4.4); between hosts all ranks of a host would send the whole message through its one network
# card at once, so the limit is lower.
SMALL_ON_ONE_HOST = 128 << 10
SMALL_BETWEEN_HOSTS = 32 << 10


def for_world(hosts: Hosts) -> Schedule:
    """The schedule for messages that are not small.

    Several hosts with several ranks each: the torus, whose slow direction carries 1/ranks-per-host of the data. Otherwise one
    level: halving-doubling where the world is a power of two (as few bytes as the ring in 2 log2 n steps instead of 2(n-1)),
    the ring for the rest.
    """
    world = sum(len(ranks) for ranks in hosts.ranks)
    if hosts.grid and min(hosts.grid) > 1:
        flat = tuple(rank for ranks in hosts.ranks for rank in ranks)
        grid = torus(*hosts.grid)
        return grid if flat == tuple(range(world)) else relabel(grid, flat)
    if world & (world - 1) == 0:
        return halving_doubling(world)
    return ring(world)


def for_small(world: int) -> Schedule:
    """The schedule with the fewest steps: log2 n, each with the whole message."""
    return recursive_doubling(world)


def small_limit(hosts: Hosts) -> int:
    """Bytes up to which `for_small` serves."""
    return SMALL_ON_ONE_HOST if len(hosts.ranks) == 1 else SMALL_BETWEEN_HOSTS
