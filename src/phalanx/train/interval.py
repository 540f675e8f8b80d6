"""What this rank notes of the steps of an interval: losses, times, and what it waited for.

Losses are summed where they are computed. On a GPU the sums travel to pinned memory behind the steps, and the host reads them an
interval later, so that it never waits for the steps that it has just queued.
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
        self.latest: dict[str, Any] = {}  # what a row has of the last step
        self.seconds = self.elapsed = 0.0  # of the run, and of this interval
        self.travelling = self.waited = 0.0  # seconds of all-reduces, and how many of them were waited for
        self._times = Times()
        self._events: list[StepEvents] = []
        self._sums: torch.Tensor | None = None  # loss, right, samples
        self._copy: HostCopy | None = None

    def add(self, *, loss: torch.Tensor, right: torch.Tensor, samples: int, times: Times | StepEvents, travelling: float) -> None:
        """Note a step; `loss` is a sum over its samples. This waits for nothing."""
        sums = torch.stack([loss.double(), right.double(), torch.full_like(loss, samples, dtype=torch.float64)])
        self._sums = sums if self._sums is None else sums + self._sums
        self.steps += 1
        if isinstance(times, StepEvents):
            self._events.append(times)  # the times of messages on a GPU are those of queueing them, and say nothing
        else:
            self._times += times
            self.travelling += travelling
            self.waited += min(times.wait, travelling)

    @property
    def is_late(self) -> bool:
        """Whether reading it now would wait for a GPU."""
        return self._sums is not None and self._sums.is_cuda

    def close(self, seconds: float) -> None:
        """The interval is over, after `seconds` of the run."""
        self.seconds, self.elapsed = seconds, time.perf_counter() - self.since
        if self._sums is not None:
            self._copy = HostCopy(self._sums)

    @property
    def arrived(self) -> bool:
        """Whether its sums have reached the host. The interval is closed."""
        return self._copy is not None and self._copy.arrived

    def sums(self) -> list[float]:
        """Loss, right ones and samples of this rank. The interval is closed."""
        assert self._copy is not None
        return self._copy.tolist()

    def times(self) -> Times:
        """The mean times of a step. Read the sums first: then a GPU has passed all events."""
        read = [found for found in (events.read() for events in self._events) if found is not None]
        return sum(read, self._times) / max(1, len(read) if self._events else self.steps)
