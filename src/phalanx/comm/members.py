"""Which ranks a communicator has, and where they run: a value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.comm.hosts import Hosts


@dataclass(frozen=True)  # no slots: cached properties need a __dict__
class Members:
    """The ranks of one communicator, as this process sees them."""

    name: str
    ranks: tuple[int, ...]  # the world's number of each rank
    rank: int  # this process
    keys: tuple[str, ...]  # the key of each rank's host

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
        """The ranks that share this rank's host, in order; this rank is one of them."""
        return self.hosts.ranks[self.inter_rank]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def in_world(self) -> dict[int, int]:
        """Rank here -> rank in the world."""
        return dict(enumerate(self.ranks))

    def only(self, kept: Sequence[int], name: str) -> Members:
        """A communicator of the ranks `kept`, in this order; this rank must be one of them."""
        return Members(name, tuple(self.ranks[r] for r in kept), kept.index(self.rank), tuple(self.keys[r] for r in kept))


def by_color(table: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """The ranks of each color, ordered by key, then by rank; `table` has every rank's (color, key)."""
    return {
        color: sorted((rank for rank, own in enumerate(table) if own[0] == color), key=lambda rank: (table[rank][1], rank))
        for color in sorted({color for color, _ in table})
    }
