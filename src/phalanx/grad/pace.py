"""Which rank slows the others down, why, and what share of the samples suits each rank. Values and pure functions.

Synchronous steps take equally long on all ranks, because fast ranks wait for slow ones. What differs is the time *before* a rank
waits: from the end of one exchange of gradients to the begin of the next. Within it the rank waits for input, or computes. The
ranks tell each other their times every few steps. One slow moment is noise; a slow rank is slow again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

EVERY = 5  # steps of a window; ranks tell each other the median of it, so that one slow step says nothing
WINDOWS = 3  # in a row, before a rank is named: at most 19 steps after it became slow
SLOW = 1.5  # times the median of the others
LEAST = 0.005  # seconds per step that a slow rank takes longer, at least
GAIN = 1.08  # a step must become faster by this much before samples are shared out anew
NETWORK = 0.6  # share of a step that all ranks wait, before the network is named


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a usual step of one rank: waiting for input, computing, and exchanging gradients; and its samples in a step."""

    input: float
    compute: float
    wait: float = 0.0
    samples: float = 0.0

    @property
    def own(self) -> float:
        return self.input + self.compute


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that slows the others down.

    Args:
        step: The step after which it was named.
        rank: The rank; None if the network slows all of them down.
        cause: `"compute"`, `"input"` or `"network"`.
        factor: How many times as long as the others it takes; for the network, the share of a step that all ranks wait.
        action: What was done: `"warn"`, `"rebalance"` or `"evict"`.
    """

    step: int
    rank: int | None
    cause: str
    factor: float
    action: str = "warn"

    def __str__(self) -> str:
        if self.rank is None:
            return f"the network slows all ranks down: they wait for {self.factor:.0%} of every step"
        done = {"rebalance": "; it gets fewer samples", "evict": "; it leaves the job"}.get(self.action, "")
        return f"rank {self.rank} slows the others down: its {self.cause} takes {self.factor:.1f} times as long as theirs{done}"


def find_slow(paces: Sequence[Pace]) -> tuple[int | None, str, float] | None:
    """The slow rank of one window, its cause and its factor; None if there is none."""
    if len(paces) < 2:
        return None
    own = [_per_sample(pace, paces) for pace in paces]
    slowest = max(range(len(own)), key=own.__getitem__)
    rest = [pace for rank, pace in enumerate(paces) if rank != slowest]
    others = median(_per_sample(pace, paces) for pace in rest)
    if own[slowest] > SLOW * others and own[slowest] - others > LEAST:
        beyond = {
            "input": paces[slowest].input - median(pace.input for pace in rest),
            "compute": paces[slowest].compute - median(pace.compute for pace in rest),
        }
        return slowest, max(beyond, key=beyond.__getitem__), own[slowest] / max(others, 1e-9)
    wait = min(pace.wait for pace in paces)
    share = min(pace.wait / max(pace.wait + pace.own, 1e-9) for pace in paces)
    return (None, "network", share) if share > NETWORK and wait > LEAST else None


def _per_sample(pace: Pace, paces: Sequence[Pace]) -> float:
    """Seconds of a step, if the rank had as many samples as the others: a rank with a small share is as slow as before."""
    mean = sum(each.samples for each in paces) / len(paces)
    return pace.own * (mean / pace.samples if pace.samples and mean else 1.0)


def suitable_speeds(paces: Sequence[Pace]) -> tuple[float, ...] | None:
    """Samples per second of each rank, by which samples are shared out; None if that gains nothing."""
    if len(paces) < 2 or any(pace.samples <= 0 or pace.own <= 0 for pace in paces):
        return None
    speeds = tuple(pace.samples / pace.own for pace in paces)
    balanced = sum(pace.samples for pace in paces) / sum(speeds)
    now = max(pace.own for pace in paces)
    return speeds if now > GAIN * balanced and now - balanced > LEAST else None


class Suspicion:
    """Names a rank that stays slow, once for as long as it does."""

    def __init__(self) -> None:
        self._whom: tuple[int | None, str] | None = None
        self._windows, self._named = 0, False

    def window(self, paces: Sequence[Pace]) -> tuple[int | None, str, float] | None:
        """A window is over; returns the slow rank if there is now enough evidence."""
        found = find_slow(paces)
        whom = found[:2] if found is not None else None
        if whom != self._whom:
            self._whom, self._windows, self._named = whom, 0, False
        self._windows += 1
        if found is None or self._named or self._windows < WINDOWS:
            return None
        self._named = True
        return found
