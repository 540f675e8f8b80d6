"""Every verb of a communicator, as generators of results: the same on the CPU and on a GPU.

The tensors are made and dropped on the way, so that memory is reused while communication is queued.
"""

from __future__ import annotations

import torch
from tests.simulated_cuda.simulation import process

import phalanx


def numbers(comm, device, count=6, dtype=torch.float32):
    """Whole numbers that differ between ranks."""
    return (torch.arange(count, device=device) * 3 + comm.rank).to(dtype)


def reductions(comm, device):
    yield comm.all_reduce(numbers(comm, device))
    for op in ("sum", "max", "min", "mean"):
        yield comm.all_reduce(numbers(comm, device) * comm.size, op)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8):
        yield comm.all_reduce(numbers(comm, device, 5, dtype))
    yield comm.all_reduce(numbers(comm, device, 12).view(3, 4).t())  # not contiguous
    yield comm.all_reduce(numbers(comm, device, 12)[::3])
    yield comm.all_reduce(numbers(comm, device, 1).view(()))
    yield comm.all_reduce(torch.empty(0, device=device))
    yield comm.reduce_scatter(numbers(comm, device, 4 * comm.size))
    pending = [comm.all_reduce_async(numbers(comm, device, n)) for n in (3, 1000, 7)]
    yield from (x.wait() for x in pending)
    x = numbers(comm, device, 8 * comm.size)
    yield comm.run(phalanx.ring(comm.size), x)
    comm.barrier()


def messages(comm, device):
    last = comm.size - 1
    yield comm.bcast(numbers(comm, device), 0)
    yield comm.bcast(numbers(comm, device, 40_000) if comm.rank == last else None, last)
    yield from comm.allgather(numbers(comm, device, 2 + comm.rank))
    yield from comm.gather(numbers(comm, device), last) or []
    yield comm.scatter([numbers(comm, device, i + 1) for i in range(comm.size)] if comm.rank == 0 else None, 0)
    yield from comm.alltoall([numbers(comm, device, i) for i in range(comm.size)])
    if comm.rank == 0:
        comm.send(numbers(comm, device, 9), last, 5)
    elif comm.rank == last:
        yield comm.recv(0, 5)
    out = torch.empty(6, device=device)
    comm.exchange_async(numbers(comm, device), (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size, 3).wait()
    yield out


def objects(comm, device):
    yield torch.tensor(comm.allgather_obj(comm.rank))
    yield torch.tensor(comm.allreduce_obj(comm.rank + 1))
    yield torch.tensor(comm.bcast_obj([1, 2] if comm.rank == 0 else None))
    part = comm.split(comm.rank % 2, -comm.rank)
    yield part.all_reduce(numbers(comm, device))
    part.close()


def side_stream(comm, device):
    """The caller computes on a stream of its own."""
    if device == "cpu":
        yield comm.all_reduce(numbers(comm, device).mul_(2)) + 1
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = comm.all_reduce(numbers(comm, device).mul_(2)) + 1
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream())
    yield x


VERBS = {"reductions": reductions, "messages": messages, "objects": objects, "side stream": side_stream}


def play(comm, verbs, device):
    found = []
    for x in verbs(comm, device):
        assert x.device.type in ("cpu", device)
        found.append(x.detach().clone())
    return [x.cpu().tolist() for x in found], sorted(process().contexts) if device == "cuda" else []
