"""The process group that torch makes for "phalanx": which collectives run here and which go to gloo.

torch calls the methods of a `ProcessGroup` from Python and C++. Methods that this class lacks go to the gloo group registered
inside it, and GPU tensors go to NCCL if there is one. `plain` is a process group with the same gloo group but without this class;
methods here return NotImplemented for tensors that the native core cannot handle, and `usual_form` then calls it.

A synchronous call has ended when it returns, and returns None, as torch expects of backends that know `asyncOp`.

torch 2.13 renamed some methods. Both names are here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from phalanx.backend.engine import Engine
from phalanx.backend.forms import op_of, usual_form
from phalanx.backend.holding import Holding
from phalanx.backend.lane import Lane
from phalanx.backend.work import Task, for_torch
from phalanx.schedule import Schedule

Tensors = Sequence[torch.Tensor]
CLOSING = 1.0  # seconds that unawaited operations have to finish when the group is destroyed


class PhalanxProcessGroup(dist.ProcessGroup):
    """A process group whose all-reduces run on shared memory and schedules. torch creates it through create.py."""

    def __init__(self, store: Any, rank: int, size: int, plain: Any, engine: Engine, lane: Lane) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only form that lets C++ call the methods below
        self.plain, self._store, self._engine, self._lane = plain, store, engine, lane
        self._ranks, self._shares = size, engine.team_of_all is not None
        self._holding = Holding(lane, len(engine.members.on_this_host), alone=engine.members.inter_size == 1)
        self._close = weakref.finalize(self, _close, engine, lane)
        self._close.atexit = False  # threads cannot be joined at exit, and the kernel cleans up

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """Return the backend's name, as `name()` does."""
        return "phalanx"

    @property
    def algorithm(self) -> Schedule | None:
        """The schedule of all-reduces of more than a few KiB, or None if they are one call of the native core."""
        return self._engine.algorithm

    def get_group_store(self) -> Any:
        """The store of this group."""
        return self._store

    # ---- reductions --------------------------------------------------------------------------------------------------------

    @usual_form(AllreduceOptions, "allreduce")
    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        """All-reduce one tensor. Sparse tensors and rare operations go to gloo."""
        x, op, engine = tensors[0], op_of(opts), self._engine
        if op is None or len(tensors) != 1 or not engine.can_reduce(x, op):
            return NotImplemented
        about = engine.about(x, op)
        if not getattr(opts, "asyncOp", True):
            return self._lane.run_here(about.name, lambda: engine.all_reduce(x, op, about))
        if self._holding.applies():
            return self._holding.hold(Task(about.name, lambda: engine.all_reduce(x, op, about), tensors, self._lane))
        if engine.begins(x):
            begun = self._lane.begin_here(about.name, lambda: engine.begin(x, op, about), tensors)
            if begun is not None:
                return for_torch(begun)
        return self.start(about.name, lambda: engine.all_reduce(x, op, about), tensors, opts)

    @usual_form(AllreduceCoalescedOptions, "allreduce_coalesced")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        """All-reduce several tensors as one operation."""
        op, engine = op_of(opts), self._engine
        if op is None or not tensors or not all(engine.can_reduce(x, op) for x in tensors):
            return NotImplemented

        def work() -> None:
            for x in tensors:
                engine.all_reduce(x, op)

        return self.start(f"all_reduce({len(tensors)} tensors, {op})", work, tensors, opts)

    @usual_form(ReduceScatterOptions, "reduce_scatter_single", "_reduce_scatter_base")
    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any) -> Any:
        """Reduce-scatter one tensor."""
        op, engine = op_of(opts), self._engine
        if op is None or not self._fits(whole, output) or not engine.can_reduce(whole, op):
            return NotImplemented
        return self.start("reduce_scatter", lambda: engine.reduce_scatter(output, whole, op), [output], opts)

    @usual_form(ReduceScatterOptions, "reduce_scatter")
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        """Reduce-scatter a list of tensors."""
        op, engine = op_of(opts), self._engine
        if op is None or not self._is_list(inputs, outputs) or not engine.can_reduce(outputs[0], op):
            return NotImplemented
        out, parts = outputs[0], inputs[0]

        def work() -> None:
            engine.reduce_scatter(out, torch.cat([part.detach().reshape(-1) for part in parts]), op)

        return self.start("reduce_scatter", work, outputs, opts)

    @usual_form(ReduceScatterOptions, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Reduce-scatter several tensors, each cut into parts."""
        op, engine = op_of(opts), self._engine
        fit = len(outputs) == len(inputs) and all(self._fits(whole, out) for whole, out in zip(inputs, outputs))
        if op is None or not fit or not all(engine.can_reduce(x, op) for x in inputs):
            return NotImplemented

        def work() -> None:
            for out, whole in zip(outputs, inputs):
                engine.reduce_scatter(out, whole, op)

        return self.start(f"reduce_scatter({len(inputs)} tensors)", work, outputs, opts)

    # ---- copies ------------------------------------------------------------------------------------------------------------

    @usual_form(BroadcastOptions, "broadcast")
    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        """Broadcast one tensor of any dtype."""
        x, root, engine = tensors[0], opts.rootRank, self._engine
        if len(tensors) != 1 or not self._takes(x) or not 0 <= root < self._ranks or opts.rootTensor != 0:
            return NotImplemented
        return self.start("broadcast", lambda: engine.broadcast(x, root), tensors, opts)

    @usual_form(AllgatherOptions, "all_gather_single", "_allgather_base")
    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any) -> Any:
        """Gather into one tensor."""
        engine = self._engine
        if not self._fits(output, mine):
            return NotImplemented
        return self.start("all_gather", lambda: engine.all_gather(output, mine), [output], opts)

    @usual_form(AllgatherOptions, "allgather")
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        """Gather into a list of tensors of one shape. gloo handles other lists, or explains why it cannot."""
        engine = self._engine
        if not self._is_list(outputs, inputs):
            return NotImplemented
        mine, outs = inputs[0], outputs[0]

        def work() -> None:
            whole = torch.empty((len(outs), *mine.shape), dtype=mine.dtype)
            engine.all_gather(whole, mine)
            for out, part in zip(outs, whole):
                out.detach().copy_(part)

        return self.start("all_gather", work, outs, opts)

    @usual_form(AllgatherOptions, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Gather several tensors, each into one."""
        engine = self._engine
        if len(outputs) != len(inputs) or not all(self._fits(out, mine) for out, mine in zip(outputs, inputs)):
            return NotImplemented

        def work() -> None:
            for out, mine in zip(outputs, inputs):
                engine.all_gather(out, mine)

        return self.start(f"all_gather({len(inputs)} tensors)", work, outputs, opts)

    @usual_form(BarrierOptions, "barrier")
    def barrier(self, opts: Any) -> Any:
        """Wait for all ranks of the host. gloo does it across hosts."""
        if not self._shares or not _on_host(getattr(opts, "device", None)):
            return NotImplemented
        return self.start("barrier", self._engine.barrier, [], opts)

    # the names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- the end -----------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close the group; destroy_process_group calls this. Idempotent."""
        self._close()

    def abort(self) -> None:
        """Abort the running operation, on this rank and on ranks that wait for it."""
        self._engine.abort()
        self._close()

    # ---- which way ---------------------------------------------------------------------------------------------------------

    def start(self, name: str, work: Callable[[], None], tensors: Tensors, opts: Any) -> Any:
        """Do `work` in the order of this group's calls. `tensors` hold its result."""
        # before 2.8 torch does not tell whether the caller waits
        if not getattr(opts, "asyncOp", True):
            return self._lane.run_here(name, work)
        return for_torch(self._lane.queue(Task(name, work, tensors, self._lane)))

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether the shared memory of all ranks can copy `x`."""
        return self._shares and x.is_cpu and x.layout is torch.strided

    def _fits(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether `whole` has one part per rank and lies where this class can fill or cut it."""
        same = whole.dtype == part.dtype and whole.numel() == part.numel() * self._ranks
        return same and self._takes(whole) and self._takes(part) and whole.is_contiguous()

    def _is_list(self, parts: Sequence[Tensors], single: Tensors) -> bool:
        """Whether this is one list with a tensor per rank, all like `single`."""
        if len(parts) != 1 or len(single) != 1 or len(parts[0]) != self._ranks or not self._takes(single[0]):
            return False
        x = single[0]
        return all(self._takes(part) and part.shape == x.shape and part.dtype == x.dtype for part in parts[0])


def _on_host(device: torch.device | None) -> bool:
    return device is None or device.type == "cpu"


def _close(engine: Engine, lane: Lane) -> None:
    if lane.forked:
        return  # a forked child drops its copy; the group belongs to the parent
    lane.close(CLOSING, engine.abort)
    engine.close()
