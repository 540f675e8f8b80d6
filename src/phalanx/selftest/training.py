"""Compare ten steps of a small model with plain DDP in every mode, replicas bit for bit, and count GPU synchronisations."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from phalanx.grad.allreduce import AllReduce
from phalanx.grad.gossip import Gossip
from phalanx.optim.create import create_multi_node_optimizer
from phalanx.selftest.placement import contexts_now
from phalanx.selftest.reference import STEPS, Task, checksum, distance, name_of_reference, spread_of, train_plainly, train_with
from phalanx.selftest.result import Check, Result, failed, passed, some_ranks
from phalanx.selftest.runner import REPORT_IT, Trial

WARM = 12  # warm-up steps: the first ones measure, agree and compare replicas


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to train, and its allowed distance from DDP, relative to how far DDP moved."""

    options: dict[str, Any] = field(default_factory=dict)
    apart: float = 1e-4  # sums in another order
    apart_on_gpus: float | None = None  # if that is more
    delayed: bool = False
    scaled: bool = False
    spread: float = 0.0  # of replicas before they are averaged, relative to ranks that do not communicate


MODES = {
    "float32": Mode(),
    "without overlap": Mode({"sync": AllReduce(overlap=False)}),
    "bfloat16 wire": Mode({"wire": torch.bfloat16}, apart=0.02),  # 8 bits of mantissa
    "double buffering": Mode({"double_buffering": True}, delayed=True),
    "GradScaler": Mode(scaled=True, apart_on_gpus=0.01),  # half precision there
    # with 2 to 16 ranks 0.06 to 0.08 apart and 0.1 to 0.17 spread, with gradients 0.21 to 0.31 and 0.24 to 0.73
    "gossip": Mode({"sync": Gossip()}, apart=0.2, spread=0.5),
    "gossip of gradients": Mode({"sync": Gossip(exchange="gradients")}, apart=0.5, spread=0.9),
}
WATCHED: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16 wire": {"wire": torch.bfloat16}}


def checks() -> list[Check]:
    """One check per mode."""
    modes = [Check("training", name, functools.partial(_train, mode)) for name, mode in MODES.items()]
    return [
        *modes,
        Check("training", "host synchronisations", _count_synchronisations, gpu=True),
        Check("training", "contexts on other GPUs", contexts_now, needs=None, gpu=True),
    ]


def _train(mode: Mode, trial: Trial) -> Result:
    """Compare the mode with plain training on the job's device."""
    task = Task(trial.comm, trial.device, mode.scaled)
    model = task.replica()
    params = [p.detach() for p in model.parameters()]
    start = [p.clone() for p in params]
    optimizer = create_multi_node_optimizer(task.optimizer(model), trial.comm, **mode.options)
    with warnings.catch_warnings():
        if mode.scaled:  # one rank overflows on purpose
            warnings.simplefilter("ignore")
        train_with(task, model, optimizer)
        wanted = train_plainly(task, delayed=mode.delayed)
    spread = 0.0
    if mode.spread and trial.comm.size > 1:
        spread = spread_of(trial.comm, params) / spread_of(trial.comm, _train_alone(task))
        optimizer.average_()
    apart = distance(params, wanted, start)
    limit = (mode.apart_on_gpus if trial.device.type == "cuda" else None) or mode.apart
    sums = trial.comm.allgather_obj(checksum(params))
    odd = [rank for rank, own in enumerate(sums) if own != sums[0]]
    other = name_of_reference()
    figures = {"apart": apart, "limit": limit, "spread": spread, "checksums": sums[:16], "reference": other}
    if odd:
        return failed(f"after {STEPS} steps the replicas of {some_ranks(odd)} differ from that of rank 0", REPORT_IT, **figures)
    if not apart <= limit:
        words = f"{STEPS} steps end {apart:.2%} of the way from where {other} ends, more than {limit:.2%}"
        return failed(words, REPORT_IT, **figures)
    if not spread <= mode.spread:
        words = f"replicas are {spread:.0%} as far apart as without communication, more than {mode.spread:.0%}"
        return failed(words, REPORT_IT, **figures)
    words = f"{apart:.1e} of the way apart from {other}" if apart else f"equal to {other} bit by bit"
    return passed(f"{STEPS} steps, replicas equal, {words}", **figures)


def _train_alone(task: Task) -> list[torch.Tensor]:
    model = task.replica()
    train_with(task, model, task.optimizer(model))
    return [p.detach() for p in model.parameters()]


def _count_synchronisations(trial: Trial) -> Result:
    """Count how often the host waits for the GPU in a step, as far as torch can tell. DDP never does."""
    found = {name: _synchronisations_of(_step(trial, options)) for name, options in WATCHED.items()}
    most = max(found.values())
    if most:
        words = ", ".join(f"{count} with {name}" for name, count in found.items())
        return failed(f"a step makes the host wait for the GPU: {words}", REPORT_IT, **found)
    return passed("none in a step", **found)


def _step(trial: Trial, options: dict[str, Any]) -> Callable[[], None]:
    """A step function after WARM warm-up calls. Its batch is already on the GPU."""
    task = Task(trial.comm, trial.device)
    model = task.replica()
    optimizer = create_multi_node_optimizer(task.optimizer(model), trial.comm, **options)
    x, y = task.batch(0, [trial.comm.rank])

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(WARM):
        step()
    return step


def _synchronisations_of(step: Callable[[], None]) -> int:
    """The warnings of one step that disappear when torch does not watch for synchronisations."""
    usual = _warnings_of(step)
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        return max(0, _warnings_of(step) - usual)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _warnings_of(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step()
    return len(found)
