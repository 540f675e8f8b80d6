"""`AllReduce(fused=True)`: decides whether a step can sum and update in one pass, and runs it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.arena import Arena
from phalanx.optim.one_pass import OnePass, why_not


class FusedStep:
    """Steps of `optimizer` that sum the gradients of all ranks and update in one pass."""

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
        self._optimizer, self._comm = optimizer, comm
        self._one_pass: OnePass | None = None
        self._warned = False

    def is_possible(self) -> bool:
        """Whether the next step can be fused. The answer is the same on all ranks. If it cannot, warn once."""
        why = why_not(self._optimizer, self._comm)
        if why and not self._warned:
            self._warned = True
            warnings.warn(f"AllReduce(fused=True): {why}; the step is the plain one. This is the only warning", stacklevel=4)
        return not why

    def update(self, arenas: Sequence[Arena]) -> None:
        """Update by the mean of the gradients in these arenas, which are each rank's own. All ranks call it."""
        if self._one_pass is None or not self._one_pass.covers(arenas):
            self._one_pass = OnePass(arenas, self._optimizer, self._comm)
        self._one_pass.update()

    @property
    def has_one_replica(self) -> bool:
        """Whether parameters and moments exist once for all ranks of the host, as they do after a fused step."""
        return self._one_pass is not None

    def take_state(self) -> None:
        """Copy a state that the optimizer has loaded to where all ranks see it."""
        if self._one_pass is not None:
            self._one_pass.take_state()
