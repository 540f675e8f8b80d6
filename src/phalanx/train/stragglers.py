"""Find which rank slows the others down, and why, from the times *before* ranks wait for each other.

Synchronous steps take the same time on all ranks, because fast ranks wait for slow ones. What differs is the time until a rank's
gradients are ready, and within it the time that the rank waited for input. One slow interval is noise, from the operating system
for example. A straggler is slow repeatedly, and only then do you get a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SLOW = 1.5  # times the median of the others; a rank above this is suspected
LEAST = 0.005  # seconds per step below which no rank is suspected
NETWORK = 0.6  # fraction of a step that all ranks wait; above this the network is suspected
INTERVALS, SECONDS = 3, 5.0  # consecutive intervals, and total seconds, before a suspect is named


@dataclass(frozen=True, slots=True)
class Times:
    """How one rank spends a step: waiting for input, computing gradients, waiting for other ranks."""

    input: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    update: float = 0.0  # of the weights, and everything else

    def __add__(self, other: Times) -> Times:
        return Times(self.input + other.input, self.compute + other.compute, self.wait + other.wait, self.update + other.update)

    def __truediv__(self, count: float) -> Times:
        return Times(self.input / count, self.compute / count, self.wait / count, self.update / count)

    @property
    def total(self) -> float:
        return self.input + self.compute + self.wait + self.update


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank (None for all), the cause, and its time as a multiple of the others' median."""

    rank: int | None
    cause: str
    factor: float

    def __str__(self) -> str:
        if self.rank is None:
            return f"the network slows all ranks down: they wait for {self.factor:.0%} of every step"
        return f"rank {self.rank} slows the others down: its {self.cause} takes {self.factor:.1f} times as long as theirs"


def suspect(ranks: Sequence[Times]) -> Straggler | None:
    """The straggler of one interval, from the mean times of a step on every rank."""
    if len(ranks) < 2:
        return None
    own = [times.input + times.compute for times in ranks]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = median(own[:slowest] + own[slowest + 1 :])
    if own[slowest] - others > LEAST and own[slowest] > SLOW * others:
        rest = [times for rank, times in enumerate(ranks) if rank != slowest]
        beyond = {
            "input": ranks[slowest].input - median(times.input for times in rest),
            "compute": ranks[slowest].compute - median(times.compute for times in rest),
        }
        return Straggler(slowest, max(beyond, key=beyond.__getitem__), own[slowest] / max(others, 1e-9))
    share = min(times.wait / times.total if times.total else 0.0 for times in ranks)
    if share > NETWORK and min(times.wait for times in ranks) > LEAST:
        return Straggler(None, "network", share)
    return None


class StragglerWatch:
    """Names a rank that stays slow, once per slow period."""

    def __init__(self) -> None:
        self._whom: tuple[int | None, str] | None = None
        self._intervals, self._seconds, self._named = 0, 0.0, False

    def interval(self, ranks: Sequence[Times], seconds: float) -> Straggler | None:
        """Add an interval of `seconds`. Returns the straggler if there is now enough evidence."""
        found = suspect(ranks)
        whom = (found.rank, found.cause) if found else None
        if whom != self._whom:
            self._whom, self._intervals, self._seconds, self._named = whom, 0, 0.0, False
        self._intervals, self._seconds = self._intervals + 1, self._seconds + seconds
        if found is None or self._named or self._intervals < INTERVALS or self._seconds < SECONDS:
            return None
        self._named = True
        return found
