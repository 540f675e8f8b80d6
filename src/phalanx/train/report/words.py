"""The vocabulary of a run's task: its results and its unit of speed, from the run's records.

A run without it, from an earlier version, is image classification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.train.report.axis import number, percent

if TYPE_CHECKING:
    from phalanx.train.report.run import Run

LONGEST = 40  # characters of a word


@dataclass(frozen=True, slots=True)
class Shown:
    """A result of evaluations, as the page shows it."""

    key: str
    words: str
    percent: bool = False
    lower_is_better: bool = False

    @property
    def title(self) -> str:
        return "Test loss" if self.key == "loss" else self.words[:1].upper() + self.words[1:]

    def text(self, value: float) -> str:
        return percent(value) if self.percent else number(value)


LOSS = Shown("loss", "loss", lower_is_better=True)
TOP1, TOP5 = Shown("top1", "top-1", percent=True), Shown("top5", "top-5", percent=True)
IMAGES = (TOP1, TOP5, LOSS)


@dataclass(frozen=True, slots=True)
class Words:
    """A task's names for its results, most important first, and its unit of speed, `per_sample` per sample."""

    metrics: tuple[Shown, ...] = IMAGES
    unit: str = "images"
    per_sample: float = 1.0

    @property
    def speed(self) -> str:
        """The name of the speed in rows."""
        return f"{self.unit}_per_second"

    @property
    def goal(self) -> Shown:
        return self.metrics[0]

    @property
    def goal_title(self) -> str:
        return "Test accuracy" if self.goal == TOP1 else self.goal.title


def words_of(run: Run) -> Words:
    """Read the vocabulary from a run's records, as far as it is valid."""
    recorded = run.environment.get("task")
    if not isinstance(recorded, dict):
        return Words()
    unit, per_sample, metrics = recorded.get("unit"), recorded.get("per_sample"), recorded.get("metrics")
    found = [_read(metric) for metric in metrics[:20]] if isinstance(metrics, list) else []
    return Words(
        tuple(metric for metric in found if metric is not None) or IMAGES,
        unit[:LONGEST] if isinstance(unit, str) and unit else "images",
        float(per_sample) if isinstance(per_sample, int | float) and 0 < per_sample < 1e12 else 1.0,
    )


def _read(metric: Any) -> Shown | None:
    key, words = (metric.get("key"), metric.get("words")) if isinstance(metric, dict) else (None, None)
    if not isinstance(key, str) or not isinstance(words, str) or not key or not words:
        return None
    return Shown(key[:LONGEST], words[:LONGEST], metric.get("percent") is True, metric.get("lower_is_better") is True)


def all_metrics(runs: Sequence[Run]) -> list[Shown]:
    """The results of all runs, each once."""
    return list(dict.fromkeys(metric for run in runs for metric in words_of(run).metrics))
