"""What a sink is: something that takes the rows of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.train.config import RunConfig

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """What a sink learns before the first row. `step`: the steps that earlier starts of the run have done."""

    config: RunConfig
    ranks: int
    train_samples: int
    test_samples: int
    environment: dict[str, Any]  # as environment.json has it
    out: Path | None = None
    step: int = 0
    resume: bool = False


class Sink(Protocol):
    """Takes rows. Any of its calls may raise; `Sinks` turns that into a warning.

    Rows have the kinds of `metrics.jsonl` and three more, which that file does not need: `init` when a start of the run begins,
    `epoch` and `evaluating` when these begin.
    """

    name: str

    def begin(self, facts: RunFacts) -> None:
        """The first step comes next."""

    def write(self, row: Row) -> None:
        """Take a row."""

    def close(self) -> None:
        """No row comes any more. A run that ended well has sent a row of kind `end` before."""
