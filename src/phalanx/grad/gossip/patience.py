"""How long a rank waits for a partner: four typical steps, measured as training proceeds."""

from __future__ import annotations

import statistics
import time
from collections import deque

LEAST = 1.0  # seconds, if steps are short: the system may suspend a process for longer than a step
STEPS = 4.0  # typical steps
FIRST = 60.0  # seconds, before a typical step is known


class Patience:
    """The times of this rank's steps. `fixed` seconds, if given, replace the measurement."""

    def __init__(self, fixed: float | None) -> None:
        self._fixed = fixed
        self._times: deque[float] = deque(maxlen=32)
        self._last = 0.0  # when the last step began
        self.waited = 0.0  # seconds since then that this rank waited for others

    @property
    def seconds(self) -> float:
        """How long to wait for a partner."""
        if self._fixed is not None:
            return self._fixed
        return max(LEAST, STEPS * statistics.median(self._times)) if self._times else FIRST

    def begin_step(self) -> bool:
        """Note the time since the last step. Return whether this rank was away for longer than others wait for it."""
        now, away = time.monotonic(), False
        if self._last:
            took = now - self._last - self.waited  # time spent waiting for others does not count
            away = bool(self._times) and took > self.seconds
            self._times.append(took)
        self._last, self.waited = now, 0.0
        return away
