"""Reductions with arithmetic in between, run as one operation. Wires that compress gradients use them.

The work runs in the issuing thread, so it overlaps with backward like a plain all-reduce, and no other message is sent
between its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from phalanx.comm.block_code import Coder
from phalanx.comm.choose import place
from phalanx.comm.hosts import Hosts
from phalanx.comm.operations import Operations, tag_of
from phalanx.comm.pending import Pending
from phalanx.comm.reductions import Reductions
from phalanx.comm.runner import Runner
from phalanx.schedule import Schedule, quantised

Level = Literal["host", "rank"]  # which messages are compressed: those between hosts, or all


class Compound:
    """The compound operations of one communicator."""

    def __init__(self, operations: Operations, runner: Runner, reductions: Reductions) -> None:
        self._operations, self._runner, self._reductions = operations, runner, reductions
        self._schedules: dict[Level, Schedule] = {}

    def start(self, name: str, work: Callable[[Turn], torch.Tensor], x: torch.Tensor) -> Pending:
        """Queue `work`, which gets a `Turn` and does the same on all ranks. It reads and writes `x`, and returns the result."""

        def run(tag: int) -> torch.Tensor:
            return work(Turn(self._reductions, self._runner, self.schedule, tag))

        return self._operations.start(name, run, [x], compare=True, queued=True)

    def schedule(self, level: Level) -> Schedule:
        """Return the all-reduce that encodes messages between hosts, or between all ranks."""
        if level not in self._schedules:
            self._schedules[level] = quantised_for(self._operations.members.hosts, level)
        return self._schedules[level]


def quantised_for(hosts: Hosts, level: Level) -> Schedule:
    """Return the schedule for `level`. If hosts have different numbers of ranks, every message is encoded."""
    if level == "rank" or hosts.grid is None:
        return quantised(sum(map(len, hosts.ranks)))
    return place(quantised(*hosts.grid), hosts)


class Turn:
    """One run of a compound operation. Each of its reductions gets its own tag."""

    def __init__(self, reductions: Reductions, runner: Runner, schedule: Callable[[Level], Schedule], tag: int) -> None:
        self._reductions, self._runner, self._schedule = reductions, runner, schedule
        self._tag, self._number = tag, 0

    def _next_tag(self) -> int:
        self._number += 1
        return tag_of(self._tag, self._number)

    def add_up(self, x: torch.Tensor) -> None:
        """Sum over all ranks, in place and in full precision."""
        self._reductions.reduce(x, "sum", self._reductions.schedule_for(x), self._next_tag())

    def add_up_coded(self, x: torch.Tensor, coder: Coder, level: Level) -> torch.Tensor:
        """Sum over all ranks, in place, times the factor of the coder. Return whether the whole result is finite, as a tensor.

        A value that is not finite fills its block, so it is enough to check one number per block.
        """
        schedule = self._schedule(level)
        self._runner.run(schedule, x, "sum", self._next_tag(), coder=coder)
        return torch.isfinite(x[self._firsts(schedule, x, coder)]).all()

    def _firsts(self, schedule: Schedule, x: torch.Tensor, coder: Coder) -> Sequence[int] | torch.Tensor | slice:
        return self._runner.first_of_blocks(schedule, x, coder.code.block)
