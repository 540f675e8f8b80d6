"""Where a run stands, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """How a run ended: its last evaluation, its seconds, and why it ended: "epochs", "target" or "stopped"."""

    epochs: int
    steps: int
    top1: float
    top5: float
    loss: float
    seconds: float
    why: str
    signal: int = 0  # the signal that stopped it


@dataclass
class RunPosition:
    """Where a run stands; part of every checkpoint. `seconds` counts training and evaluation over all starts of the run."""

    step: int = 0
    epoch: int = 0  # complete ones, evaluated where evaluation is due
    seconds: float = 0.0
    top1: float = float("nan")
    top5: float = float("nan")
    loss: float = float("nan")

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
