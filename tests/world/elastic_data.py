"""Data whose samples kill the rank that reads them: a rank of `phalanx train` dies at a chosen moment."""

from __future__ import annotations

import os
import signal

import torch

TRAIN, TEST = 120, 33


class Deadly:
    """Samples of two classes. `dies`: MEMBER:COUNT+... of ranks that are killed when they read their COUNT-th sample."""

    classes = ("left", "right")

    def __init__(self, split: str, dies: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        count = TRAIN if split == "train" else TEST
        self.y = torch.randint(2, (count,), generator=generator)
        self.x = torch.randn(count, 6, generator=generator) + 1.5 * (2 * self.y[:, None] - 1)
        self._read = 0
        member = os.environ.get("PHALANX_MEMBER", "")
        self._dies_at = [int(at) for who, at in (pair.split(":") for pair in dies.split("+") if pair) if who == member]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._read += 1
        if self._read in self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[i], self.y[i]


def source(split: str) -> Deadly:
    """What the environment says about deaths is no setting of the run, so it can be resumed without them."""
    return Deadly(split, os.environ.get(f"DIES_IN_{split.upper()}", ""))


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
