"""Chooses partners: a pure function of the step, the nodes and the seed, so that no rank has to ask.

A node is a rank, or a host whose ranks act as one. Only the remaining nodes take part. Ranks that know the same remaining nodes
get the same pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.grad.gossip import Gossip
from phalanx.schedule import Topology, gossip_partners, gossip_period, gossip_weights

__all__ = ["Partners", "Topology", "check_topology", "gossip_period", "partners"]


@dataclass(frozen=True, slots=True)
class Partners:
    """The nodes that a node sends to and receives from in one step, both None if it sits the step out.

    `weight` is the share of what it receives in the result. Its own tensors have the rest.
    """

    dest: int | None
    source: int | None
    weight: float = 0.5


def partners(me: int, nodes: Sequence[int], step: int, sync: Gossip) -> Partners:
    """Return the partners of node `me`, one of `nodes`, in step number `step`."""
    sends = gossip_partners(len(nodes), step, sync.topology, sync.seed, rotate=sync.rotate)
    place = list(nodes).index(me)
    dest = sends[place]
    if dest is None:
        return Partners(None, None)
    weight = gossip_weights(len(nodes), step, sync.topology, sync.seed, rotate=sync.rotate)[place]
    return Partners(nodes[dest], nodes[sends.index(place)], float(weight))


def check_topology(sync: Gossip, nodes: int, what: str) -> None:
    """Raise if the topology does not fit: a hypercube needs a power of two."""
    if sync.topology == "hypercube" and nodes & (nodes - 1):
        raise ValueError(
            f"Gossip(topology='hypercube') needs a power of two, but there are {nodes} {what}: use topology='dissemination' "
            "or 'exact', which take any number"
        )
