"""Schedules that users pass to `Communicator.run`: checked against the tensor, verified once, then run."""

from __future__ import annotations

import warnings

import torch

from phalanx.comm.arguments import check_in_place, check_reduction, text_of
from phalanx.comm.envelope import is_plain
from phalanx.comm.operations import Operations
from phalanx.comm.runner import Runner
from phalanx.schedule import Move, Op, Scale, Schedule, ScheduleError, lower, verify


class UserSchedules:
    """The user's schedules of one communicator."""

    def __init__(self, operations: Operations, runner: Runner) -> None:
        self._operations, self._runner = operations, runner
        self._verified: dict[int, Schedule] = {}

    def run(self, schedule: Schedule, x: torch.Tensor) -> torch.Tensor:
        size, transport = self._operations.members.size, self._operations.transport
        check_reduction(x, "sum")
        check_in_place(x)
        if schedule.world != size:
            raise ScheduleError(f"{schedule.name} is for {schedule.world} ranks, but this communicator has {size}")
        if not is_plain(x) or not transport.can_carry(x):
            raise ValueError(f"run needs a contiguous tensor on a device of the backend, got {text_of(x)} on {x.device}")
        if not (x.is_floating_point() or x.is_complex()) and any(_multiplies(op) for op in schedule.ops()):
            raise TypeError(f"{schedule.name} multiplies by fractions, which {x.dtype} cannot hold: call x.float() first")
        if schedule.coded and x.dtype is not torch.float32:
            raise TypeError(f"{schedule.name} encodes blocks of float32, not {x.dtype}: call x.float() first")
        if id(schedule) not in self._verified:
            self._verify(schedule)
            verify(lower(schedule))
            self._verified[id(schedule)] = schedule

        def work(tag: int) -> torch.Tensor:
            self._runner.run(schedule, x.detach().view(-1), "sum", tag)
            return x

        return self._operations.start(f"run({schedule.name}, {text_of(x)})", work, [x], compare=True, queued=True).wait()

    def _verify(self, schedule: Schedule) -> None:
        """Verify a schedule. Ranks that end with different bits only get a warning, because the tensors need not be replicas."""
        try:
            verify(schedule, bitwise=schedule.goal != "mixing")
        except ScheduleError as error:
            verify(schedule)
            warnings.warn(f"run: {error}. This is the only warning for this schedule", stacklevel=4)


def _multiplies(op: Op) -> bool:
    return isinstance(op, Scale) or (isinstance(op, Move) and op.factor != 1)
