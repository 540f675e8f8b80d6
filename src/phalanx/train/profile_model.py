"""Measure a model for `phalanx plan --model FILE`: how long a step takes, and when each gradient is ready.

    from phalanx.train.profile_model import profile_model, write_profile

    write_profile("mine.json", *profile_model(model, lambda n: (images[:n], labels[:n]), loss, sizes=(16, 64), samples=50_000))

It runs on the CPU. For another device, the shares of the layers remain useful and `--rate` replaces the speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from phalanx.cluster import Compute, Model, from_two
from phalanx.cluster.workload import Tensor
from phalanx.cluster.workload_file import to_json
from phalanx.grad.wires.carrier import rows_of


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward: when they ended and when each gradient was ready, in seconds from the start of each pass."""

    forward: float
    backward: float
    ready: dict[str, float]


def profile_model(
    model: nn.Module,
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    sizes: tuple[int, int],
    samples: int,
    optimizer: torch.optim.Optimizer | None = None,
    repeat: int = 5,
) -> tuple[Model, Compute]:
    """Medians of `repeat` steps with batches of both `sizes`; `batch(n)` gives n inputs and labels, `samples` is an epoch."""
    if any(p.is_cuda for p in model.parameters()):
        raise ValueError(
            "profile_model measures on the CPU; for a GPU give its rates to `phalanx plan --rate`, one per batch size"
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(model).__name__} has no trainable parameters")
    small, large = sorted(sizes)
    passes = {size: _measure(model, trained, batch(size), loss, repeat) for size in (small, large)}
    totals = {size: median(p.forward + p.backward for p in found) for size, found in passes.items()}
    compute = from_two(*((size, size / totals[size]) for size in (small, large)), source="measured by profile_model")
    forward = median(p.forward / (p.forward + p.backward) for p in passes[large])
    update = _time_update(optimizer, repeat) if optimizer is not None else 0.0
    return _describe(model, trained, passes[large], samples), replace(compute, forward=forward, optimizer=update)


def write_profile(path: str | Path, model: Model, compute: Compute) -> None:
    """Write a file for `phalanx plan --model PATH`."""
    Path(path).write_text(to_json(model, compute), encoding="utf-8")


def _measure(
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    data: tuple[torch.Tensor, torch.Tensor],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    repeat: int,
) -> list[Pass]:
    found = []
    inputs, labels = data
    with _watching(trained) as ready:
        for _ in range(repeat + 1):
            model.zero_grad()
            ready.clear()
            begun = time.perf_counter()
            value = loss(model(inputs), labels)
            turned = time.perf_counter()
            value.backward()
            ended = time.perf_counter()
            found.append(Pass(turned - begun, ended - turned, {name: at - turned for name, at in ready.items()}))
    model.zero_grad()
    return found[1:]  # the first one allocates


@contextmanager
def _watching(trained: dict[str, nn.Parameter]) -> Iterator[dict[str, float]]:
    """Record when each gradient was ready, by name."""
    ready: dict[str, float] = {}

    def note(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: ready.__setitem__(name, time.perf_counter())

    handles = [p.register_post_accumulate_grad_hook(note(name)) for name, p in trained.items()]
    try:
        yield ready
    finally:
        for handle in handles:
            handle.remove()


def _describe(model: nn.Module, trained: dict[str, nn.Parameter], passes: list[Pass], samples: int) -> Model:
    """Parameters in reverse order of their gradients; those without a gradient come last."""
    ready = {name: median(p.ready.get(name, p.backward) for p in passes) for name in trained}
    end = max(median(p.backward for p in passes), *ready.values())
    tensors, before = [], 0.0
    for name in sorted(trained, key=ready.__getitem__):
        tensors.append(Tensor(name, trained[name].numel(), (ready[name] - before) / end, 0, rows_of(trained[name])))
        before = ready[name]
    return Model(type(model).__name__, tuple(reversed(tensors)), samples)


def _time_update(optimizer: torch.optim.Optimizer, repeat: int) -> float:
    """Seconds of an update with zero gradients. Changes by momentum and weight decay are undone."""
    saved = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    state = deepcopy(optimizer.state_dict())
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    times = []
    for _ in range(repeat + 1):
        begun = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    with torch.no_grad():
        for p, value in zip((p for group in optimizer.param_groups for p in group["params"]), saved):
            p.copy_(value)
            p.grad = None
    optimizer.load_state_dict(state)
    return median(times[1:])
