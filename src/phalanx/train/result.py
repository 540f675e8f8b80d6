"""The position of a run, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = float("nan")


@dataclass(frozen=True)
class Result:
    """How a run ended: the results of its last evaluation, its seconds, and why: "epochs", "target" or "stopped"."""

    epochs: int
    steps: int
    found: Mapping[str, float]  # by the keys of the task's metrics; empty before the first evaluation
    seconds: float
    why: str
    signal: int = 0  # the signal that stopped it

    @property
    def loss(self) -> float:
        return self.found.get("loss", UNKNOWN)

    @property
    def top1(self) -> float:
        """Top-1 accuracy; NaN if the task has none."""
        return self.found.get("top1", UNKNOWN)

    @property
    def top5(self) -> float:
        return self.found.get("top5", UNKNOWN)

    def row(self) -> dict[str, Any]:
        """The result as plain data, for records."""
        own = {name: value for name, value in vars(self).items() if name != "found"}
        return dict(self.found) | own


@dataclass
class RunPosition:
    """The position of a run; part of every checkpoint. `seconds` counts training and evaluation over all starts of the run."""

    step: int = 0
    epoch: int = 0  # complete ones, evaluated if evaluation was due
    seconds: float = 0.0
    found: dict[str, float] = field(default_factory=dict)  # by the last evaluation

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
