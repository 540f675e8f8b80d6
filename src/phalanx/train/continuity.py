"""What keeps an elastic run together when ranks die and join: a lock that moves to the next rank 0, and checkpoints made again.

All ranks come to the same conclusions at the same place of the loop. A rank that joins gets what they depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.optim.multi_node import MultiNodeOptimizer
from phalanx.train.checkpoint import Checkpointer
from phalanx.train.checkpoint.lock import DirectoryLock


class Continuity:
    """Follows the membership of `comm` for a run that writes in `out`."""

    def __init__(self, comm: Communicator, out: Path | None) -> None:
        self._comm, self._out = comm, out
        self._seen = comm.membership.epoch
        self._lock: DirectoryLock | None = None
        self.listen_every = 1  # steps between two looks at whether a rank was asked to stop

    def share(self, optimizer: torch.optim.Optimizer, checkpoints: Checkpointer | None, **parts: Any) -> None:
        """Name what ranks that join later get from the others; on such a rank, wait until it has it."""
        assert isinstance(optimizer, MultiNodeOptimizer)
        if checkpoints is not None:
            parts["checkpoints"] = checkpoints
        optimizer.share(continuity=self, **parts)

    def follow(self, checkpoints: Checkpointer | None, save: Callable[[], None]) -> None:
        """After a step, on all ranks: if the membership has changed, see to the directory."""
        if self._seen == self._comm.membership.epoch:
            return
        self._seen = self._comm.membership.epoch
        if self._out is not None and self._comm.rank == 0 and self._lock is None:
            self._lock = DirectoryLock(self._out)
        if checkpoints is not None and checkpoints.lost():
            save()

    def close(self) -> None:
        """Let other jobs into the directory."""
        if self._lock is not None:
            self._lock.release()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "listen_every": self.listen_every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self.listen_every = state["seen"], state["listen_every"]
