"""The remaining nodes: a table in every gossip message, so that survivors agree on the dead without a collective.

A rank that finds a connection broken writes down the step from which the node is left out. That step is late enough for gossip to
reach all ranks first. Until then the node's partners skip it, one by one. From that step on all choose partners among the
remaining nodes. Of two entries for one node the earlier step counts, on all ranks and in any order of arrival.

A node may also be left out although it is not known to be dead, because it missed a collective. Its entry is then negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.grad.gossip.partners import Topology, gossip_period


@dataclass(frozen=True, slots=True)
class Membership:
    """The step from which each node is left out, negative if it may be alive. 0 for a node that takes part."""

    leaves: tuple[int, ...]
    topology: Topology = "dissemination"

    @staticmethod
    def of(nodes: int, topology: Topology = "dissemination") -> Membership:
        return Membership((0,) * nodes, topology)

    @property
    def period(self) -> int:
        """Rounds until what one node knows has reached all others."""
        return gossip_period(len(self.leaves), self.topology)

    def nodes(self, step: int) -> list[int]:
        """Return the nodes that take part in `step`."""
        return [node for node, first in enumerate(self.leaves) if not first or step < abs(first)]

    def mark_dead(self, node: int, step: int) -> Membership:
        """Note that `node` was found dead in `step`.

        With topology "exact" it may have been some nodes' only partner. They hear of it from no other node, but find out in the
        same period, so the entry depends on the period.
        """
        if self.topology == "exact":
            return self._with(node, (step // self.period + 3) * self.period)
        news = 2 * self.period + 2  # steps until all have heard of it, even if some messages are lost
        return self._with(node, step + news)

    def leave_out(self, node: int, step: int) -> Membership:
        """Note that `node` missed a collective in `step`."""
        return self._with(node, -max(1, step))

    def _with(self, node: int, entry: int) -> Membership:
        return self.merge([entry if other == node else 0 for other in range(len(self.leaves))])

    def merge(self, other: Sequence[int]) -> Membership:
        """Combine what both know: the earlier step, and dead if one of them knows that."""
        return Membership(tuple(_merged(a, b) for a, b in zip(self.leaves, other, strict=True)), self.topology)

    @property
    def gone(self) -> tuple[int, ...]:
        """The nodes that are known to be dead or left out, from now or from a later step on."""
        return tuple(node for node, first in enumerate(self.leaves) if first)

    @property
    def alive(self) -> int:
        """The number of nodes that are not known to be dead."""
        return len(self.leaves) - len(self.dead)

    @property
    def dead(self) -> tuple[int, ...]:
        """The nodes whose process has ended."""
        return tuple(node for node, first in enumerate(self.leaves) if first > 0)


def _merged(a: int, b: int) -> int:
    if not a or not b:
        return a or b
    return min(abs(a), abs(b)) * (1 if max(a, b) > 0 else -1)
