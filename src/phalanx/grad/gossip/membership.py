"""Which nodes are left: a table that travels with every gossip message, so that survivors agree on the dead without a collective.

A rank that finds a connection broken writes down from which step on the node is left out. That step is late enough for the news
to reach all ranks by gossip before. Until then the node's partners skip it, one by one. From that step on all choose partners
among those that are left. Of two entries for one node the earlier step counts, on all ranks, in whatever order they come.

A node may also be left out without being known to be dead: it did not come to a collective. The sign of an entry tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.grad.gossip.partners import Topology, gossip_period


@dataclass(frozen=True, slots=True)
class Membership:
    """The step from which on each node is left out, negative where it may be alive; 0 for a node that takes part."""

    leaves: tuple[int, ...]
    topology: Topology = "dissemination"

    @staticmethod
    def of(nodes: int, topology: Topology = "dissemination") -> Membership:
        return Membership((0,) * nodes, topology)

    @property
    def period(self) -> int:
        """Rounds in which what one node knows reaches all others."""
        return gossip_period(len(self.leaves), self.topology)

    def nodes(self, step: int) -> list[int]:
        """Who takes part in `step`."""
        return [node for node, first in enumerate(self.leaves) if not first or step < abs(first)]

    def mark_dead(self, node: int, step: int) -> Membership:
        """`node` was found dead in `step`.

        In pairs it may have been the only partner of some, who then hear of it from nobody else, but find out in the same
        period: so what counts is the period.
        """
        if self.topology == "exact":
            return self._with(node, (step // self.period + 3) * self.period)
        news = 2 * self.period + 2  # steps in which everybody hears of it, some messages being lost
        return self._with(node, step + news)

    def leave_out(self, node: int, step: int) -> Membership:
        """`node` did not come to a collective in `step`."""
        return self._with(node, -max(1, step))

    def _with(self, node: int, entry: int) -> Membership:
        return self.merge([entry if other == node else 0 for other in range(len(self.leaves))])

    def merge(self, other: Sequence[int]) -> Membership:
        """What both know: the earlier step, and dead if one of them knows it."""
        return Membership(tuple(_merged(a, b) for a, b in zip(self.leaves, other, strict=True)), self.topology)

    @property
    def gone(self) -> tuple[int, ...]:
        """The nodes that are known to be dead or left out, from now or from a later step on."""
        return tuple(node for node, first in enumerate(self.leaves) if first)

    @property
    def alive(self) -> int:
        """How many nodes are not known to be dead."""
        return len(self.leaves) - len(self.dead)

    @property
    def dead(self) -> tuple[int, ...]:
        """The nodes whose process has ended."""
        return tuple(node for node, first in enumerate(self.leaves) if first > 0)


def _merged(a: int, b: int) -> int:
    if not a or not b:
        return a or b
    return min(abs(a), abs(b)) * (1 if max(a, b) > 0 else -1)
