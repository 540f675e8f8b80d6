"""Who gossips with whom in which step: a pure function of the step, the seats and the seed, so that nobody has to ask.

A seat is a rank, or a host whose ranks act as one. Only the seats that are left take part: all ranks that know of the same ones
come to the same pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.grad.gossip import Gossip
from phalanx.schedule import gossip_partners, gossip_period

__all__ = ["Partners", "check_topology", "gossip_period", "partners"]


@dataclass(frozen=True, slots=True)
class Partners:
    """To whom a seat sends and from whom it receives, in one step; both None where it sits the step out."""

    dest: int | None
    source: int | None


def partners(me: int, seats: Sequence[int], step: int, sync: Gossip) -> Partners:
    """Those of seat `me`, one of `seats`, in step number `step`."""
    sends = gossip_partners(len(seats), step, sync.topology, sync.seed, rotate=sync.rotate)
    place = list(seats).index(me)
    dest = sends[place]
    if dest is None:
        return Partners(None, None)
    return Partners(seats[dest], seats[sends.index(place)])


def check_topology(sync: Gossip, seats: int, what: str) -> None:
    """Raise where the topology does not fit: a hypercube has a power of two corners."""
    if sync.topology == "hypercube" and seats & (seats - 1):
        raise ValueError(
            f"Gossip(topology='hypercube') wants a power of two, but there are {seats} {what}: use topology='dissemination', "
            "which takes any number"
        )
