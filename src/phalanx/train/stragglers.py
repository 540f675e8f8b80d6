"""Who holds the others up, and with what: found in the times *before* ranks wait for each other.

Synchronous steps take equally long on all ranks, whoever is slow: the quick ones wait. What tells them apart is the time until a
rank's gradients are ready, and within it the time that it waited for its input. One slow interval is noise, of the operating
system say; a straggler is slow again and again, and only then it is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SLOW = 1.5  # times the median of the others, before a rank is suspected
LEAST = 0.005  # seconds per step below which nobody is
NETWORK = 0.6  # share of a step that all ranks wait, before the network is
INTERVALS, SECONDS = 3, 5.0  # in a row, and in all, before a suspect is named


@dataclass(frozen=True, slots=True)
class Times:
    """Where a step's seconds go on one rank: waiting for input, computing until gradients are ready, waiting for the others'."""

    input: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    update: float = 0.0  # of the weights, and whatever else the step does

    def __add__(self, other: Times) -> Times:
        return Times(self.input + other.input, self.compute + other.compute, self.wait + other.wait, self.update + other.update)

    def __truediv__(self, count: float) -> Times:
        return Times(self.input / count, self.compute / count, self.wait / count, self.update / count)

    @property
    def total(self) -> float:
        return self.input + self.compute + self.wait + self.update


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank (None: all of them), the cause, and how many times the others' median it takes."""

    rank: int | None
    cause: str
    factor: float

    def __str__(self) -> str:
        if self.rank is None:
            return f"the network holds all ranks up: they wait for {self.factor:.0%} of every step"
        return f"rank {self.rank} holds the others up: its {self.cause} takes {self.factor:.1f} times theirs"


def suspect(ranks: Sequence[Times]) -> Straggler | None:
    """Who is slow in one interval, from the mean times of a step on every rank."""
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
    """Names a suspect that stays one, once for as long as it stays."""

    def __init__(self) -> None:
        self._whom: tuple[int | None, str] | None = None
        self._intervals, self._seconds, self._named = 0, 0.0, False

    def interval(self, ranks: Sequence[Times], seconds: float) -> Straggler | None:
        """An interval of so many seconds is over; the straggler, if now it is sure."""
        found = suspect(ranks)
        whom = (found.rank, found.cause) if found else None
        if whom != self._whom:
            self._whom, self._intervals, self._seconds, self._named = whom, 0, 0.0, False
        self._intervals, self._seconds = self._intervals + 1, self._seconds + seconds
        if found is None or self._named or self._intervals < INTERVALS or self._seconds < SECONDS:
            return None
        self._named = True
        return found
