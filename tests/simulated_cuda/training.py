"""One small training run, the same on the CPU and on simulated GPUs, in every mode of the product.

The CPU run is the oracle. With two ranks a sum has one order, so both must agree in every bit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.simulated_cuda.launch import launch
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import Simulation, Sync, process

import phalanx

STEPS = 4
SETTLED = 2  # steps after which the product has measured and agreed on all that it measures


@dataclass(frozen=True)
class Mode:
    """Options of `create_multi_node_optimizer`, and how the loop uses the optimizer."""

    options: Callable[[], dict[str, Any]] = dict
    scaler: bool = False
    weighted: bool = False
    accumulates: bool = False
    side_stream: bool = False  # some layers compute on a stream of their own
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5)
    waits: Sequence[str] = field(default=())  # of the host per step, by the loop itself


MODES: dict[str, Mode] = {
    "default": Mode(),
    "overlap": Mode(lambda: {"sync": phalanx.AllReduce(overlap=True), "bucket_bytes": 100}),
    "no overlap": Mode(lambda: {"sync": phalanx.AllReduce(overlap=False), "bucket_bytes": 100}),
    "growing groups": Mode(lambda: {"sync": phalanx.AllReduce(growing=1)}),
    "float16 wire": Mode(lambda: {"wire": torch.float16, "bucket_bytes": 100}),
    "bfloat16 wire": Mode(lambda: {"wire": torch.bfloat16, "bucket_bytes": 100}),
    "double buffering": Mode(lambda: {"double_buffering": True, "bucket_bytes": 100}),
    "double buffering, float16 wire": Mode(lambda: {"double_buffering": True, "wire": torch.float16, "bucket_bytes": 100}),
    "weighted": Mode(lambda: {"sync": phalanx.AllReduce(weighted=True), "bucket_bytes": 100}, weighted=True),
    "accumulation": Mode(lambda: {"bucket_bytes": 100}, accumulates=True),
    "adam": Mode(lambda: {"bucket_bytes": 100}, optimizer=lambda params: torch.optim.Adam(params, lr=0.01)),
    "side stream": Mode(lambda: {"sync": phalanx.AllReduce(overlap=True), "bucket_bytes": 300}, side_stream=True),
    "scaler": Mode(lambda: {"bucket_bytes": 100}, scaler=True, waits=("item",)),
    "scaler, float16 wire": Mode(lambda: {"wire": torch.float16, "bucket_bytes": 100}, scaler=True, waits=("item",)),
    "gossip of weights": Mode(lambda: {"sync": phalanx.Gossip(overlap=False)}),
    "gossip of weights, overlapped": Mode(lambda: {"sync": phalanx.Gossip()}),
    "gossip of gradients": Mode(lambda: {"sync": phalanx.Gossip(exchange="gradients", overlap=False)}),
    "gossip of gradients, overlapped": Mode(lambda: {"sync": phalanx.Gossip(exchange="gradients")}),
    "gossip, float16 wire": Mode(lambda: {"sync": phalanx.Gossip(average_every=2), "wire": torch.float16}),
}


@dataclass
class Outcome:
    """What a rank ends with, and where its host waited in a settled step."""

    weights: list[torch.Tensor]
    losses: list[float]
    waits: list[Sync]


def _model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        return torch.nn.Sequential(*layers)


MODEL = _model()  # made once: ranks that are threads share torch's generator


def train(comm: Any, mode: Mode, device: str, steps: int = STEPS) -> Outcome:
    """Train a small model for some steps, on `device`."""
    model = copy.deepcopy(MODEL).to(device)
    opt = phalanx.create_multi_node_optimizer(mode.optimizer(model.parameters()), comm, **mode.options())
    scaler = torch.amp.GradScaler(device, init_scale=128.0) if mode.scaler else None
    data = (torch.arange(16.0 * 6).reshape(16, 6) * 7 % 11 - 5)[comm.rank :: comm.size].to(device)
    losses, waits = [], []
    for step in range(steps):
        before = len(process().syncs) if device == "cuda" else 0
        if mode.weighted:
            opt.weight = 4.0 + comm.rank
        opt.zero_grad()
        for part in range(2 if mode.accumulates else 1):
            pausing = opt.no_sync() if mode.accumulates and part == 0 else contextlib.nullcontext()
            cast = torch.autocast(device, dtype=torch.float16) if scaler else contextlib.nullcontext()
            with pausing:
                with cast:
                    x = data + step + part
                    out = _on_two_streams(model, x) if mode.side_stream and device == "cuda" else model(x)
                    loss = out.float().square().mean()
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
        losses.append(loss.detach())
        if device == "cuda" and step >= SETTLED:
            waits += process().syncs[before:]
    return Outcome([p.detach().cpu() for p in model.parameters()], [float(x) for x in losses], waits)


def _on_two_streams(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The third layer on a stream of its own, as a model with branches does."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    hidden = model[1](model[0](x))
    side.wait_stream(main)
    hidden.record_stream(side)
    with torch.cuda.stream(side):
        hidden = model[2](hidden)
    main.wait_stream(side)
    hidden.record_stream(main)
    return model[4](model[3](hidden))  # type: ignore[no-any-return]


def on_gpus(
    world: int, mode: Mode, seed: int, *, hosts: int = 1, steps: int = STEPS, **options: Any
) -> tuple[list[Outcome], Simulation]:
    """On simulated GPUs."""
    with simulated(hosts=hosts, gpus_per_host=world // hosts, seed=seed) as made:
        return launch(world, lambda comm: train(comm, mode, "cuda", steps), **options), made


def on_cpu(world: int, mode: Mode, *, hosts: int = 1, steps: int = STEPS, **options: Any) -> list[Outcome]:
    """The same on threads of this process."""
    return phalanx.run_local(world, lambda comm: train(comm, mode, "cpu", steps), hosts=hosts, **options)


def differences(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> list[str]:
    """Where two runs do not agree in every bit."""
    return [
        f"rank {rank}: parameter {i} differs by {(a - b).abs().max().item()}"
        for rank, (x, y) in enumerate(zip(found, wanted))
        for i, (a, b) in enumerate(zip(x.weights, y.weights))
        if not torch.equal(a, b)
    ]
