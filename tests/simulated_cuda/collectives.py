"""Collectives and messages of torch.distributed: device tensors meet in NCCL, host tensors in gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.simulated_cuda import gloo, nccl
from tests.simulated_cuda.groups import group_of, log
from tests.simulated_cuda.simulation import process
from tests.simulated_cuda.tensor import CudaTensor

Run = Callable[[dict[int, Sequence[torch.Tensor]]], None]


def _collective(kind: str, group: Any, reads: Sequence[Any], writes: Sequence[Any], call: Any, run: Run, async_op: bool) -> Any:
    """`reads` and `writes` of the calling rank; `run` gets all ranks' tensors: first what they read, then what they write."""
    group, own = group_of(group), process()
    tensors = [*reads, *writes]
    log(f"{kind} {group.name} {call}")
    if not isinstance(tensors[0], CudaTensor):
        return gloo.collective(group, kind, call, tensors, run, async_op)
    number = group.number("nccl", own.rank)
    meeting = group.meetings.setdefault(("nccl", number), nccl.Meeting(group.ranks, run))
    part = meeting.join(own.rank, [x.raw for x in tensors], (kind, *call), f"{group}, operation {number}")
    only_read = [x for x in reads if not any(x is y for y in writes)]
    work = nccl.enqueue(group, group.name, f"{kind} #{number} of {group}", [part], only_read, writes)
    if async_op:
        return work
    work.wait()
    return None


def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    def run(tensors: dict[int, Any]) -> None:
        total = nccl.reduced([tensors[rank][0] for rank in ranks], op)
        for (x,) in tensors.values():
            x.copy_(total)

    ranks = group_of(group).ranks
    return _collective("all_reduce", group, [], [tensor], (tensor.numel(), tensor.dtype, str(op)), run, async_op)


def reduce_scatter_tensor(output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:  # noqa: A002
    def run(tensors: dict[int, Any]) -> None:
        total = nccl.reduced([tensors[rank][0] for rank in ranks], op).view(-1)
        for x, part in zip((tensors[rank][1] for rank in ranks), total.chunk(len(ranks))):
            x.copy_(part.view(x.shape))

    ranks = group_of(group).ranks
    _check_sizes("reduce_scatter", input, output, len(ranks))
    return _collective("reduce_scatter", group, [input], [output], (input.numel(), input.dtype, str(op)), run, async_op)


def all_gather_into_tensor(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    def run(tensors: dict[int, Any]) -> None:
        whole = torch.cat([tensors[rank][0].reshape(-1) for rank in ranks])
        for _, x in tensors.values():
            x.copy_(whole.view(x.shape))

    ranks = group_of(group).ranks
    _check_sizes("all_gather", output_tensor, input_tensor, len(ranks))
    call = (input_tensor.numel(), input_tensor.dtype)
    return _collective("all_gather", group, [input_tensor], [output_tensor], call, run, async_op)


def reduce(tensor: Any, dst: int, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    def run(tensors: dict[int, Any]) -> None:
        tensors[dst][0].copy_(nccl.reduced([tensors[rank][0] for rank in ranks], op))

    ranks = group_of(group).ranks
    return _collective("reduce", group, [], [tensor], (dst, tensor.numel(), tensor.dtype, str(op)), run, async_op)


def broadcast(tensor: Any, src: int, group: Any = None, async_op: bool = False) -> Any:
    def run(tensors: dict[int, Any]) -> None:
        for (x,) in tensors.values():
            if x is not tensors[src][0]:
                x.copy_(tensors[src][0])

    return _collective("broadcast", group, [], [tensor], (src, tensor.numel(), tensor.dtype), run, async_op)


def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    def run(tensors: dict[int, Any]) -> None:
        for _, *outs in tensors.values():
            for rank, out in zip(ranks, outs):
                out.copy_(tensors[rank][0])

    ranks = group_of(group).ranks
    return _collective("all_gather", group, [tensor], list(tensor_list), (tensor.numel(), tensor.dtype), run, async_op)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """With NCCL: an all-reduce on the current device, and the host waits."""
    x = torch.zeros(1, device="cuda")
    all_reduce(x, group=group)
    torch.cuda.current_stream().synchronize()


def _check_sizes(kind: str, whole: Any, part: Any, ranks: int) -> None:
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise ValueError(f"{kind}: {part.numel()} elements on each of {ranks} ranks do not make {whole.numel()}")


# ---- messages -----------------------------------------------------------------------------------------------------------------


class P2POp:
    """One send or receive of a batch."""

    def __init__(
        self, op: Any, tensor: Any, peer: int | None = None, group: Any = None, tag: int = 0, group_peer: Any = None
    ) -> None:
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag


def isend(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> Any:
    if not isinstance(tensor, CudaTensor):
        return gloo.send(group_of(group), process().rank, dst, tag, tensor)
    return _p2p([P2POp(isend, tensor, dst, group)], f"pair {sorted((process().rank, dst))}")  # type: ignore[type-var]


def irecv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> Any:
    if not isinstance(tensor, CudaTensor):
        return gloo.receive(group_of(group), src, process().rank, tag, tensor)
    return _p2p([P2POp(irecv, tensor, src, group)], f"pair {sorted((process().rank, src))}")  # type: ignore[type-var]


def send(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0) -> None:
    isend(tensor, dst, group, tag).wait()


def recv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0) -> None:
    irecv(tensor, src, group, tag).wait()


def batch_isend_irecv(ops: Sequence[P2POp]) -> list[Any]:
    if isinstance(ops[0].tensor, CudaTensor):
        return [_p2p(ops, group_of(ops[0].group).name)]
    return [one.op(one.tensor, one.peer, one.group, one.tag) for one in ops]


def _p2p(ops: Sequence[P2POp], key: str) -> Any:
    """One kernel; a pair's messages meet in the order in which they were posted."""
    own, group = process(), group_of(ops[0].group)
    parts, reads, writes = [], [], []
    for one in ops:
        sends = one.op is isend
        (reads if sends else writes).append(one.tensor)
        pair = (own.rank, one.peer) if sends else (one.peer, own.rank)
        number = group.number(f"pair {pair} {key if key.startswith('pair') else 'batch'}", own.rank)
        meeting = group.meetings.setdefault((f"pair {pair} {key}", number), nccl.Meeting(pair, _deliver(pair)))  # type: ignore[arg-type]
        call = (one.tensor.numel(), one.tensor.dtype)
        parts.append(meeting.join(own.rank, [one.tensor.raw], call, f"message {number} from rank {pair[0]} to rank {pair[1]}"))
    log(f"p2p {key} " + ", ".join(f"{'to' if o.op is isend else 'from'} {o.peer}" for o in ops))
    return nccl.enqueue(group, key, f"send/recv of {group}", parts, reads, writes)


def _deliver(pair: Any) -> Run:
    def run(tensors: dict[int, Any]) -> None:
        source, dest = pair
        tensors[dest][0].copy_(tensors[source][0].view(tensors[dest][0].shape))

    return run
