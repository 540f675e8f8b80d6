"""Who is left: a table that travels with every gossip message, so that survivors agree on the dead without a collective.

Who finds a connection broken writes down from which step on the seat is left out: late enough for the news to reach everybody by
gossip before. Until then its partners skip it, one by one; from that step on all choose partners among those who are left. Of two
entries for one seat the earlier step counts, on all ranks, whatever the order in which they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.grad.partners import gossip_period


@dataclass(frozen=True, slots=True)
class Roll:
    """The step from which on each seat is left out; 0 for a seat that takes part."""

    leaves: tuple[int, ...]

    @staticmethod
    def of(seats: int) -> Roll:
        return Roll((0,) * seats)

    def seats(self, step: int) -> list[int]:
        """Who takes part in `step`."""
        return [seat for seat, first in enumerate(self.leaves) if not first or step < first]

    def strike(self, seat: int, step: int) -> Roll:
        """`seat` was found dead in `step`."""
        news = 2 * gossip_period(len(self.leaves)) + 2  # steps in which everybody hears of it, some messages being lost
        return self.merge([step + news if other == seat else 0 for other in range(len(self.leaves))])

    def merge(self, other: Sequence[int]) -> Roll:
        """What both know."""
        return Roll(tuple(min(a, b) if a and b else a or b for a, b in zip(self.leaves, other, strict=True)))

    @property
    def struck(self) -> tuple[int, ...]:
        """The seats that are known to be dead, left out already or not."""
        return tuple(seat for seat, first in enumerate(self.leaves) if first)
