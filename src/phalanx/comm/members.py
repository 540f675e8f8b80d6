"""The ranks of a communicator and the hosts they run on, as a value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.comm.hosts import Hosts


@dataclass(frozen=True)  # no slots: cached properties need a __dict__
class Members:
    """The ranks of one communicator, as this process sees them."""

    name: str
    ranks: tuple[int, ...]  # each rank's number in the world
    rank: int  # this process
    keys: tuple[str, ...]  # the host key of each rank

    @functools.cached_property
    def hosts(self) -> Hosts:
        return Hosts.of(self.keys)

    @functools.cached_property
    def size(self) -> int:
        return len(self.ranks)

    @functools.cached_property
    def inter_rank(self) -> int:
        return self.hosts.place(self.rank)[0]

    @functools.cached_property
    def intra_rank(self) -> int:
        return self.hosts.place(self.rank)[1]

    @property
    def inter_size(self) -> int:
        return len(self.hosts.ranks)

    @property
    def on_this_host(self) -> tuple[int, ...]:
        """The ranks on this rank's host, in order, including this one."""
        return self.hosts.ranks[self.inter_rank]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def in_world(self) -> dict[int, int]:
        """Maps a rank of this communicator to its rank in the world."""
        return dict(enumerate(self.ranks))

    def only(self, kept: Sequence[int], name: str) -> Members:
        """Return the members of a communicator of the ranks `kept`, in this order. This rank must be one of them."""
        return Members(name, tuple(self.ranks[r] for r in kept), kept.index(self.rank), tuple(self.keys[r] for r in kept))


def by_color(table: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the ranks of each color, ordered by key, then by rank. `table` has every rank's (color, key)."""
    return {
        color: sorted((rank for rank, own in enumerate(table) if own[0] == color), key=lambda rank: (table[rank][1], rank))
        for color in sorted({color for color, _ in table})
    }
