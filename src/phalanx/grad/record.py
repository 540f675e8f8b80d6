"""How long the communication of each step took, kept for the last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.grad.reducer import Group

KEPT = 10_000  # steps


@dataclass(slots=True)
class StepRecord:
    """Times of one step in seconds: how long groups were in flight, and how long the rank waited for them, from `begun` on."""

    wait: float
    under_way: float
    early_bytes: int
    bytes: int
    begun: float = 0.0  # by time.perf_counter()


class Records:
    """One record per step, which sums over its exchanges."""

    def __init__(self) -> None:
        self.all: deque[StepRecord] = deque(maxlen=KEPT)
        self._current: StepRecord | None = None

    def add(self, groups: Sequence[Group], *, begun: float, ended: float, early_bytes: int) -> None:
        """Record an exchange that has ended. A step with several backwards has several."""
        first = min((group.left for group in groups if group.left is not None), default=ended)
        own = StepRecord(ended - begun, ended - first, early_bytes, sum(group.flat.nbytes for group in groups), begun)
        if self._current is None:
            self._current = own
            self.all.append(own)
            return
        self._current.wait += own.wait
        self._current.under_way += own.under_way
        self._current.early_bytes += own.early_bytes
        self._current.bytes += own.bytes

    def next_step(self) -> None:
        self._current = None
