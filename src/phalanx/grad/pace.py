"""Finds the rank that slows the others down, the cause, and the share of samples that suits each rank. Values and pure functions.

Synchronous steps take equally long on all ranks, because fast ranks wait for slow ones. What differs is the time *before* a rank
waits: from the end of one exchange of gradients to the start of the next. In that time the rank waits for input or computes. The
ranks exchange their times every few steps. One slow step is noise. A slow rank stays slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

EVERY = 5  # steps of a window; ranks exchange its median, so that a single slow step does not count
WINDOWS = 3  # slow windows in a row before a rank is named: at most 19 steps after it became slow
SLOW = 1.5  # times the median of the others, for a rank to count as slow
LEAST = 0.005  # seconds per step that a slow rank takes longer, at least
GAIN = 1.08  # a step must become this much faster before samples are redistributed
NETWORK = 0.6  # share of a step that all ranks must wait before the network is named


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a typical step of one rank: waiting for input, computing, exchanging gradients. And its samples per step."""

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
        rank: The rank, or None if the network slows all of them down.
        cause: `"compute"`, `"input"` or `"network"`.
        factor: How many times as long as the others it takes. For the network, the share of a step that all ranks wait.
        action: The action taken: `"warn"`, `"rebalance"` or `"evict"`.
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
    """Return the slow rank of one window, its cause and its factor, or None if there is none."""
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
    """Return the seconds of a step if the rank had as many samples as the others: a small share must not hide a slow rank."""
    mean = sum(each.samples for each in paces) / len(paces)
    return pace.own * (mean / pace.samples if pace.samples and mean else 1.0)


def suitable_speeds(paces: Sequence[Pace]) -> tuple[float, ...] | None:
    """Return the samples per second of each rank, to distribute samples by, or None if that gains nothing."""
    if len(paces) < 2 or any(pace.samples <= 0 or pace.own <= 0 for pace in paces):
        return None
    speeds = tuple(pace.samples / pace.own for pace in paces)
    balanced = sum(pace.samples for pace in paces) / sum(speeds)
    now = max(pace.own for pace in paces)
    return speeds if now > GAIN * balanced and now - balanced > LEAST else None


class Suspicion:
    """Names a rank that stays slow, once per slow period."""

    def __init__(self) -> None:
        self._suspect: tuple[int | None, str] | None = None
        self._windows, self._named = 0, False

    def window(self, paces: Sequence[Pace]) -> tuple[int | None, str, float] | None:
        """Evaluate a window. Return the slow rank if there is now enough evidence."""
        found = find_slow(paces)
        suspect = found[:2] if found is not None else None
        if suspect != self._suspect:
            self._suspect, self._windows, self._named = suspect, 0, False
        self._windows += 1
        if found is None or self._named or self._windows < WINDOWS:
            return None
        self._named = True
        return found
