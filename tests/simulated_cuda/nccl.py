"""NCCL: operations of several ranks that run when all of them are there.

    rank 0   compute [.. write x][record]                    [wait][read x]
             nccl              [wait]    [all_reduce #3 ....]                 starts, and occupies the GPU until rank 1 is there
    rank 1   nccl                            [wait][all_reduce #3]            both run, together

A call makes NCCL's own stream wait for the caller's, enqueues, and returns. `Work.wait()` makes the caller's stream wait.
`Work.wait(timeout)` also blocks the host, as WorkNCCL does. A GPU runs one NCCL kernel at a time, in the order of the calls. So
two ranks that call the operations of two groups in different orders wait for each other for ever. That is the point.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.simulated_cuda.device import Device, Marker, Stream
from tests.simulated_cuda.order import Stack, show, stack
from tests.simulated_cuda.simulation import Process, current_stream, process, simulation
from tests.simulated_cuda.tensor import CudaTensor, touch

REDUCE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


class CollectiveMismatchError(AssertionError):
    """Members of a group call different things; the real NCCL hangs or mixes up memory."""


class Kernel:
    """One member's part of an operation, or of several that were posted as one batch."""

    def __init__(self, name: str, device: Device, stream: Stream, parts: Sequence[Part]) -> None:
        self.name, self.device, self.stream, self.parts, self.stack = name, device, stream, parts, stack(3)
        self.started = self.over = self.hangs = False
        self.aborted = False
        for part in parts:
            part.kernel = self

    def ready(self) -> bool:
        if self.aborted:
            return True
        if self.started or self.hangs or not self.device.process.alive:
            return False
        return not self.device.simulation.one_nccl_kernel or self.device.nccl[0] is self

    def finish(self) -> bool:
        """Start; what this completes on other ranks leaves their queues."""
        self.started = True
        if not self.aborted:
            for part in self.parts:
                part.meeting.try_to_run()
            for other in dict.fromkeys(member.kernel for part in self.parts for member in part.meeting.parts.values()):
                if (
                    other not in (None, self)
                    and other.started
                    and not other.over
                    and all(part.meeting.done for part in other.parts)
                ):
                    other.leave()
                    other.device.simulation.popped(other.stream)
        if self.aborted or all(part.meeting.done for part in self.parts):
            self.leave()
            return True
        return False

    def leave(self) -> None:
        self.over = True
        self.device.nccl.remove(self)

    def waits_for(self) -> str:
        first = self.device.nccl[0]
        if self.device.simulation.one_nccl_kernel and first is not self:
            return f"the GPU, which {first.name} of {first.stream} holds; that one waits for {first.peers()}"
        return self.peers() + (" (an injected hang)" if self.hangs else "")

    def peers(self) -> str:
        missing = sorted({rank for part in self.parts for rank in part.meeting.missing()} - {self.device.process.rank})
        return f"ranks {missing}, queued at\n{show(self.stack)}\n "


class Part:
    """What one rank brings to a meeting."""

    def __init__(self, meeting: Meeting, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        self.meeting, self.rank, self.tensors = meeting, rank, tensors
        self.kernel: Any = None


class Meeting:
    """One operation of some ranks: it runs when all of them have started."""

    def __init__(self, ranks: Sequence[int], run: Callable[[dict[int, Sequence[torch.Tensor]]], None]) -> None:
        self.ranks, self.run = ranks, run
        self.parts: dict[int, Part] = {}
        self.done = False
        self.call: Any = None

    def join(self, rank: int, tensors: Sequence[torch.Tensor], call: Any, what: str) -> Part:
        """`call` must be equal on all ranks."""
        if self.parts and call != self.call:
            calls = sorted({next(iter(self.parts)): self.call, rank: call}.items())
            listed = ", ".join(f"rank {caller} calls {' '.join(map(str, called))}" for caller, called in calls)
            error = CollectiveMismatchError(f"{what}: {listed}\n{show(stack(3))}")
            simulation().complain(error)
            raise error
        self.call = call
        self.parts[rank] = part = Part(self, rank, tensors)
        return part

    def missing(self) -> list[int]:
        """Those that have not started; a rank that has joined may not have enqueued its kernel yet."""
        kernels = {rank: part.kernel for rank, part in self.parts.items()}
        return [rank for rank in self.ranks if kernels.get(rank) is None or not kernels[rank].started]

    def try_to_run(self) -> None:
        if not self.done and not self.missing():
            self.run({rank: part.tensors for rank, part in self.parts.items()})
            self.done = True


class Work:
    """torch.distributed.Work, of NCCL. It keeps the tensors until somebody waits for it."""

    def __init__(self, kernel: Kernel, marker: Marker, tensors: Sequence[torch.Tensor]) -> None:
        self._kernel, self._marker, self._tensors = kernel, marker, tensors
        self._where: Stack = kernel.stack

    def is_completed(self) -> bool:
        if not self._marker.done:
            simulation().step()
            simulation().conductor.maybe_yield()
        return self._marker.done

    def is_success(self) -> bool:
        return self._marker.done and not self._kernel.aborted

    def exception(self) -> BaseException | None:
        return dist.DistBackendError("NCCL communicator was aborted") if self._kernel.aborted else None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        device = self._kernel.device
        current_stream(device).wait(self._marker)
        if timeout is not None and timeout.total_seconds() > 0:
            own = device.process
            own.syncs.append(_sync("Work.wait(timeout)"))
            if not own.await_markers(f"{self._kernel.name} in Work.wait(timeout)", [self._marker], timeout.total_seconds()):
                raise dist.DistBackendError(f"Work {self._kernel.name} timed out in blocking wait.")
        if self._kernel.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        self._tensors = ()
        return True

    synchronize = wait

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        raise NotImplementedError("futures of simulated NCCL")


def _sync(what: str) -> Any:
    from tests.simulated_cuda.simulation import Sync

    return Sync(what, stack(3))


# ---- posting -------------------------------------------------------------------------------------------------------------------


def enqueue(
    group: Any, key: str, name: str, parts: Sequence[Part], reads: Sequence[CudaTensor], writes: Sequence[CudaTensor]
) -> Work:
    """The parts as one kernel of the calling rank, on NCCL's stream for `key`."""
    own = process()
    device = (*reads, *writes)[0].block.stream.device
    for x in (*reads, *writes):
        if x.block.stream.device is not device:
            raise ValueError(f"{name}: tensors on {device} and {x.block.stream.device}")
    claim(group, own, device)
    streams: dict[Any, Stream] = own.own.setdefault("nccl streams", {})
    stream = streams.get((key, device))
    if stream is None:
        stream = streams[key, device] = Stream(device, f"NCCL ({key})")
    stream.wait(current_stream(device).record())
    kernel = Kernel(name, device, stream, parts)
    injected = own.own.get("hang")
    if injected is not None and injected(name):
        kernel.hangs = True
    own.own.setdefault("nccl kernels", []).append((group, kernel))
    device.nccl.append(kernel)
    touches = [touch(x, x.raw, writes=False) for x in reads] + [touch(x, x.raw, writes=True) for x in writes]
    device.touch()
    device.memory.reclaim()
    stream.push(kernel, touches)
    return Work(kernel, stream.record(), (*reads, *writes))


def claim(group: Any, own: Process, device: Device) -> None:
    """NCCL wants a GPU of its own for each rank of a group."""
    for other, (host, index) in group.devices.items():
        if other != own.rank and (host, index) == (own.host, device.index):
            users = f"rank {own.rank} and rank {other} both use cuda:{index} of host {host}"
            error = CollectiveMismatchError(f"NCCL: Duplicate GPU detected: {users}\n{show(stack(3))}")
            simulation().complain(error)
            raise error
    group.devices[own.rank] = own.host, device.index


def reduced(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """In rank order, in the tensors' own precision: every run and every rank gets the same bits."""
    total = tensors[0].clone()
    for x in tensors[1:]:
        REDUCE[op](total, x, out=total)
    return total.div_(len(tensors)) if op == dist.ReduceOp.AVG else total


def abort(own: Process, group: Any = None) -> None:
    """Release the kernels of a process; its works fail from now on."""
    own.own["disturbed"] = True
    for of, kernel in own.own.get("nccl kernels", []):
        if (group is None or of is group) and not kernel.over:
            kernel.aborted = True
            if kernel.started:
                kernel.started = False  # so that the scheduler takes it off
