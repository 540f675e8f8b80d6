"""The backend "phalanx" against gloo, and against what it is made of, on ranks of this machine or of the lab.

    python -m benchmarks.backend [--ranks 2] [--repeat 15] [--sizes 65536,1048576] [--steps resnet50,gpt] [--batch 2]
                                 [--only gloo,phalanx] [--lab 4x2] [--rate 1gbit] [--json FILE]

`allreduce` rows: microseconds of one float32 all-reduce by `comm.all_reduce`, by `dist.all_reduce` on a group of each backend,
and of the asynchronous calls.

`step` rows: milliseconds of one training step with the contenders of benchmarks/steps.py, all in one process per rank: for the
lab. On one machine use steps.py, where a contender has its processes for itself.

Contenders take turns in one run. A row has the median over the turns and the fastest turn of the slowest rank. `times_gloo` is
the median over the turns of gloo's time by this one's in the same turn.
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
from benchmarks.lab import Lab
from benchmarks.local_ranks import finish, started
from benchmarks.small_models import WORKLOADS, Workload
from benchmarks.steps import CONTENDERS, WARM, enter, step_of

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


# ---- training steps ----------------------------------------------------------------------------------------------------------


def steps(comm: phalanx.Communicator, ours: Any, gloo: Any, work: Workload, only: list[str], batch: int, repeat: int) -> Times:
    torch.manual_seed(comm.rank)
    x, y = work.data(batch)
    contenders: dict[str, Callable[[], None]] = {}
    for name in only:
        torch.manual_seed(0)
        contenders[name] = step_of(*enter(name, work, ours if name == "phalanx" else gloo, comm), x, y)
        for _ in range(WARM if name in ("phalanx", "optimizer", "fused") else 3):  # in blocks: these time their own first steps
            contenders[name]()
    return turns(comm, contenders, repeat, work.steps)


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
        yield from rows_of(all_reduces(comm, ours, gloo, nbytes, args.repeat), 1e6, "us", kind="allreduce", bytes=nbytes)
    for model in args.steps:
        for batch in args.batch:
            times = steps(comm, ours, gloo, WORKLOADS[model], args.only, batch, args.repeat)
            yield from rows_of(times, 1e3, "ms", kind="step", model=model, batch=batch)


def rows_of(times: Times, factor: float, unit: str, **what: Any) -> Iterator[dict[str, Any]]:
    gloo = times.get("gloo")
    for name, own in times.items():
        faster = {} if gloo is None else {"times_gloo": round(statistics.median(g / t for g, t in zip(gloo, own)), 3)}
        numbers = {unit: round(factor * statistics.median(own), 2), f"{unit}_min": round(factor * min(own), 2)}
        yield {**what, "contender": name, **numbers, **faster}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lab", help="hosts x ranks of each, as 4x2: run in network namespaces; needs root")
    parser.add_argument("--rate", default="1gbit", help="of each host's port in the lab")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--sizes", type=numbers, default=list(SIZES), help="bytes of all-reduces; '' for none")
    parser.add_argument("--steps", type=words, default=["resnet50"], help=f"of {', '.join(WORKLOADS)}; '' for none")
    parser.add_argument("--only", type=words, default=list(CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--batch", type=numbers, default=[2])
    parser.add_argument("--json", type=Path, help="append the records to this file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def main() -> None:
    args = parse()
    if args.rank:
        rank(args)
        return
    command = [sys.executable, "-m", "benchmarks.backend", "--rank", *sys.argv[1:]]
    if args.lab:
        hosts, per_host = map(int, args.lab.split("x"))
        lab = Lab(hosts, per_host, rate=args.rate)
        args.ranks = lab.world
        with lab.up() as net:
            said = net.run(command, deadline=900)[0]
    else:
        with started(command, args.ranks) as ranks:
            said = finish(ranks, deadline=900)[0]
    run = {
        "kind": "run",
        "ranks": args.ranks,
        **({"lab": args.lab, "rate": args.rate} if args.lab else {}),
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
