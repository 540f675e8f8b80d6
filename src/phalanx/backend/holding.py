"""Which asynchronous all-reduces wait for the end of backward: those of ranks whose cores all compute.

DistributedDataParallel starts an all-reduce as soon as a bucket is complete. A thread that sums it beside backward needs a core,
and both threads of the sum need one at the same time. Where the ranks' own computation keeps every core busy, these threads take
turns with it and wait for each other. Instead, the thread that called `backward()` runs all of them in one go when backward ends.
It does so before DistributedDataParallel waits, because callbacks at the end of backward run in the order of their requests.

Whoever waits for the `Work` earlier runs it at once. A program that waits during backward for a *future* gets it when the lane
loses its patience; from then on nothing is held.
"""

from __future__ import annotations

from phalanx._torch_private import graph_task_id, is_inside_a_node, queue_callback
from phalanx.backend.lane import Lane
from phalanx.backend.work import DROPS_PYTHON, Task
from phalanx.comm.cores import has_idle_core


class Holding:
    """Decides for one lane, whose group has this many `ranks` on this host."""

    def __init__(self, lane: Lane, ranks: int) -> None:
        self._lane, self._ranks = lane, ranks
        self._backward = -1  # the last one whose end was expected

    def applies(self) -> bool:
        """Whether an all-reduce that is called now should be held."""
        if graph_task_id() == -1 or self._lane.waited_in_vain or DROPS_PYTHON:
            return False
        # not in a callback at the end of backward: it may wait at once
        return is_inside_a_node() and not has_idle_core(self._ranks)

    def hold(self, task: Task) -> Task:
        """Run `task` at the end of the running backward, or when it is wanted."""
        self._lane.hold(task)
        number = graph_task_id()  # a backward inside another has a number of its own
        if number != self._backward:
            self._backward = number
            queue_callback(self._lane.run_until)
        return task
