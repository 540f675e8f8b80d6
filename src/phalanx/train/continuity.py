"""Keep an elastic run together when ranks die and join: move the lock to the next rank 0, and repeat lost checkpoints.

All ranks decide the same at the same place in the loop. A rank that joins receives the state they depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.comm.communicator import Communicator
from phalanx.optim.wrapped import WrappedOptimizer
from phalanx.train.checkpoint import Checkpointer
from phalanx.train.checkpoint.lock import DirectoryLock


class Continuity:
    """Follows the membership of `comm` for a run that writes in `out`."""

    def __init__(self, comm: Communicator, out: Path | None) -> None:
        self._comm, self._out = comm, out
        self._seen = comm.membership.epoch
        self._lock: DirectoryLock | None = None
        self.listen_every = 1  # steps between checks whether a rank was asked to stop

    def share(self, optimizer: WrappedOptimizer, checkpoints: Checkpointer | None, **parts: Any) -> None:
        """Register the state that joining ranks receive. On a joining rank, wait until it has arrived."""
        if checkpoints is not None:
            parts["checkpoints"] = checkpoints
        optimizer.share(continuity=self, **parts)

    def follow(self, checkpoints: Checkpointer | None, save: Callable[[], None]) -> None:
        """Call after a step on all ranks. If the membership has changed, take the lock and repeat a lost checkpoint."""
        if self._seen == self._comm.membership.epoch:
            return
        self._seen = self._comm.membership.epoch
        if self._out is not None and self._comm.rank == 0 and self._lock is None:
            self._lock = DirectoryLock(self._out)
        if checkpoints is not None and checkpoints.lost():
            save()

    def close(self) -> None:
        """Release the directory to other jobs."""
        if self._lock is not None:
            self._lock.release()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "listen_every": self.listen_every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self.listen_every = state["seen"], state["listen_every"]
