"""A small training whose state has everything that a checkpoint must keep."""

import copy
import random
from pathlib import Path

import numpy
import pytest
import torch

import phalanx
from phalanx.train.checkpoint import RandomState


class Training:
    """Tied weights, dropout, running statistics, momentum, a scheduler with a Counter, and noise from three generators."""

    def __init__(self, width=6):
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, width)
        )
        self.model[3].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self.average = torch.zeros(width)
        self.progress = {"step": 0, "best": float("-inf"), "history": []}

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "average": self.average,
            "progress": self.progress,
            "rng": RandomState(),
        }

    def step(self):
        x = torch.randn(5, self.average.numel()) * random.random() + numpy.random.rand()
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.lerp_(self.model[1].running_mean, 0.1)
        self.progress["step"] += 1
        self.progress["best"] = max(self.progress["best"], loss.item())
        self.progress["history"].append((self.progress["step"], loss.item()))

    def everything(self):
        """A copy of all state, to compare."""
        states = {name: obj.state_dict() if hasattr(obj, "state_dict") else obj for name, obj in self.state.items()}
        return copy.deepcopy({name: dict(own) if isinstance(own, dict) else own for name, own in states.items()})


def save_two_steps(checkpoints):
    """Checkpoints of the steps 1 and 2; what is in step 1."""
    training = Training()
    found = []
    for step in (1, 2):
        training.step()
        checkpoints.save(step, **training.state)
        checkpoints.wait()
        found.append(training.everything())
    return found[0]


def same(a, b):
    """Bit by bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, numpy.ndarray):
        return numpy.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.fixture
def comm():
    with phalanx.create_communicator() as comm:
        yield comm


@pytest.fixture
def own_things(monkeypatch):
    """own_things.py is a module that import paths can name, as if it were in the working directory of a user."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"
