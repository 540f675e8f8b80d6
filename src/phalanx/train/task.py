"""What a run learns, as a value: its loss, what evaluations count, and the words for it.

    MINE = Task(
        name="depth", unit="images",
        loss=lambda outputs, y: (outputs - y).abs().mean(),
        measure=lambda outputs, y: {"loss": ((outputs - y).abs().mean((1, 2)).sum(), len(y))},
        metrics=(Metric("loss", "mean error", lower_is_better=True),),
    )

`phalanx train --set task=my_package.tasks:MINE` takes it. Those that Phalanx has are in tasks.py.

An evaluation is exact however samples are shared out: `measure` gives a sum and a count per batch, the sums and counts of all
ranks are added, and `derive` makes further results of the means.
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
    """A batch of the loader as what the network takes and what the loss compares its outputs with."""
    x, y = batch
    return x, y


def one_unit(y: Any) -> int:
    """A sample counts as one."""
    return 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run learns.

    Args:
        name: In records and messages.
        loss: The mean loss of a batch from the network's outputs and what `unpack` gives as second.
        measure: Sums and counts over a batch, by name, for evaluations. The network is in evaluation mode.
        metrics: The results that people see, the most important first. It decides when `target` is reached.
        derive: Further results from the means over the whole test set.
        correct: How many samples of a training batch are right; None for tasks that have no accuracy.
        unpack: From a batch of the loader to what the network takes, and what its outputs are compared with. The second one has
            a length, the number of samples.
        unit: What speed counts, in the plural.
        units: How many of them are in a sample, from the second part of a batch with one sample.
        classes: Whether samples have classes, which the data must then know.
        check: Raises ValueError if the outputs for a batch of one sample do not suit the data.
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
        """The metric that `target` is about."""
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
        """The words of the task as plain data, for reports."""
        shown = [
            {"key": m.key, "words": m.words, "percent": m.percent, "lower_is_better": m.lower_is_better} for m in self.metrics
        ]
        return {"name": self.name, "unit": self.unit, "metrics": shown}
