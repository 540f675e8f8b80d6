"""The rows of a run as TensorBoard's scalars, in DIR/tensorboard: `tensorboard --logdir DIR`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from phalanx.train.config import ConfigError

SCALARS = {
    "interval": {
        "train/loss": "loss",
        "train/accuracy": "accuracy",
        "train/learning rate": "rate",
        "train/batch": "batch",
        "speed/images per second": "images_per_second",
        "speed/characters per second": "characters_per_second",
        "speed/samples per second": "samples_per_second",
        "speed/waiting": "wait_share",
        "speed/overlapped": "overlapped_share",
    },
    "evaluation": {
        "test/top-1": "top1",
        "test/top-5": "top5",
        "test/loss": "loss",
        "test/perplexity": "perplexity",
        "test/bits per character": "bits_per_character",
        "test/spread": "spread",
    },
}


def check_tensorboard() -> None:
    """Raise before training starts, rather than after the first interval."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tensorboard=true, but the package is not installed: pip install tensorboard (or phalanx[tensorboard])")


class TensorBoard:
    """Writes rows to `directory`; a resumed run hides the points of steps that it repeats."""

    def __init__(self, directory: Path, *, step: int) -> None:
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=step + 1 if step else None)

    def write(self, row: dict[str, Any]) -> None:
        for tag, key in SCALARS.get(row["kind"], {}).items():
            if row.get(key) is not None:
                self._writer.add_scalar(tag, row[key], row["step"])
        for part, seconds in row.get("times", {}).items():
            self._writer.add_scalar(f"step seconds/{part}", seconds, row["step"])

    def close(self) -> None:
        self._writer.close()
