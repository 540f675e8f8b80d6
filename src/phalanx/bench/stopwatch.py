"""Seconds of work; on a GPU, of all that it queued and not only of queueing it."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Runs from now on, for work on `device`. What was queued there before is over first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._finish()
        self._begun = time.perf_counter()

    def seconds(self) -> float:
        """Since it began, when the device has done all its work."""
        self._finish()
        return time.perf_counter() - self._begun

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
