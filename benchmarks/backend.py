"""All-reduces of the backend "phalanx" against gloo's, and against the communicator's, on ranks of this machine.

    python -m benchmarks.backend [--ranks 2] [--repeat 15] [--sizes 65536,1048576] [--json FILE]

Microseconds of one float32 all-reduce by `comm.all_reduce`, by `dist.all_reduce` on a group of each backend, by the group itself
(`phalanx group`: without the Python of torch.distributed), and of the asynchronous calls. Contenders take turns in one run. A row
has the median over the turns and the fastest turn of the slowest rank. `times_gloo` is the median over the turns of gloo's time
by this one's in the same turn. Training steps: steps.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.local_ranks import finish, started

import phalanx
from phalanx.backend import register

SIZES = (1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)  # bytes; DDP's buckets have 25 MiB

Times = dict[str, list[float]]


def turns(comm: phalanx.Communicator, contenders: dict[str, Callable[[], Any]], repeat: int, calls: int) -> Times:
    """Seconds per call of every contender in each turn, of the slowest rank."""
    mine: Times = {name: [] for name in contenders}
    for _ in range(repeat + 1):
        for name, call in contenders.items():
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            mine[name].append((time.perf_counter() - begin) / calls)
    every = comm.allgather_obj(mine)
    return {name: [max(turn) for turn in zip(*(own[name] for own in every))][1:] for name in contenders}  # the first warms up


def all_reduces(comm: phalanx.Communicator, ours: Any, gloo: Any, nbytes: int, repeat: int) -> Times:
    x, add = torch.zeros(nbytes // 4), dist.ReduceOp.SUM  # zeros: their sum stays what it is
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = add, False
    contenders: dict[str, Callable[[], Any]] = {
        "comm": lambda: comm.all_reduce(x, "sum"),
        "phalanx": lambda: dist.all_reduce(x, add, group=ours),
        "phalanx group": lambda: ours.allreduce([x], options),
        "gloo": lambda: dist.all_reduce(x, add, group=gloo),
        "comm async": lambda: comm.all_reduce_async(x, "sum").wait(),
        "phalanx async": lambda: dist.all_reduce(x, add, group=ours, async_op=True).wait(),
        "gloo async": lambda: dist.all_reduce(x, add, group=gloo, async_op=True).wait(),
    }
    return turns(comm, contenders, repeat, max(1, min(100, (4 << 20) // nbytes)))


# ---- a rank, and what starts them --------------------------------------------------------------------------------------------


def rank(args: argparse.Namespace) -> None:
    register()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # vanishing gradients would slow some contenders more than others
    with phalanx.create_communicator() as comm:
        ours, gloo = dist.new_group(backend="phalanx"), dist.new_group(backend="gloo")
        rows = list(measure(args, comm, ours, gloo))
        if comm.rank == 0:
            print(json.dumps(rows), flush=True)
        comm.barrier()
        dist.destroy_process_group(ours)
        dist.destroy_process_group(gloo)


def measure(args: argparse.Namespace, comm: phalanx.Communicator, ours: Any, gloo: Any) -> Iterator[dict[str, Any]]:
    for nbytes in args.sizes:
        yield from rows_of(all_reduces(comm, ours, gloo, nbytes, args.repeat), kind="allreduce", bytes=nbytes)


def rows_of(times: Times, **what: Any) -> Iterator[dict[str, Any]]:
    for name, own in times.items():
        faster = statistics.median(g / t for g, t in zip(times["gloo"], own))
        numbers = {"us": round(1e6 * statistics.median(own), 2), "us_min": round(1e6 * min(own), 2)}
        yield {**what, "contender": name, **numbers, "times_gloo": round(faster, 3)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--sizes", type=numbers, default=list(SIZES), help="bytes of all-reduces")
    parser.add_argument("--json", type=Path, help="append the records to this file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    args = parse()
    if args.rank:
        rank(args)
        return
    command = [sys.executable, "-m", "benchmarks.backend", "--rank", *sys.argv[1:]]
    with started(command, args.ranks) as ranks:
        said = finish(ranks, deadline=900)[0]
    run = {
        "kind": "run",
        "ranks": args.ranks,
        "repeat": args.repeat,
        "cores": os.cpu_count(),
        "processor": platform.processor(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
    }
    records = [run, *json.loads(said.strip().splitlines()[-1])]
    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
