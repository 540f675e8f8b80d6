"""A LARS step over ResNet-50's 161 tensors, one thread: phalanx.Lars, a per-layer implementation, and torch's SGD.

    python benchmarks/lars_step.py [--repeat 31] [--ranks 2] [--json FILE]

*per layer* is LARS as timm and torch-optimizer have it: two norms per layer as tensors, then gradient, velocity and weight one
operation at a time, the gradient overwritten. Contenders take turns; before each timed step its gradients are written anew, so
that all find the caches alike and *per layer* its gradients unspoilt. Medians; with other work beside it they mean little.

Three settings. *alone*: one process. *a core each*: ranks of one host, each with a core of its own, that step multi-node
optimizers: they sum their gradients, then update. *on one core*: the same ranks on one core, which does the work of all of them.
The slowest rank counts. *in one* is `AllReduce(fused=True)`, where sum and update are one operation, timed as `update`.
*strictly* compares the whole of a step with the update alone of the others, as if their sum were free.
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
from local_ranks import finish, started

import phalanx
from phalanx.optim.multi_node import MultiNodeOptimizer

DECAY, MOMENTUM, TRUST, RATE, EPS = 5e-5, 0.9, 0.001, 1.0, 1e-9
WARM_UP = 3  # rounds; a multi-node optimizer lays out its memory in the first
DEADLINE = 220.0  # seconds for all ranks of one setting

Params = list[torch.nn.Parameter]
Make = Callable[[Params], torch.optim.Optimizer]


class PerLayer(torch.optim.Optimizer):
    """LARS layer by layer, in torch's elementary operations."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        one = torch.ones(())
        for p in self.param_groups[0]["params"]:
            g = p.grad
            if p.ndim > 1:
                w_norm, g_norm = p.norm(2.0), g.norm(2.0)
                ratio = TRUST * w_norm / (g_norm + w_norm * DECAY + EPS)
                ratio = torch.where(w_norm > 0, torch.where(g_norm > 0, ratio, one), one)
                g.add_(p, alpha=DECAY).mul_(ratio)
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            state["momentum_buffer"].mul_(MOMENTUM).add_(g)
            p.add_(state["momentum_buffer"], alpha=-self.param_groups[0]["lr"])


LARS = {"lr": RATE, "momentum": MOMENTUM, "weight_decay": DECAY, "trust_coefficient": TRUST, "eps": EPS}
SGD = {"lr": 1e-3, "momentum": MOMENTUM, "weight_decay": DECAY}


def without_core(params: Params) -> torch.optim.Optimizer:
    """phalanx.Lars as it is where the native core was not built."""
    opt = phalanx.Lars(params, **LARS)
    step = opt.step

    def without() -> None:
        os.environ["PHALANX_NATIVE"] = "0"
        try:
            step()
        finally:
            del os.environ["PHALANX_NATIVE"]

    opt.step = without  # type: ignore[method-assign,assignment]
    return opt


ALONE: dict[str, Make] = {
    "per layer": PerLayer,
    "phalanx.Lars": lambda ps: phalanx.Lars(ps, **LARS),
    "phalanx.Lars without core": without_core,
    "phalanx.Lars foreach": lambda ps: phalanx.Lars(ps, foreach=True, **LARS),
    "SGD fused": lambda ps: torch.optim.SGD(ps, fused=True, **SGD),
    "SGD loop": lambda ps: torch.optim.SGD(ps, foreach=False, **SGD),
}


def together(comm: phalanx.Communicator) -> dict[str, Make]:
    """Multi-node optimizers; `fused` ones sum and update in one operation."""

    def on_all(make: Make, *, fused: bool) -> Make:
        sync = phalanx.AllReduce(overlap=False, fused=fused)
        return lambda ps: phalanx.create_multi_node_optimizer(make(ps), comm, sync=sync)

    usual = {name: on_all(ALONE[name], fused=False) for name in ("per layer", "phalanx.Lars", "SGD fused")}
    sgd = lambda ps: torch.optim.SGD(ps, **SGD)  # noqa: E731
    return usual | {"phalanx.Lars in one": on_all(ALONE["phalanx.Lars"], fused=True), "SGD in one": on_all(sgd, fused=True)}


class Field:
    """Contenders that take turns, each with parameters of its own."""

    def __init__(self, make: dict[str, Make], *, rank: int, barrier: Callable[[], object]) -> None:
        with torch.device("meta"):
            shapes = [p.shape for p in phalanx.models.resnet50().parameters()]
        g = torch.Generator().manual_seed(0)
        self.begin = [torch.randn(shape, generator=g) * 0.05 for shape in shapes]
        g.manual_seed(1 + rank)
        self.fresh = [torch.randn(shape, generator=g) * 0.01 for shape in shapes]
        self.params = {name: [torch.nn.Parameter(w.clone()) for w in self.begin] for name in make}
        for params in self.params.values():
            for p in params:
                p.grad = torch.zeros_like(p)
        self.runs = {name: each(self.params[name]) for name, each in make.items()}
        self.barrier = barrier
        self.moved: dict[str, torch.Tensor] = {}  # by the first step

    def times(self, repeat: int) -> dict[str, list[tuple[float, float]]]:
        """Seconds of the sum and of the update, of every step of every contender."""
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in self.runs}
        for turn in range(-WARM_UP, repeat):
            for name, opt in self.runs.items():
                with torch.no_grad():
                    for p, x in zip(self.params[name], self.fresh):
                        p.grad.copy_(x)  # type: ignore[union-attr]
                self.barrier()
                begun = summed = time.perf_counter()
                if isinstance(opt, MultiNodeOptimizer) and not opt.sync.fused:
                    opt.synchronize()
                    summed = time.perf_counter()
                opt.step()
                times[name].append((summed - begun, time.perf_counter() - summed))
                if turn == -WARM_UP:
                    self.moved[name] = torch.cat([(p.detach() - w).view(-1) for p, w in zip(self.params[name], self.begin)])
        return {name: each[WARM_UP:] for name, each in times.items()}

    def errors(self) -> dict[str, float]:
        """Of the first step, in units of the largest move of a weight."""
        wanted = self.moved["per layer"]
        return {
            name: float((moved - wanted).abs().max() / wanted.abs().max())
            for name, moved in self.moved.items()
            if "SGD" not in name
        }


def rows(setting: str, times: dict[str, list[tuple[float, float]]], errors: dict[str, float]) -> Iterator[dict[str, Any]]:
    median = {name: [statistics.median(part) * 1e3 for part in zip(*each)] for name, each in times.items()}
    whole = {name: statistics.median(map(sum, each)) * 1e3 for name, each in times.items()}
    for name, each in times.items():
        yield {
            "setting": setting,
            "contender": name,
            "sum_ms": median[name][0],
            "update_ms": median[name][1],
            "ms": whole[name],
            "best_ms": min(map(sum, each)) * 1e3,
            "times_faster_than_per_layer": whole["per layer"] / whole[name],
            "times_sgd_fused": whole[name] / whole["SGD fused"],
            "strictly_times_faster": median["per layer"][1] / whole[name],
            "strictly_times_sgd_fused": whole[name] / median["SGD fused"][1],
            "error": errors.get(name),
            "times_ms": [round(sum(pair) * 1e3, 3) for pair in each],
        }


def rank_main(repeat: int) -> None:
    """One rank of a setting; the first one prints the rows."""
    comm = phalanx.create_communicator()
    field = Field(together(comm), rank=comm.rank, barrier=comm.barrier)
    told = comm.allgather_obj(field.times(repeat))
    slowest = {name: [max(pairs, key=sum) for pairs in zip(*(own[name] for own in told))] for name in told[0]}
    if comm.rank == 0:
        print(json.dumps([slowest, field.errors()]))
    comm.barrier()


def on_ranks(ranks: int, repeat: int, cores: list[int]) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
    """What `ranks` processes measure on these cores."""
    command = [sys.executable, __file__, "--rank-of", ",".join(map(str, cores)), "--repeat", str(repeat)]
    with started(command, ranks) as processes:
        slowest, errors = json.loads(finish(processes, deadline=DEADLINE)[0])
    return slowest, errors


def measured(repeat: int, ranks: int) -> Iterator[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    field = Field(ALONE, rank=0, barrier=lambda: None)
    yield from rows("alone", field.times(repeat), field.errors())
    del field
    if ranks > 1 and len(cores) >= ranks:
        yield from rows(f"{ranks} ranks, a core each", *on_ranks(ranks, repeat, cores[:ranks]))
    if ranks > 1:
        yield from rows(f"{ranks} ranks on one core", *on_ranks(ranks, repeat, cores[:1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="append the records to this file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # the cores of a rank
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank_of:
        cores = [int(core) for core in args.rank_of.split(",")]
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
        rank_main(args.repeat)
        return
    header = {
        "what": "a LARS step over ResNet-50's 161 tensors, one thread",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"phalanx": phalanx.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "repeat": args.repeat,
    }
    print(f"# {header['what']}; {header['date']}, torch {torch.__version__}, medians of {args.repeat}")
    names = ("sum", "update", "ms", "best", "x per layer", "/ SGD fused", "strictly x", "strictly /", "error")
    records, setting = [header], ""
    for row in measured(args.repeat, args.ranks):
        records.append(row)
        if row["setting"] != setting:
            setting = row["setting"]
            print(f"\n{setting:<26}" + "".join(f"{name:>12}" for name in names))
        numbers = list(row.values())[2:10]
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        print(f"{row['contender']:<26}" + "".join(f"{value:>12.2f}" for value in numbers) + f"{error:>12}", flush=True)
    if args.json is not None:
        with args.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
