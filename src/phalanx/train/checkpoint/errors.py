"""Errors of checkpoints, and the text of system errors."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or none of those that exist can be used."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")


def explain(error: OSError) -> str:
    """The system's error message, without Python's prefix."""
    where = f" ({Path(error.filename).name})" if isinstance(error.filename, str) else ""
    return (error.strerror or str(error)) + where
