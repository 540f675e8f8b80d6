"""All-reduce: sums, means and extremes over all ranks.

An all-reduce runs a schedule. Where all ranks share memory and the user named no schedule, it is one call of the native core.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch

from phalanx.comm.arguments import check_in_place, check_reduction, kind_of
from phalanx.comm.choose import choose
from phalanx.comm.envelope import is_plain, plain
from phalanx.comm.operations import Operations, digest_of
from phalanx.comm.pending import Pending
from phalanx.comm.runner import Runner
from phalanx.native.core import TYPES
from phalanx.schedule import Collective, Schedule

log = logging.getLogger("phalanx")

ReduceOp = Literal["sum", "mean", "max", "min"]


class Reductions:
    """The reductions of one communicator. `algorithm` is the schedule that the user named, if any."""

    def __init__(self, operations: Operations, runner: Runner, algorithm: Schedule | None, *, shared: bool) -> None:
        self._operations, self._runner = operations, runner
        library = operations.transport.library
        chosen = choose(operations.members.hosts, shared=shared, library=library)
        self.schedule = algorithm or chosen.schedule
        # beside NCCL, tensors in host memory travel as they would without it
        self._large = algorithm or (choose(operations.members.hosts, shared=shared).schedule if shared else self.schedule)
        # a schedule that the user named runs everything but very small messages
        self._smaller = chosen.smaller if algorithm is None else chosen.smaller[:1]
        self.smallest = chosen.smaller[0][1]
        log.debug(
            "phalanx: %s: %s, and for less %s; chosen by %s",
            operations.members.name,
            self.schedule.name,
            ", ".join(f"{schedule.name} up to {limit:,} bytes" for limit, schedule in self._smaller),
            chosen.origin,
        )
        self.direct = operations.team_of_all if algorithm is None else None
        self._named: tuple[object, int] = (None, 0)  # the last direct all-reduce, and the digest of its name

    def all_reduce(self, x: torch.Tensor, op: ReduceOp, label: str) -> torch.Tensor:
        operations, team = self._operations, self.direct
        if team is None or not operations.may_run_here or not _is_simple(x, op):
            self.all_reduce_async(x, op, label).wait()
            return x
        key = (x.dtype, x.shape, op, label)
        if key != self._named[0]:  # comparing a shape is faster than hashing it
            self._named = key, _digest_of(*key)
        digest = self._named[1]
        operations.run_here(lambda: _name_of(*key), lambda number, text: team.all_reduce_about(x, op, (digest, number, text)))
        return x

    def all_reduce_async(self, x: torch.Tensor, op: ReduceOp, label: str) -> Pending:
        check_reduction(x, op)
        check_in_place(x)
        schedule = self.schedule_for(x)

        def work(tag: int) -> torch.Tensor:
            self.reduce(x.detach(), op, schedule, tag)
            return x

        compare = not x.is_cpu or x.dtype not in TYPES or self.direct is None  # the native core compares calls by itself
        return self._operations.start(_name_of(x.dtype, x.shape, op, label), work, [x], compare=compare, queued=True)

    def schedule_for(self, x: torch.Tensor) -> Schedule:
        """The schedule for tensors of the size of `x`."""
        if x.is_cuda and self._operations.transport.library:
            return self.schedule  # NCCL has its own way with small messages
        return next((schedule for limit, schedule in self._smaller if x.nbytes <= limit), self._large)

    def reduce(self, x: torch.Tensor, op: ReduceOp, schedule: Schedule, tag: int, *, scatters: bool = False) -> None:
        """Reduce `x` in place, for any layout and device. Only the issuing thread calls it. `scatters`: a reduce-scatter."""
        transport, size = self._operations.transport, self._operations.members.size
        if not transport.can_carry(x) or not is_plain(x):
            dense = plain(x if transport.can_carry(x) else x.cpu())
            self.reduce(dense, op, schedule, tag, scatters=scatters)
            x.copy_(dense)
            return
        if self.direct is not None and not scatters and x.is_cpu and x.dtype in TYPES:
            self.direct.all_reduce(x, op)
            return
        flat = x.view(-1)
        if x.dtype is torch.bool:  # the sum of booleans is their `or`
            flat, op = flat.view(torch.uint8), "max" if op == "sum" else op
        if op == "mean" and self._averages(schedule, x):
            self._runner.run(schedule, flat, op, tag, scatters=scatters)
            return
        if op == "mean" and x.dtype is torch.float16:
            flat.div_(size)  # divide before the wire: fp16 sums of 1024 ranks overflow
        self._runner.run(schedule, flat, "sum" if op == "mean" else op, tag, scatters=scatters)
        if op == "mean" and x.dtype is not torch.float16:
            flat.div_(size)

    def _averages(self, schedule: Schedule, x: torch.Tensor) -> bool:
        """Whether one NCCL call computes the mean of `x`, division included."""
        steps = schedule.steps
        if not x.is_cuda or not x.is_floating_point() or len(steps) != 1 or len(steps[0].ops) != 1:
            return False
        call = steps[0].ops[0]
        transport, ranks = self._operations.transport, self._operations.members.ranks
        return isinstance(call, Collective) and call.kind == "all_reduce" and transport.calls(call, x, ranks)


def _name_of(dtype: torch.dtype, shape: Sequence[int], op: str, label: str) -> str:
    """The name of an all-reduce."""
    return f"all_reduce({kind_of(dtype, shape)}, {op}{', ' + label if label else ''})"


@functools.lru_cache(maxsize=1024)
def _digest_of(dtype: torch.dtype, shape: Sequence[int], op: str, label: str) -> int:
    return digest_of(_name_of(dtype, shape, op, label))


def _is_simple(x: Any, op: str) -> bool:
    """Whether the native core takes `x` as it is. Everything else takes the slow path, which checks arguments."""
    return (
        isinstance(x, torch.Tensor)
        and x.is_cpu
        and x.layout is torch.strided
        and x.dtype in TYPES
        and x.is_contiguous()
        and (op in ("sum", "max", "min") or (op == "mean" and x.is_floating_point()))
    )
