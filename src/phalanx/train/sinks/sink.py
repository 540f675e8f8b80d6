"""The interface of a sink, which receives the rows of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.train.config import RunConfig

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """What a sink gets before the first row. `step` counts the steps of earlier starts of the run."""

    config: RunConfig
    ranks: int
    train_samples: int
    test_samples: int
    environment: dict[str, Any]  # the contents of environment.json
    out: Path | None = None
    step: int = 0
    resume: bool = False


class Sink(Protocol):
    """Takes rows. Any of its calls may raise; `Sinks` turns that into a warning.

    Rows have the kinds of `metrics.jsonl` and three more that are not in that file: `init` when a start of the run begins,
    `epoch` and `evaluating` when these begin.
    """

    name: str

    def begin(self, facts: RunFacts) -> None:
        """Called before the first step."""

    def write(self, row: Row) -> None:
        """Take a row."""

    def close(self) -> None:
        """Called after the last row. A run that ended well has sent a row of kind `end` before."""
