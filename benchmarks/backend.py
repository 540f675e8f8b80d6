"""The backend "phalanx" against gloo, and against the communicator that it is made of, on ranks of this machine.

    python benchmarks/backend.py [--ranks 2] [--repeat 15] [--batch 2] [--pixels 64] [--json FILE]

`allreduce` rows: microseconds of one float32 all-reduce by `comm.all_reduce`, by `dist.all_reduce` on a group of each backend,
and of the asynchronous calls. `ddp` rows: milliseconds of one step of ResNet-50 in DistributedDataParallel, where only the
process group differs. Contenders take turns in one run. A row has the median over the turns and the fastest turn, of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.local_ranks import finish, started

import phalanx
from phalanx.backend import register

SIZES = (1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)  # bytes; DDP's buckets have 25 MiB


def turns(comm: phalanx.Communicator, contenders: dict[str, Callable[[], Any]], repeat: int, calls: int) -> dict[str, Any]:
    """Seconds per call of every contender in each turn."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeat + 1):
        for name, call in contenders.items():
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - begin) / calls)
    return {name: each[1:] for name, each in times.items()}  # the first turn warms up


def all_reduces(comm: phalanx.Communicator, ours: Any, gloo: Any, nbytes: int, repeat: int) -> dict[str, list[float]]:
    x, largest = torch.ones(nbytes // 4), dist.ReduceOp.MAX  # the maximum stays what it is
    contenders: dict[str, Callable[[], Any]] = {
        "comm": lambda: comm.all_reduce(x, "max"),
        "phalanx": lambda: dist.all_reduce(x, largest, group=ours),
        "gloo": lambda: dist.all_reduce(x, largest, group=gloo),
        "comm async": lambda: comm.all_reduce_async(x, "max").wait(),
        "phalanx async": lambda: dist.all_reduce(x, largest, group=ours, async_op=True).wait(),
        "gloo async": lambda: dist.all_reduce(x, largest, group=gloo, async_op=True).wait(),
    }
    return turns(comm, contenders, repeat, max(1, min(100, (4 << 20) // nbytes)))


def steps(comm: phalanx.Communicator, groups: dict[str, Any], batch: int, pixels: int, repeat: int) -> dict[str, list[float]]:
    torch.manual_seed(comm.rank)
    x, y = torch.randn(batch, 3, pixels, pixels), torch.randint(1000, (batch,))
    contenders = {}
    for name, group in groups.items():
        model = torch.nn.parallel.DistributedDataParallel(phalanx.models.resnet50(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        contenders[name] = step
    return turns(comm, contenders, repeat, 1)


def rank(args: argparse.Namespace) -> None:
    register()
    torch.set_num_threads(1)
    with phalanx.create_communicator() as comm:
        ours, gloo = dist.new_group(backend="phalanx"), dist.new_group(backend="gloo")
        rows: list[dict[str, Any]] = []
        for nbytes in SIZES:
            for name, times in all_reduces(comm, ours, gloo, nbytes, args.repeat).items():
                rows.append({"kind": "allreduce", "bytes": nbytes, "contender": name, **summary(times, 1e6, "us")})
        for name, times in steps(comm, {"phalanx": ours, "gloo": gloo}, args.batch, args.pixels, args.repeat).items():
            rows.append({"kind": "ddp", "model": "resnet50", "contender": name, **summary(times, 1e3, "ms")})
        if comm.rank == 0:
            print(json.dumps(rows), flush=True)
        comm.barrier()
        dist.destroy_process_group(ours)
        dist.destroy_process_group(gloo)


def summary(times: list[float], factor: float, unit: str) -> dict[str, float]:
    return {unit: round(factor * statistics.median(times), 2), f"{unit}_min": round(factor * min(times), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--json", type=Path, help="append the records to this file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args)
        return
    words = ["--repeat", str(args.repeat), "--batch", str(args.batch), "--pixels", str(args.pixels)]
    with started([sys.executable, "-m", "benchmarks.backend", "--rank", *words], args.ranks) as ranks:
        said = finish(ranks, deadline=900)
    run = {
        "kind": "run",
        "ranks": args.ranks,
        "batch": args.batch,
        "pixels": args.pixels,
        "repeat": args.repeat,
        "cores": os.cpu_count(),
        "processor": platform.processor(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
    }
    records = [run, *json.loads(said[0].strip().splitlines()[-1])]
    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
