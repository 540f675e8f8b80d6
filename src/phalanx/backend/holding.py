"""Which asynchronous all-reduces wait for the end of backward: those of ranks whose cores all compute.

DistributedDataParallel starts an all-reduce as soon as a bucket is complete. A thread that sums it beside backward needs a core,
and both threads of the sum need one at the same time. Where the ranks' own computation keeps every core busy, these threads take
turns with it and wait for each other. Instead, the thread that called `backward()` runs all of them in one go when backward ends.
It does so before DistributedDataParallel waits, because callbacks at the end of backward run in the order of their requests.

Between hosts a network works beside the cores, and only a trial tells what is faster. The first steps are held and not held by
turns, and each rank keeps what was faster. Ranks may decide differently: when a call runs is up to each, the order is not.

Whoever waits for the `Work` earlier runs it at once. A program that waits during backward for a *future* gets it when the lane
loses its patience; from then on nothing is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from phalanx._torch_private import graph_task_id, is_inside_a_node, queue_callback
from phalanx.backend.lane import Lane
from phalanx.backend.work import DROPS_PYTHON, Task
from phalanx.comm.cores import has_idle_core

TRIALS = 4  # steps of each way; the first of each does not count


class Trial:
    """Steps in turns, until the faster way is known. `held` is the way of the running step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, 0.0
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self.held, self.over = False, False

    def backward_ended(self) -> None:
        """From one end to the next is a step."""
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
    """Decides for one lane, whose group has this many `ranks` on this host; `alone`: they are all of the group."""

    def __init__(self, lane: Lane, ranks: int, *, alone: bool) -> None:
        self._lane, self._ranks = lane, ranks
        self._trial = None if alone else Trial()
        self._backward = -1  # the last one whose end was expected

    def applies(self) -> bool:
        """Whether an all-reduce that is called now should be held."""
        if graph_task_id() == -1 or self._lane.waited_in_vain or DROPS_PYTHON:
            return False
        # not in a callback at the end of backward: it may wait at once
        if not is_inside_a_node() or has_idle_core(self._ranks):
            return False
        if self._trial is None:
            return True
        if not self._trial.over:
            self._expect_end()
        return self._trial.held

    def hold(self, task: Task) -> Task:
        """Run `task` at the end of the running backward, or when it is wanted."""
        self._lane.hold(task)
        self._expect_end()
        return task

    def _expect_end(self) -> None:
        number = graph_task_id()  # a backward inside another has a number of its own
        if number != self._backward:
            self._backward = number
            queue_callback(self._at_the_end)

    def _at_the_end(self) -> None:
        if self._trial is not None:
            self._trial.backward_ended()
        self._lane.run_until()
