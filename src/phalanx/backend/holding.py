"""Decide which asynchronous all-reduces wait for the end of backward: those of ranks that keep all cores busy.

DistributedDataParallel starts an all-reduce as soon as a bucket is complete. A thread that sums it during backward needs a core,
and the sum needs the threads of all ranks at the same time. If the computation already keeps every core busy, these threads
compete with it and wait for each other. Instead, the thread that called `backward()` runs all of them in one go when backward
ends. That is before DistributedDataParallel waits, because end-of-backward callbacks run in the order in which they were queued.

Between hosts, the network works in parallel with the cores, and only a trial shows which way is faster. The first steps alternate
between holding and not holding, and each rank keeps the faster way. Ranks may decide differently: only the order has to match.

Waiting for the `Work` earlier runs it at once. A program that waits for a *future* during backward gets it after PATIENCE;
from then on nothing is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from phalanx._torch_private import graph_task_id, is_inside_a_node, queue_callback
from phalanx.backend.lane import Lane
from phalanx.backend.work import DROPS_PYTHON, Task
from phalanx.comm.cores import has_idle_core

TRIALS = 4  # steps each way; the first of each is not counted


class Trial:
    """Alternate between both ways until the faster one is known. `held` is the way of the current step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, 0.0
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self.held, self.over = False, False

    def backward_ended(self) -> None:
        """Count a step: the time from one end of backward to the next."""
        now, before = self._clock(), self._last
        self._last = now
        if self.over or not before:
            return
        self._times[self.held].append(now - before)
        if len(self._times[self.held]) < TRIALS:
            return
        if not self.held:
            self.held = True
            return
        self.held = median(self._times[True][1:]) < median(self._times[False][1:])
        self.over = True


class Holding:
    """Decides for one lane. `ranks` of its group are on this host; `alone` if that is the whole group."""

    def __init__(self, lane: Lane, ranks: int, *, alone: bool) -> None:
        self._lane, self._ranks = lane, ranks
        self._trial = None if alone else Trial()
        self._backward = -1  # the last backward that we queued a callback for

    def applies(self) -> bool:
        """Whether to hold an all-reduce that starts now."""
        if graph_task_id() == -1 or self._lane.waited_in_vain or DROPS_PYTHON:
            return False
        # not in a callback at the end of backward: the callback may wait for it immediately
        if not is_inside_a_node() or has_idle_core(self._ranks):
            return False
        if self._trial is None:
            return True
        if not self._trial.over:
            self._queue_end_callback()
        return self._trial.held

    def hold(self, task: Task) -> Task:
        """Run `task` at the end of the current backward, or as soon as its result is needed."""
        self._lane.hold(task)
        self._queue_end_callback()
        return task

    def _queue_end_callback(self) -> None:
        number = graph_task_id()  # a backward inside another has its own number
        if number != self._backward:
            self._backward = number
            queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if self._trial is not None:
            self._trial.backward_ended()
        self._lane.run_until()
