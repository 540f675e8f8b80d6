"""Measure seconds of work; on a GPU, of the queued work itself, not only of queueing it."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Times work on `device` from now on, after waiting for what was queued before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._finish()
        self._begun = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the start, after waiting for the device to finish."""
        self._finish()
        return time.perf_counter() - self._begun

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
