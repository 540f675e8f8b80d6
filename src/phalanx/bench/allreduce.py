"""`phalanx bench allreduce` inside a rank: contenders in turns on the same data, exact results, one row per contender and size.

Inputs repeat every PERIOD elements, so the exact sum is known for any count and world. Values and sums are whole numbers below
2**24, which float32 holds exactly. Timed calls sum zeros, because other numbers would grow without bound. All data is in host
memory, even with GPUs; `phalanx selftest` measures those.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

import phalanx
from phalanx.bench.config import AllReduceBench
from phalanx.bench.cores import are_crowded, core_now
from phalanx.bench.library import library_all_reduce
from phalanx.bench.record import Company, Record, first_record
from phalanx.bench.stopwatch import Stopwatch
from phalanx.comm.communicator import Communicator
from phalanx.comm.launch import discover
from phalanx.schedule import Schedule
from phalanx.schedule.names import find_schedule

PERIOD = 251  # a prime: no chunk boundary falls on it, so swapped chunks give a wrong sum
BLOCK = 0.02  # seconds of one timed block: a single call of 2 us is too short to time
MOST_CALLS = 10_000
Contender = tuple[str, torch.Tensor, Callable[[torch.Tensor], object]]


def measure(bench: AllReduceBench, launcher: str) -> Iterator[Record]:
    """Yield the records of the benchmark, the same on all ranks."""
    torch.set_num_threads(1)
    with phalanx.create_communicator() as comm:
        bench.check(comm.size)
        company = Company()
        yield first_record(bench, comm, launcher)
        contenders = list(enter(comm, [find_schedule(text) for text in bench.algorithms], bench.largest // 4))
        for size in bench.sizes():
            yield from measure_size(comm, contenders, size, bench.repeat)
        yield company.last_record(comm)


def enter(comm: Communicator, chosen: list[Schedule], count: int) -> Iterator[Contender]:
    """Yield name, memory and call of each contender."""
    ordinary = torch.zeros(count)
    yield "phalanx buffer", comm.buffer(count), comm.all_reduce
    yield "phalanx tensor", ordinary, comm.all_reduce
    for schedule in chosen:
        yield f"phalanx {schedule.name}", comm.buffer(count), partial(comm.run, schedule)
    yield "gloo", ordinary, library_all_reduce
    if mpi := _mpi(comm.size):
        name, call = mpi
        yield name, ordinary, call


def _mpi(size: int) -> tuple[str, Callable[[torch.Tensor], object]] | None:
    """The MPI library whose mpirun started this rank, if mpi4py is installed."""
    if not discover().how.startswith("mpirun"):
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # RuntimeError: mpi4py found no library
        return None
    if size != MPI.COMM_WORLD.size:  # mpi4py was built for an MPI other than the one that started us, so every rank is alone
        return None
    return MPI.get_vendor()[0], lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())


def measure_size(comm: Communicator, contenders: list[Contender], size: int, rounds: int) -> Iterator[Record]:
    """The rows of one size."""
    count = size // 4
    work = [(name, memory[:count], call) for name, memory, call in contenders]
    wrong = [count_wrong(comm, x, call) for _, x, call in work]
    calls = []
    for _, x, call in work:
        x.zero_()
        seconds_of(comm, x, call, 2)
        slowest = max(comm.allgather_obj(seconds_of(comm, x, call, 3)))
        calls.append(max(1, min(MOST_CALLS, int(BLOCK / slowest))))
    mine = [[(seconds_of(comm, x, call, n), core_now()) for (_, x, call), n in zip(work, calls)] for _ in range(rounds)]
    hosts = comm.allgather_obj(comm.inter_rank)
    ranks = comm.allgather_obj(mine)
    times = [[max(own[k][i][0] for own in ranks) for k in range(rounds)] for i in range(len(work))]
    crowded = [
        statistics.mean(are_crowded([(host, own[k][i][1]) for host, own in zip(hosts, ranks)]) for k in range(rounds))
        for i in range(len(work))
    ]
    wrong = [sum(comm.allgather_obj(before + count_wrong(comm, x, call))) for before, (_, x, call) in zip(wrong, work)]
    names = [name for name, _, _ in work]
    gloo = statistics.median(times[names.index("gloo")])
    for i, name in enumerate(names):
        median = statistics.median(times[i])
        yield {
            "contender": name,
            "size": size,
            "count": count,
            "type": "float",
            "redop": "sum",
            "time_us": median * 1e6,
            "algbw": size / median / 1e9,
            "busbw": size / median / 1e9 * 2 * (comm.size - 1) / comm.size,
            "wrong": wrong[i],
            "crowded": crowded[i],
            "times_gloo": gloo / median,
            "calls_per_round": calls[i],
            "times_us": [round(seconds * 1e6, 3) for seconds in times[i]],
        }


def seconds_of(comm: Communicator, x: torch.Tensor, call: Callable[[torch.Tensor], object], calls: int) -> float:
    """Seconds of one call on this rank. All ranks start together."""
    comm.barrier()
    watch = Stopwatch(x.device)
    for _ in range(calls):
        call(x)
    return watch.seconds() / calls


def count_wrong(comm: Communicator, x: torch.Tensor, call: Callable[[torch.Tensor], object]) -> int:
    """Count the elements that an all-reduce of known numbers gets wrong on this rank."""
    x.copy_(_repeated(inputs(comm.rank), x.numel()))
    comm.barrier()
    call(x)
    return int((x != _repeated([sum(values) for values in zip(*map(inputs, range(comm.size)))], x.numel())).sum())


def inputs(rank: int) -> list[int]:
    """One period of what `rank` contributes: the same numbers in another order on every rank."""
    return [(rank + 1) * (i + 1) ** 2 % PERIOD for i in range(PERIOD)]


def _repeated(period: list[int], count: int) -> torch.Tensor:
    return torch.tensor(period, dtype=torch.float32).repeat(-(-count // PERIOD))[:count]
