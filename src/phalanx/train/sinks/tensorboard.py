"""The rows of a run as TensorBoard's scalars, in DIR/tensorboard: `tensorboard --logdir DIR`."""

from __future__ import annotations

from typing import Any

from phalanx.train.sinks.scalars import scalars
from phalanx.train.sinks.sink import Row, RunFacts


class TensorBoard:
    """Writes rows to DIR/tensorboard; a resumed run hides the points of steps that it repeats."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, facts: RunFacts) -> None:
        if facts.out is None:  # a run without a directory
            return
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(facts.out / "tensorboard"), purge_step=facts.step + 1 if facts.step else None)

    def write(self, row: Row) -> None:
        if self._writer is not None:
            for tag, value in scalars(row).items():
                self._writer.add_scalar(tag, value, row["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
