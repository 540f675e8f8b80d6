"""How long a rank waits for a partner: four usual steps, where a usual step is measured as training proceeds."""

from __future__ import annotations

import statistics
import time
from collections import deque

LEAST = 1.0  # seconds, where steps are short: the system puts processes off for longer than a step
STEPS = 4.0  # usual steps
FIRST = 60.0  # seconds, before a usual step is known


class Patience:
    """The times of this rank's steps. `fixed` seconds, if not None, replace what they say."""

    def __init__(self, fixed: float | None) -> None:
        self._fixed = fixed
        self._times: deque[float] = deque(maxlen=32)
        self._last = 0.0  # when the last step began
        self.waited = 0.0  # seconds since then in which this rank stood still for others

    @property
    def seconds(self) -> float:
        """How long to wait for a partner."""
        if self._fixed is not None:
            return self._fixed
        return max(LEAST, STEPS * statistics.median(self._times)) if self._times else FIRST

    def begin_step(self) -> bool:
        """Note the time since the last step. Whether this rank was away for longer than others wait for it."""
        now, away = time.monotonic(), False
        if self._last:
            took = now - self._last - self.waited  # waiting for others is not being away
            away = bool(self._times) and took > self.seconds
            self._times.append(took)
        self._last, self.waited = now, 0.0
        return away
