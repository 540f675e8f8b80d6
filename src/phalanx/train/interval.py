"""What this rank records about the steps of an interval: losses, times and waits.

Losses are summed where they are computed. On a GPU, the sums are copied to pinned memory after the steps, and the host reads
them an interval later, so that it never waits for the steps that it has just queued.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from phalanx.comm.streams import HostCopy
from phalanx.train.clock import StepEvents
from phalanx.train.stragglers import Times


class OwnInterval:
    """The steps of this rank since `since`; `close` ends it."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.steps = 0
        self.latest: dict[str, Any] = {}  # values of the last step, for the row
        self.seconds = self.elapsed = 0.0  # of the run, and of this interval
        self.travelling = self.waited = 0.0  # seconds of all-reduces, and of waiting for them
        self._times = Times()
        self._events: list[StepEvents] = []
        self._sums: torch.Tensor | None = None  # loss, right, samples
        self._copy: HostCopy | None = None

    def add(self, *, loss: torch.Tensor, right: torch.Tensor, samples: int, times: Times | StepEvents, travelling: float) -> None:
        """Record a step; `loss` is a sum over its samples. Does not block."""
        sums = torch.stack([loss.double(), right.double(), torch.full_like(loss, samples, dtype=torch.float64)])
        self._sums = sums if self._sums is None else sums + self._sums
        self.steps += 1
        if isinstance(times, StepEvents):
            self._events.append(times)  # on a GPU, message times only show when they were queued
        else:
            self._times += times
            self.travelling += travelling
            self.waited += min(times.wait, travelling)

    @property
    def is_late(self) -> bool:
        """Whether reading it now would wait for a GPU."""
        return self._sums is not None and self._sums.is_cuda

    def close(self, seconds: float) -> None:
        """End the interval, after `seconds` of the run."""
        self.seconds, self.elapsed = seconds, time.perf_counter() - self.since
        if self._sums is not None:
            self._copy = HostCopy(self._sums)

    @property
    def arrived(self) -> bool:
        """Whether the sums have reached the host. Call it on a closed interval."""
        return self._copy is not None and self._copy.arrived

    def sums(self) -> list[float]:
        """Loss, correct samples and samples of this rank. Call it on a closed interval."""
        assert self._copy is not None
        return self._copy.tolist()

    def times(self) -> Times:
        """The mean times of a step. Read the sums first; after that, the GPU has passed all events."""
        read = [found for found in (events.read() for events in self._events) if found is not None]
        return sum(read, self._times) / max(1, len(read) if self._events else self.steps)
