"""Training steps of DistributedDataParallel with one word changed, of what stands instead of it, and of what cannot be beaten.

    python -m benchmarks.steps [--ranks 2] [--models resnet50,gpt] [--batch 2,4] [--turns 5] [--only gloo,phalanx] [--json FILE]
    python -m benchmarks.steps --lab 4x2 [--rate 1gbit] ...        4 hosts of 2 ranks in network namespaces; needs root

    none        no communication: the limit for everything
    no-op       DistributedDataParallel whose hook returns the gradients as they are: the limit for everything inside DDP
    gloo        DistributedDataParallel as people write it, on a group of gloo
    phalanx     the same, with the other name
    ddp_hook    DistributedDataParallel on gloo with phalanx.ddp_hook
    gloo views  DistributedDataParallel on gloo as fast as torch can make it: gradient_as_bucket_view, static_graph
    optimizer   phalanx.create_multi_node_optimizer, without DistributedDataParallel
    fused       the same, with AllReduce(fused=True)

Every contender is a job of its own, because what it does to its process must not help the others: Phalanx tells the C library to
keep freed memory, which makes gloo's steps faster in a process that both share. The two limits have that setting as well. The
jobs run one after the other, again and again in turns. Each takes some steps to warm up and then the timed ones. No job waits in
memory while another one is timed: sixteen sleeping processes doubled the time of a ResNet-50 step without communication. The jobs
are forked from this process, so torch is imported once; in the lab each process imports it.

A row has the median over the turns of the slowest rank's milliseconds per step, and `times_gloo`, the ratio of gloo's median to
it. `turn_by_turn` is the median of the ratios in each turn. `cost` is what a contender adds to `none`, by what gloo adds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import platform
import queue
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.lab import Lab, Net
from benchmarks.small_models import WORKLOADS, Workload
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.backend import register
from phalanx.comm.heap import keep_freed_memory

CONTENDERS = ("none", "no-op", "gloo", "phalanx", "ddp_hook", "gloo views", "optimizer", "fused")
LIMITS = ("none", "no-op")
WARM = 12  # steps before the timed ones: an optimizer tries overlap on and off in its first 9
RATE = 1e-6  # training must make no progress, so that late steps cost what early ones do
SECONDS = 60  # for one job
LAB_SECONDS = 300
PER_TURN = {"resnet50": 10, "gpt": 60, "nanogpt": 30, "bert": 30, "cnn": 100, "mlp": 500}  # timed steps: two to four seconds
IN_THE_LAB = {"resnet50": 5, "gpt": 20, "nanogpt": 10}  # where a step takes several times as long


# ---- a rank of a contender ----------------------------------------------------------------------------------------------------


def job(name: str, model: str, batch: int, steps: int) -> float:
    """Seconds per step on this rank of the job that the environment names."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # vanishing gradients would slow some contenders more than others
    register()
    dist.init_process_group("phalanx" if name == "phalanx" else "gloo")
    if name in LIMITS:
        keep_freed_memory()
    work = WORKLOADS[model]
    torch.manual_seed(0)
    model_and_optimizer = enter(name, work)
    torch.manual_seed(dist.get_rank())
    step = step_of(*model_and_optimizer, *work.data(batch))
    for _ in range(WARM):
        step()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - begin) / steps
    dist.barrier()
    return seconds


def forked(rank: int, ranks: int, port: int, results: Any, *what: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    results.put(job(*what))
    results.close()
    results.join_thread()  # what was put is sent
    os._exit(0)


def enter(name: str, work: Workload) -> tuple[Any, Any]:
    """The model and the optimizer of a contender."""
    model: Any = work.model()
    optimizer: Any = torch.optim.AdamW if work.optimizer == "adamw" else torch.optim.SGD
    optimizer = optimizer(model.parameters(), lr=RATE, **({} if work.optimizer == "adamw" else {"momentum": 0.9}))
    if name in ("no-op", "gloo", "phalanx", "ddp_hook"):
        model = DistributedDataParallel(model)
    elif name == "gloo views":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    if name == "no-op":
        model.register_comm_hook(None, as_it_is)
    elif name == "ddp_hook":
        model.register_comm_hook(phalanx.create_communicator(), phalanx.ddp_hook)
    elif name in ("optimizer", "fused"):
        sync = phalanx.AllReduce(fused=name == "fused")
        optimizer = phalanx.create_multi_node_optimizer(optimizer, phalanx.create_communicator(), sync=sync)
    return model, optimizer


def as_it_is(state: None, bucket: dist.GradBucket) -> Any:
    """A hook of DistributedDataParallel that communicates nothing."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


as_it_is.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # DDP wants types


def step_of(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


# ---- the turns ----------------------------------------------------------------------------------------------------------------


def race(names: list[str], turns: int, run: Callable[..., list[float]], *what: Any) -> dict[str, list[float]]:
    """Seconds per step of every contender in each turn, of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            times[name].append(max(run(name, *what)))
    return times


def on_this_machine(ranks: int, name: str, *what: Any) -> list[float]:
    """Run one job; none of its processes is left when it returns."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    arguments = (ranks, port, results, name, *what)
    processes = [fork.Process(target=forked, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        until = time.monotonic() + SECONDS
        return [results.get(timeout=max(0.0, until - time.monotonic())) for _ in processes]
    except queue.Empty:
        raise SystemExit(f"{name}: no result within {SECONDS} s") from None
    finally:
        for process in processes:
            process.join(2)
            process.kill()
            process.join()


def in_the_lab(net: Net, *what: Any) -> list[float]:
    said = net.run([sys.executable, "-m", "benchmarks.steps", "--job", *map(str, what)], deadline=LAB_SECONDS)
    return [float(words) for words in said]


def rows_of(times: dict[str, list[float]], **what: Any) -> Iterator[dict[str, Any]]:
    medians = {name: statistics.median(own) for name, own in times.items()}
    for name, own in times.items():
        row = {**what, "contender": name, "ms": round(1e3 * medians[name], 3), "ms_min": round(1e3 * min(own), 3)}
        if "gloo" in times:
            row["times_gloo"] = round(medians["gloo"] / medians[name], 3)
            row["turn_by_turn"] = round(statistics.median(g / t for g, t in zip(times["gloo"], own)), 3)
        if "gloo views" in times:
            row["times_views"] = round(medians["gloo views"] / medians[name], 3)
        if "gloo" in times and "none" in times and name != "none":
            row["cost"] = round((medians[name] - medians["none"]) / (medians["gloo"] - medians["none"]), 3)
        yield row


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--models", type=words, default=["resnet50"], help=f"of {', '.join(PER_TURN)}")
    parser.add_argument("--only", type=words, default=list(CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--batch", type=words, default=["2"], help="per rank")
    parser.add_argument("--json", type=Path, help="append the records to this file")
    parser.add_argument("--lab", help="hosts x ranks of each, as 4x2: network namespaces instead of this machine")
    parser.add_argument("--rate", default="1gbit", help="of each host's port in the lab")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        name, model, batch, steps = args.job
        print(job(name, model, int(batch), int(steps)), flush=True)
        os._exit(0)
    with contextlib.ExitStack() as until_the_end:
        where, steps_of, run = {"ranks": args.ranks}, PER_TURN, functools.partial(on_this_machine, args.ranks)
        if args.lab:
            hosts, per_host = map(int, args.lab.split("x"))
            lab = Lab(hosts, per_host, args.rate)
            where, steps_of = {"ranks": lab.world, "lab": args.lab, "rate": args.rate}, PER_TURN | IN_THE_LAB
            run = functools.partial(in_the_lab, until_the_end.enter_context(lab.up()))
        tell([{"kind": "run", **where, "turns": args.turns, **this_machine()}], args.json)
        for model, batch in itertools.product(args.models, args.batch):
            times = race(args.only, args.turns, run, model, int(batch), steps_of[model])
            tell(list(rows_of(times, kind="step", model=model, batch=int(batch))), args.json)


def this_machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 2),
    }


def tell(records: list[dict[str, Any]], file: Path | None) -> None:
    """As they come: what is measured must not be lost if the next network takes too long."""
    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
    if file is not None:
        with file.open("a") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
