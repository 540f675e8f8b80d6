"""Random communication for as long as you like: every result is checked, and nothing may grow.

    python benchmarks/soak.py [--seconds 60] [--ranks 4] [--seed 1]
    python benchmarks/lab.py --hosts 2 --per-host 2 -- python benchmarks/soak.py --seconds 300

Each round draws, with a seed that all ranks share, a communicator (the world, a split of it, or one just made) and some verbs,
sizes, dtypes, ops and roots. The numbers are whole and small, so every result is exact. Rank 0 prints what each rank has at the
beginning, after the warm-up, and at the end: open files, threads, segments, resident memory. The exit code is 1 if a result was
wrong, or if more files, threads or segments are there than after the warm-up, or 5 % more memory.

A rank starts itself again with one malloc arena and a fixed mmap threshold. With glibc's defaults, threads scatter large messages
over many arenas, whose holes grow by 4 to 11 % within minutes and hide whether anything leaks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from local_ranks import lines_of, started

import phalanx

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
WARM = 0.5  # of the time: scratch grows to the largest message, allocators to what they need
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
GROWTH = 1.05  # of resident memory after the warm-up


def belongings() -> dict[str, int]:
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc: holes in its heaps are no leak
        ctypes.CDLL(None).malloc_trim(0)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "segments": len(list(Path("/dev/shm").glob(f"phalanx-{os.getpid()}-*"))),
        "rss_kib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


# ---- one operation: what it returned, and what it should have ----------------------------------------------------------------


def drawn(draw: random.Random) -> tuple[torch.dtype, int]:
    """A dtype and a number of elements: mostly few, sometimes up to 4 MiB."""
    dtype = draw.choice(DTYPES)
    return dtype, int(2 ** draw.uniform(0, draw.choice((8, 14, 22)))) // dtype.itemsize + 1


def numbers(rank: int, count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int32) + 3 * rank) % 11


def total(comm: Any, count: int, op: str) -> torch.Tensor:
    whole = torch.stack([numbers(rank, count) for rank in range(comm.size)])
    return {"sum": whole.sum(0), "max": whole.amax(0), "min": whole.amin(0)}[op]


def all_reduce(comm: Any, draw: random.Random) -> bool:
    (dtype, count), op, kind = drawn(draw), draw.choice(("sum", "max", "min")), draw.randrange(3)
    mine = numbers(comm.rank, count).to(dtype)
    if kind == 2:
        x = comm.buffer(count, dtype).copy_(mine)
        return torch.equal(comm.all_reduce(x, op), total(comm, count, op).to(dtype))
    got = comm.all_reduce_async(mine, op, label="soak").wait() if kind else comm.all_reduce(mine, op)
    return torch.equal(got, total(comm, count, op).to(dtype))


def reduce_scatter(comm: Any, draw: random.Random) -> bool:
    dtype, count = drawn(draw)
    count = -(-count // comm.size) * comm.size
    got = comm.reduce_scatter(numbers(comm.rank, count).to(dtype))
    return torch.equal(got, total(comm, count, "sum").to(dtype).chunk(comm.size)[comm.rank])


def bcast(comm: Any, draw: random.Random) -> bool:
    (dtype, count), root = drawn(draw), draw.randrange(comm.size)
    return torch.equal(comm.bcast(numbers(comm.rank, count).to(dtype), root), numbers(root, count).to(dtype))


def allgather(comm: Any, draw: random.Random) -> bool:
    dtype, count = drawn(draw)
    got = comm.allgather(numbers(comm.rank, count + comm.rank).to(dtype))
    return all(torch.equal(x, numbers(rank, count + rank).to(dtype)) for rank, x in enumerate(got))


def gather_and_scatter(comm: Any, draw: random.Random) -> bool:
    (dtype, count), root = drawn(draw), draw.randrange(comm.size)
    xs = comm.gather(numbers(comm.rank, count).to(dtype), root)
    return torch.equal(comm.scatter(xs, root), numbers(comm.rank, count).to(dtype))


def alltoall(comm: Any, draw: random.Random) -> bool:
    dtype, count = drawn(draw)
    got = comm.alltoall([numbers(comm.rank + 2 * to, count).to(dtype) for to in range(comm.size)])
    return all(torch.equal(x, numbers(rank + 2 * comm.rank, count).to(dtype)) for rank, x in enumerate(got))


def exchange(comm: Any, draw: random.Random) -> bool:
    (dtype, count), n, r = drawn(draw), comm.size, comm.rank
    if n == 1:
        return True
    out = torch.empty(count, dtype=dtype)
    pending = comm.exchange_async(numbers(r, count).to(dtype), (r + 1) % n, out, (r - 1) % n)
    return torch.equal(pending.wait(), numbers((r - 1) % n, count).to(dtype))


def objects(comm: Any, draw: random.Random) -> bool:
    root, text = draw.randrange(comm.size), "x" * draw.randrange(2000)
    told = comm.bcast_obj({"text": text, "root": root} if comm.rank == root else None, root)
    return told == {"text": text, "root": root} and comm.allgather_obj(comm.rank) == list(range(comm.size))


def meet(comm: Any, draw: random.Random) -> bool:
    return comm.barrier() is None


VERBS: tuple[Callable[[Any, random.Random], bool], ...] = (
    all_reduce, all_reduce, reduce_scatter, bcast, allgather, gather_and_scatter, alltoall, exchange, objects, meet,
)  # fmt: skip


# ---- a rank --------------------------------------------------------------------------------------------------------------------


def round_of(comm: Any, draw: random.Random) -> list[str]:
    """A few operations on one communicator; the verbs that were wrong."""
    place, colours = draw.randrange(6), [draw.randrange(2) for _ in range(comm.size)]
    seed = draw.random()
    if place == 0:
        with phalanx.create_communicator(timeout=60) as made:
            return several(made, seed)
    if place <= 2:
        child = comm.split(colours[comm.rank])
        wrong = several(child, seed)
        if place == 1:
            child.close()  # the other is dropped
        return wrong
    return several(comm, seed)


def several(comm: Any, seed: float) -> list[str]:
    draw = random.Random(seed)
    verbs = [draw.choice(VERBS) for _ in range(8)]
    return [f"{verb.__name__} on {comm}" for verb in verbs if not verb(comm, draw)]


def soak(seconds: float, seed: int) -> int:
    torch.set_num_threads(1)
    draw = random.Random(seed)
    wrong: list[str] = []
    marks: dict[str, dict[str, int]] = {}
    with phalanx.create_communicator(timeout=60) as comm:
        begun, rounds = time.monotonic(), 0
        while True:
            spent = int(comm.bcast_obj(time.monotonic() - begun) * 1000) / 1000
            for name, at in (("begin", 0.0), ("warm", WARM * seconds), ("end", seconds)):
                if spent >= at and name not in marks:
                    comm.buffer(1)  # the one before it is given back only now
                    comm.barrier()
                    marks[name] = belongings()
                    comm.barrier()
            if "end" in marks:
                break
            wrong += round_of(comm, draw)
            rounds += 1
        everywhere = comm.allgather_obj([marks, wrong[:20]])
    grown = [
        f"rank {rank}: {name} {them['warm'][name]} -> {them['end'][name]}"
        for rank, (them, _) in enumerate(everywhere)
        for name in them["end"]
        if them["end"][name] > them["warm"][name] * (GROWTH if name == "rss_kib" else 1)
    ]
    failed = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(everywhere) for text in texts]
    if comm.rank == 0:
        print(json.dumps({"what": "soak", "ranks": comm.size, "hosts": comm.inter_size, "seconds": seconds, "rounds": rounds}))
        for rank, (them, _) in enumerate(everywhere):
            print(json.dumps({"rank": rank, **them}))
        print(json.dumps({"wrong": failed, "grown": grown}))
    return 1 if failed or grown else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=4, help="ranks to start, where no launcher has")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if "RANK" in os.environ:
        if any(name not in os.environ for name in MALLOC):
            os.execve(sys.executable, [sys.executable, *sys.argv], {**MALLOC, **os.environ})
        return soak(args.seconds, args.seed)
    command = [sys.executable, __file__, "--seconds", str(args.seconds), "--seed", str(args.seed)]
    with started(command, args.ranks) as ranks:
        for line in lines_of(ranks[0], deadline=args.seconds + 120):
            print(line, flush=True)
        return max(rank.wait(timeout=60) != 0 for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
