"""How a rank runs the cells of the grid; and the oracle: every rank knows what all ranks contribute, and adds it up naively."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.world.grid import Cell

import phalanx
from phalanx import schedule as schedules
from phalanx.schedule import Move, Schedule, Step


def wrong_cells(comm: Any, cells: Sequence[Cell]) -> list[str]:
    """The cells whose result is not what the oracle says, on this rank."""
    return [f"{cell} on rank {comm.rank} of {comm.size}" for cell in cells if not is_right(comm, cell)]


def is_right(comm: Any, cell: Cell) -> bool:
    verb, _, name = cell.verb.partition(" ")
    if verb == "run":
        return _run(comm, cell, _schedule(name, comm.size, cell.count))
    return RUNNERS[cell.verb](comm, cell)


# ---- the numbers ---------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _waves(length: int) -> torch.Tensor:
    i = torch.arange(length, dtype=torch.int32)
    return ((i + i // 127) % 11).to(torch.int16)  # no power of two is a period of it: what ends in the wrong place is seen


@functools.lru_cache(maxsize=24)
def _pattern(shift: int, length: int, *, truths: bool) -> torch.Tensor:
    x = _waves(length) + shift
    x = torch.where(x < 11, x, x - 11)  # modulo 11, but five times as fast
    return (x & 3 == shift & 3).to(torch.int16) if truths else x


def numbers(cell: Cell, rank: int, count: int | None = None) -> torch.Tensor:
    """What `rank` contributes, as int16: 0 to 10, different at every place and on every rank; truths for bool."""
    count = cell.count if count is None else count
    length = 1 << max(21, count.bit_length())  # one pattern for all sizes but the largest
    return _pattern(3 * rank % 11, length, truths=cell.dtype == "bool")[:count]


def tensor(cell: Cell, rank: int, count: int | None = None, times: int = 1) -> torch.Tensor:
    return (numbers(cell, rank, count) * times).to(_dtype(cell))


@functools.lru_cache(maxsize=2)  # ranks that are threads ask for the same
def reduced(cell: Cell, size: int, count: int | None = None) -> torch.Tensor:
    """The oracle of reductions; a mean is of `size` times the numbers."""
    whole = [numbers(cell, rank, count) for rank in range(size)]
    total = functools.reduce({"max": torch.maximum, "min": torch.minimum}.get(cell.op, torch.add), whole)
    return total.to(_dtype(cell))


def _dtype(cell: Cell) -> torch.dtype:
    return getattr(torch, cell.dtype)


def _equal(x: torch.Tensor, wanted: torch.Tensor) -> bool:
    return x.dtype is wanted.dtype and x.shape == wanted.shape and torch.equal(x, wanted)


# ---- the verbs -----------------------------------------------------------------------------------------------------------------


def _all_reduce(comm: Any, cell: Cell) -> bool:
    x = tensor(cell, comm.rank, times=comm.size if cell.op == "mean" else 1)
    return comm.all_reduce(x, cell.op) is x and _equal(x, reduced(cell, comm.size))


def _all_reduce_async(comm: Any, cell: Cell) -> bool:
    """Two at a time, waited for in the other order."""
    counts = (cell.count, max(0, cell.count - 1))
    times = comm.size if cell.op == "mean" else 1
    flights = [comm.all_reduce_async(tensor(cell, comm.rank, count, times), cell.op) for count in counts]
    landed = [_equal(flight.wait(), reduced(cell, comm.size, count)) for flight, count in reversed([*zip(flights, counts)])]
    return all(landed)


def _all_reduce_buffer(comm: Any, cell: Cell) -> bool:
    x = comm.buffer(cell.count, _dtype(cell))
    x.copy_(tensor(cell, comm.rank, times=comm.size if cell.op == "mean" else 1))
    return _equal(comm.all_reduce(x, cell.op), reduced(cell, comm.size))


def _reduce_scatter(comm: Any, cell: Cell) -> bool:
    """Of a whole number of elements per rank; as a matrix where that number is odd."""
    n = comm.size
    per_rank = cell.count // n
    x = tensor(cell, comm.rank, per_rank * n, n if cell.op == "mean" else 1)
    kept = x.clone()
    shape = (n, per_rank) if per_rank % 2 else (n * per_rank,)
    part = comm.reduce_scatter(x.view(shape), cell.op)
    wanted = reduced(cell, n, per_rank * n)[comm.rank * per_rank : (comm.rank + 1) * per_rank]
    return torch.equal(x, kept) and _equal(part, wanted.view(1, per_rank) if len(shape) == 2 else wanted)


def _bcast(comm: Any, cell: Cell) -> bool:
    root = cell.count % comm.size
    mine = tensor(cell, comm.rank)
    offered = comm.rank == root or (cell.count + comm.rank) % 3 > 0  # some pass a tensor to be filled, others None
    got = comm.bcast(mine if offered else None, root)
    return _equal(got, tensor(cell, root)) and (not offered or got is mine)


def _gather(comm: Any, cell: Cell) -> bool:
    root = cell.count % comm.size
    got = comm.gather(tensor(cell, comm.rank, cell.count + comm.rank), root)
    if comm.rank != root:
        return got is None
    return all(_equal(x, tensor(cell, rank, cell.count + rank)) for rank, x in enumerate(got))


def _allgather(comm: Any, cell: Cell) -> bool:
    got = comm.allgather(tensor(cell, comm.rank, cell.count + comm.rank))
    return all(_equal(x, tensor(cell, rank, cell.count + rank)) for rank, x in enumerate(got))


def _scatter(comm: Any, cell: Cell) -> bool:
    root = cell.count % comm.size
    xs = [tensor(cell, root + to, cell.count + to) for to in range(comm.size)]
    return _equal(comm.scatter(xs if comm.rank == root else None, root), xs[comm.rank])


def _alltoall(comm: Any, cell: Cell) -> bool:
    n, r = comm.size, comm.rank
    got = comm.alltoall([tensor(cell, r + 2 * to, cell.count + to) for to in range(n)])
    return all(_equal(x, tensor(cell, source + 2 * r, cell.count + r)) for source, x in enumerate(got))


def _send(comm: Any, cell: Cell) -> bool:
    """Around the ring, rank 0 first."""
    n, r = comm.size, comm.rank
    if n == 1:
        return True
    if r == 0:
        comm.send(tensor(cell, r), 1)
    got = comm.recv((r - 1) % n)
    if r != 0:
        comm.send(tensor(cell, r), (r + 1) % n)
    return _equal(got, tensor(cell, (r - 1) % n))


def _exchange(comm: Any, cell: Cell) -> bool:
    n, r = comm.size, comm.rank
    if n == 1:
        return True
    source = (r - 1) % n
    out = torch.zeros(cell.count + source, dtype=_dtype(cell))
    pending = comm.exchange_async(tensor(cell, r, cell.count + r), (r + 1) % n, out, source)
    return _equal(pending.wait(), tensor(cell, source, cell.count + source))


def _barrier(comm: Any, cell: Cell) -> bool:
    return comm.barrier() is None


RUNNERS: dict[str, Callable[[Any, Cell], bool]] = {
    "all_reduce": _all_reduce,
    "all_reduce_async": _all_reduce_async,
    "all_reduce in a buffer": _all_reduce_buffer,
    "reduce_scatter": _reduce_scatter,
    "bcast": _bcast,
    "gather": _gather,
    "allgather": _allgather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "send": _send,
    "exchange_async": _exchange,
    "barrier": _barrier,
}


# ---- schedules -----------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _schedule(name: str, n: int, count: int) -> Schedule:
    rows = max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0)
    if name in ("torus", "hierarchical"):
        return getattr(phalanx, name)(rows, n // rows)
    if name in ("binomial", "scatter_gather"):
        return getattr(schedules, name)(n, count % n)
    if name == "gossip":
        return schedules.gossip(n, count % 5)
    if name == "gossip_hypercube":
        return schedules.gossip(n, count % 5, "hypercube")
    if name == "mixing":  # rank 0 exchanges chunk 1 with rank 1, and chunk 2 with the last one
        pairs = [(a, b, range(c, c + 1)) for c, other in ((1, 1 % n), (2, n - 1)) for a, b in ((0, other), (other, 0)) if other]
        return Schedule("mixing", n, 3, (Step(tuple(Move(*pair) for pair in pairs)),) if pairs else (), goal="mixing")
    return getattr(schedules, name)(n)


def _run(comm: Any, cell: Cell, schedule: Schedule) -> bool:
    n, r = comm.size, comm.rank
    x = tensor(cell, r, times=2 if "gossip" in schedule.name else 1)
    if "gossip" in schedule.name:
        to = schedules.gossip_partners(n, cell.count % 5, "hypercube" if "hypercube" in schedule.name else "dissemination")
        wanted = tensor(cell, r, times=2)
        if r in to:
            wanted = tensor(cell, r) + tensor(cell, to.index(r))
    elif schedule.name == "mixing":
        wanted = tensor(cell, r)
        for move in schedule.ops():
            if move.dst == r:
                first, last = move.chunks.start * cell.count // 3, move.chunks.stop * cell.count // 3
                wanted[first:last] = tensor(cell, move.src)[first:last]
    else:
        wanted = tensor(cell, schedule.root) if schedule.goal == "copy" else reduced(cell, n)
    return comm.run(schedule, x) is x and _equal(x, wanted)
