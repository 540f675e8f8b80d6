"""A small training run without Phalanx as the reference: with DDP or, if there is no process group, in one process."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from phalanx.comm.communicator import Communicator
from phalanx.comm.envelope import bytes_of
from phalanx.comm.transports.torch import already_initialized

STEPS, BATCH, FEATURES, CLASSES = 10, 8, 20, 10
RATE, MOMENTUM = 0.05, 0.9
OVERFLOW = 4  # the step in which the last rank's loss is infinite, if there is a scaler


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained: on which device, and whether with a GradScaler, in half precision on a GPU."""

    comm: Communicator
    device: torch.device
    scaled: bool = False

    def replica(self) -> nn.Module:
        """The model as it is before the first step, the same on all ranks."""
        chance = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_((torch.rand(p.shape, generator=chance) - 0.5) / 4)
        return model.to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A plain optimizer."""
        return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def scaler(self) -> torch.amp.GradScaler:
        """A GradScaler, disabled if the task has none."""
        return torch.amp.GradScaler(self.device.type, init_scale=1024.0, enabled=self.scaled)

    def batch(self, step: int, ranks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The batches of these ranks, on the device."""
        x, y = (torch.cat(parts) for parts in zip(*(_batch(step, rank) for rank in ranks)))
        return x.to(self.device), y.to(self.device)

    def loss(self, model: nn.Module, step: int, ranks: Sequence[int]) -> torch.Tensor:
        """The loss of these ranks' batches."""
        x, y = self.batch(step, ranks)
        with torch.autocast(self.device.type, torch.float16, enabled=self.scaled and self.device.type == "cuda"):
            loss = F.cross_entropy(model(x), y)
        overflows = self.scaled and step == OVERFLOW and self.comm.size - 1 in ranks
        return loss * float("inf") if overflows else loss


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1_000_003 * step + rank)
    return torch.randn(BATCH, FEATURES, generator=chance), torch.randint(0, CLASSES, (BATCH,), generator=chance)


def name_of_reference() -> str:
    """The name of what `train_plainly` uses."""
    return "DDP" if already_initialized() else "one process"


def train_plainly(task: Task, *, delayed: bool = False) -> list[torch.Tensor]:
    """The parameters after STEPS steps. With `delayed`, every step applies the gradients of the previous step."""
    model = task.replica()
    params = list(model.parameters())
    optimizer, scaler = task.optimizer(model), task.scaler()
    wrapped, ranks = _gradients_of_all(task, model)
    before: list[torch.Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(task.loss(wrapped, step, ranks)).backward()
        if delayed:
            now = [p.grad.clone() for p in params if p.grad is not None]
            for p, old in zip(params, before):
                p.grad = old
            before, ready = now, bool(before)
        if not delayed or ready:
            scaler.step(optimizer)
            scaler.update()
    return [p.detach().clone() for p in params]


def _gradients_of_all(task: Task, model: nn.Module) -> tuple[nn.Module, Sequence[int]]:
    """A model whose backward yields the mean over all ranks, and the ranks whose batches it takes here."""
    if not already_initialized():
        return model, range(task.comm.size)
    ids = [task.device.index] if task.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids), [task.comm.rank]


def train_with(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same training with a Phalanx optimizer, as a user would write it."""
    scaler = task.scaler()
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(task.loss(model, step, [task.comm.rank])).backward()
        scaler.step(optimizer)
        scaler.update()


def distance(mine: Sequence[torch.Tensor], others: Sequence[torch.Tensor], start: Sequence[torch.Tensor]) -> float:
    """The distance between the results of two runs, relative to how far the second one moved."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(mine, others))
    way = sum(float((b.double() - c.double()).square().sum()) for b, c in zip(others, start))
    return float((apart / way) ** 0.5) if way else float("inf")


def spread_of(comm: Communicator, params: Sequence[torch.Tensor]) -> float:
    """The distance of the replicas from their mean. All ranks call it."""
    mine = torch.cat([p.double().view(-1) for p in params])
    off = mine - comm.all_reduce(mine.clone(), "mean")
    return float(comm.all_reduce(off.square().sum()).sqrt())


def checksum(params: Sequence[torch.Tensor]) -> int:
    """A checksum that changes with any bit."""
    found = 0
    for p in params:
        found = zlib.crc32(bytes_of(p.detach().cpu().contiguous()).numpy().data, found)
    return found
