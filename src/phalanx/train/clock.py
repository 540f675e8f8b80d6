"""Measure where the time of a step goes on a GPU, with events in its queue.

A host that only queues work runs ahead until the queue is full. From then on, its clock shows the pace of the slowest rank in
every part of a step, so it cannot tell which rank is slow. Events are marks that the GPU itself passes:

    step t - 1 |  idle  | forward, backward | stream waits for other ranks | update |
           ended    begun               ready                        arrived    ended

No thread waits for an event. The log reads them an interval later, when the GPU has passed them all.
"""

from __future__ import annotations

import torch

from phalanx.grad.engine import EndOfBackward
from phalanx.train.stragglers import Times


class StepEvents:
    """The marks of one step on `device`. The host waited `input_seconds` for its input; `before` is the previous step."""

    def __init__(self, device: torch.device, input_seconds: float, before: StepEvents | None) -> None:
        self._device, self._input = device, input_seconds
        self._before = before._ended if before is not None else None
        self._begun = self._mark()
        self._backward = EndOfBackward(self._note_ready)
        self._ready: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None

    def watch(self, loss: torch.Tensor) -> None:
        """Mark when backward from `loss` has computed the last gradient, before the stream waits for other ranks.

        Callbacks at the end of backward run in the order in which they were queued; this one comes before any parameter's.
        """
        loss.register_hook(lambda _: self._backward.expect())

    def _note_ready(self) -> None:
        self._ready = self._mark()

    def arrived(self) -> None:
        """Mark that the gradients of other ranks have arrived."""
        self._arrived = self._mark()

    def ended(self) -> None:
        """Mark that the weights are updated."""
        self._ended = self._mark()

    def read(self) -> Times | None:
        """The times of the step; None until the GPU has finished it."""
        begun, arrived, ended = self._begun, self._arrived, self._ended
        if arrived is None or ended is None or not ended.query():
            return None
        ready = self._ready or arrived  # without samples there was no backward
        # a host that waits for input while the GPU is busy delays nothing
        idle = _seconds(self._before, begun) if self._before is not None else self._input
        return Times(min(self._input, idle), _seconds(begun, ready), _seconds(ready, arrived), _seconds(arrived, ended))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
    return earlier.elapsed_time(later) / 1e3
