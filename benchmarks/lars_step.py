"""One LARS step over ResNet-50's 161 tensors on one core: phalanx.Lars, a per-layer implementation, and torch's SGD.

    python benchmarks/lars_step.py [--repeat 31] [--json FILE]

*per layer* is LARS as timm and torch-optimizer have it: two norms per layer as tensors, then gradient, velocity and weight one
operation at a time, the gradient overwritten. Contenders take turns; before each timed step its gradients are written anew, so
that all find the caches alike and *per layer* its gradients unspoilt. Medians; with other work beside it they mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import phalanx

DECAY, MOMENTUM, TRUST, RATE, EPS = 5e-5, 0.9, 0.001, 1.0, 1e-9


class PerLayer(torch.optim.Optimizer):
    """LARS layer by layer, in torch's elementary operations."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
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


def contenders() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    lars = {"momentum": MOMENTUM, "weight_decay": DECAY, "trust_coefficient": TRUST, "eps": EPS}
    sgd = {"lr": 1e-3, "momentum": MOMENTUM, "weight_decay": DECAY}
    return {
        "per layer": PerLayer,
        "phalanx.Lars": lambda ps: phalanx.Lars(ps, lr=RATE, **lars),
        "phalanx.Lars foreach": lambda ps: phalanx.Lars(ps, lr=RATE, foreach=True, **lars),
        "SGD fused": lambda ps: torch.optim.SGD(ps, fused=True, **sgd),
        "SGD loop": lambda ps: torch.optim.SGD(ps, foreach=False, **sgd),
    }


def measure(repeat: int) -> list[dict[str, Any]]:
    with torch.device("meta"):
        shapes = [p.shape for p in phalanx.models.resnet50().parameters()]
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=g) * 0.05 for shape in shapes]
    fresh = [torch.randn(shape, generator=g) * 0.01 for shape in shapes]
    params = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.empty_like(p)
    runs, ends = {name: make(params) for name, make in contenders().items()}, {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-2, repeat):  # two rounds to warm up; the first one from equal weights, to compare what they compute
        for name, opt in runs.items():
            with torch.no_grad():
                for p, w, x in zip(params, weights, fresh):
                    p.grad.copy_(x)
                    if turn == -2:
                        p.copy_(w)
            begun = time.perf_counter()
            opt.step()
            times[name].append(time.perf_counter() - begun)
            if turn == -2:
                ends[name] = torch.cat([p.detach().reshape(-1) for p in params])
    moved = (ends["per layer"] - torch.cat([w.reshape(-1) for w in weights])).abs().max()
    median = {name: statistics.median(each[2:]) * 1e3 for name, each in times.items()}
    return [
        {
            "contender": name,
            "ms": median[name],
            "best_ms": min(each[2:]) * 1e3,
            "times_faster_than_per_layer": median["per layer"] / median[name],
            "times_sgd_fused": median[name] / median["SGD fused"],
            # of the largest move of a weight, in the first step
            "error": float((ends[name] - ends["per layer"]).abs().max() / moved) if "SGD" not in name else None,
            "times_ms": [round(t * 1e3, 3) for t in each[2:]],
        }
        for name, each in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--json", type=Path, help="append the records to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    header = {
        "what": "a LARS step over ResNet-50's 161 tensors, one core",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"phalanx": phalanx.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "repeat": args.repeat,
    }
    rows = measure(args.repeat)
    print(f"# {header['what']}; {header['date']}, torch {torch.__version__}, medians of {args.repeat}")
    print(f"{'contender':<22}{'ms':>8}{'best':>8}{'x per layer':>13}{'/ SGD fused':>13}{'error':>10}")
    for row in rows:
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        print(
            f"{row['contender']:<22}{row['ms']:>8.1f}{row['best_ms']:>8.1f}{row['times_faster_than_per_layer']:>13.2f}"
            f"{row['times_sgd_fused']:>13.2f}{error:>10}"
        )
    if args.json is not None:
        with args.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in (header, *rows))


if __name__ == "__main__":
    main()
