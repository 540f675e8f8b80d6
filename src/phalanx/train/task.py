"""What a run learns, as a value: its loss, its evaluation metrics, and their names.

    MINE = Task(
        name="depth", unit="images",
        loss=lambda outputs, y: (outputs - y).abs().mean(),
        measure=lambda outputs, y: {"loss": ((outputs - y).abs().mean((1, 2)).sum(), len(y))},
        metrics=(Metric("loss", "mean error", lower_is_better=True),),
    )

Use it with `phalanx train --set task=my_package.tasks:MINE`. Phalanx's own tasks are in tasks.py.

An evaluation is exact for any distribution of samples: `measure` returns a sum and a count per batch, the sums and counts of all
ranks are added, and `derive` computes further results from the means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.train.networks import SampleFacts

SPEED = "_per_second"  # how the name of a speed ends, in rows
Totals = Mapping[str, tuple[Tensor, Tensor | int]]  # name -> sum and count of a batch


@dataclass(frozen=True, slots=True)
class Metric:
    """A result of evaluations: its name in records, and how people read it. `of_loss`: computed from the task's own loss."""

    key: str
    words: str
    percent: bool = False
    lower_is_better: bool = False
    of_loss: bool = False


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Split a batch of the loader into the network's input and what the loss compares its outputs with."""
    x, y = batch
    return x, y


def one_unit(y: Any) -> int:
    """Count a sample as one unit."""
    return 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run learns.

    Args:
        name: The name in records and messages.
        loss: The mean loss of a batch from the network's outputs and the second result of `unpack`.
        measure: Sums and counts over a batch, by name, for evaluations. The network is in evaluation mode.
        metrics: The results to show, most important first. The first one decides when `target` is reached.
        derive: Further results from the means over the whole test set.
        correct: The number of correct samples in a training batch; None for tasks without accuracy.
        unpack: Splits a batch of the loader into the network's input and what its outputs are compared with. The latter has
            a length, the number of samples.
        unit: The unit of speed, in the plural.
        units: The units per sample, from the second part of a batch with one sample.
        classes: Whether samples have classes, which the data must then provide.
        check: Raises ValueError if the outputs for a batch of one sample do not fit the data.
    """

    name: str
    loss: Callable[[Any, Any], Tensor]
    measure: Callable[[Any, Any], Totals]
    metrics: tuple[Metric, ...]
    derive: Callable[[dict[str, float]], dict[str, float]] = dict
    correct: Callable[[Any, Any], Tensor] | None = None
    unpack: Callable[[Any], tuple[Any, Any]] = as_pair
    unit: str = "samples"
    units: Callable[[Any], int] = one_unit
    classes: bool = False
    check: Callable[[Any, SampleFacts], None] | None = None

    def __post_init__(self) -> None:
        if not self.metrics or not all(isinstance(metric, Metric) for metric in self.metrics):
            raise ValueError(f"Task {self.name}: metrics are at least one Metric")

    @property
    def goal(self) -> Metric:
        """The metric that `target` refers to."""
        return self.metrics[0]

    @property
    def speed(self) -> str:
        """The name of the speed in records."""
        return f"{self.unit}{SPEED}"

    def verdict(self, found: Mapping[str, float]) -> str:
        """The most important result, in words; empty if there was no evaluation."""
        value = found.get(self.goal.key, float("nan"))
        words = "accuracy" if self.goal.key == "top1" else self.goal.words
        return f"test {words} {value:.4f}" if value == value else ""

    def reached(self, target: float, found: Mapping[str, float]) -> bool:
        """Whether an evaluation has reached a target."""
        value = found.get(self.goal.key, float("nan"))
        return value <= target if self.goal.lower_is_better else value >= target

    def describe(self) -> dict[str, Any]:
        """The task's vocabulary as plain data, for reports."""
        shown = [
            {"key": m.key, "words": m.words, "percent": m.percent, "lower_is_better": m.lower_is_better} for m in self.metrics
        ]
        return {"name": self.name, "unit": self.unit, "metrics": shown}
