"""Reduce-scatter: every rank gets its part of a reduction. It always runs as a schedule, the first half of a ring."""

from __future__ import annotations

import torch

from phalanx.comm.arguments import check_reduction, text_of
from phalanx.comm.operations import Operations
from phalanx.comm.reductions import ReduceOp, Reductions
from phalanx.native.core import TYPES
from phalanx.schedule import Collective, Schedule, Step


def scattering(size: int) -> Schedule:
    """Return the schedule of a reduce-scatter: the first half of a ring."""
    call = Collective("reduce_scatter", tuple(range(size)), range(size))
    return Schedule(f"reduce_scatter({size})", size, size, (Step((call,)),) if size > 1 else ())


class ReduceScatter:
    """The reduce-scatter of one communicator."""

    def __init__(self, operations: Operations, reductions: Reductions) -> None:
        self._operations, self._reductions = operations, reductions
        self._schedule = scattering(operations.members.size)

    def reduce_scatter(self, x: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        size, rank = self._operations.members.size, self._operations.members.rank
        check_reduction(x, op)
        if x.dim() == 0 or x.shape[0] % size:
            raise ValueError(f"reduce_scatter cuts dim 0 into {size} equal parts, but the shape is {tuple(x.shape)}: pad it")

        def work(tag: int) -> torch.Tensor:
            whole = x.detach().clone(memory_format=torch.contiguous_format)
            self._reductions.reduce(whole, op, self._schedule, tag, scatters=True)
            return whole.chunk(size)[rank].clone() if whole.numel() else whole[: x.shape[0] // size]

        compare = not x.is_cpu or x.dtype not in TYPES
        return self._operations.start(f"reduce_scatter({text_of(x)}, {op})", work, [x], compare=compare, queued=True).wait()
