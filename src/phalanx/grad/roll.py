"""Who is left: a table that travels with every gossip message, so that survivors agree on the dead without a collective.

Who finds a connection broken writes down from which step on the seat is left out: late enough for the news to reach everybody by
gossip before. Until then its partners skip it, one by one; from that step on all choose partners among those who are left. Of two
entries for one seat the earlier step counts, on all ranks, whatever the order in which they come.

A seat may also be left out although nobody knows that it is dead: it did not come to a collective. The sign of an entry tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.grad.partners import gossip_period


@dataclass(frozen=True, slots=True)
class Roll:
    """The step from which on each seat is left out, negative where it may be alive; 0 for a seat that takes part."""

    leaves: tuple[int, ...]

    @staticmethod
    def of(seats: int) -> Roll:
        return Roll((0,) * seats)

    def seats(self, step: int) -> list[int]:
        """Who takes part in `step`."""
        return [seat for seat, first in enumerate(self.leaves) if not first or step < abs(first)]

    def strike(self, seat: int, step: int) -> Roll:
        """`seat` was found dead in `step`."""
        news = 2 * gossip_period(len(self.leaves)) + 2  # steps in which everybody hears of it, some messages being lost
        return self._with(seat, step + news)

    def leave_out(self, seat: int, step: int) -> Roll:
        """`seat` did not come to a collective in `step`."""
        return self._with(seat, -max(1, step))

    def _with(self, seat: int, entry: int) -> Roll:
        return self.merge([entry if other == seat else 0 for other in range(len(self.leaves))])

    def merge(self, other: Sequence[int]) -> Roll:
        """What both know: the earlier step, and dead if one of them says so."""
        return Roll(tuple(_merged(a, b) for a, b in zip(self.leaves, other, strict=True)))

    @property
    def struck(self) -> tuple[int, ...]:
        """The seats that are known to be dead or left out, from now or from a later step on."""
        return tuple(seat for seat, first in enumerate(self.leaves) if first)

    @property
    def dead(self) -> tuple[int, ...]:
        """The seats whose process has ended."""
        return tuple(seat for seat, first in enumerate(self.leaves) if first > 0)


def _merged(a: int, b: int) -> int:
    if not a or not b:
        return a or b
    return min(abs(a), abs(b)) * (1 if max(a, b) > 0 else -1)
