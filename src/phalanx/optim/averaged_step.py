"""One step of a multi-node optimizer: every gradient becomes the mean over the ranks, then the torch optimizer updates.

`MultiNodeOptimizer.step` calls this. After a plain `backward()` the gradients are means already, and only the update is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.averager import Averager
from phalanx.optim.fused import FusedStep
from phalanx.optim.wrapped import parameters_of


class AveragedStep:
    """Steps of `optimizer` with gradients from `averager`."""

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Communicator, sync: AllReduce, averager: Averager) -> None:
        self._optimizer, self._averager = optimizer, averager
        self.fused = FusedStep(optimizer, comm) if sync.fused and comm.size > 1 else None

    def take(self, closure: Callable[[], Any] | None) -> Any:
        """Average and update, on all ranks."""
        if closure is not None:
            result: Any = self._optimizer.step(self._averaged(closure))
        elif self.fused is not None and self.fused.is_possible():
            result = None
            self._averager.in_backward = False
            self.watch_changes()
            self.fused.update(self._averager.collect())
        else:
            result = self._take_plain()
        self._averager.next_step()
        self._averager.check_replicas(self._optimizer.state)
        return result

    def _take_plain(self) -> Any:
        self.synchronize()
        self._averager.in_backward = not self._averager.delayed
        self._averager.drop_graphs()
        return self._optimizer.step() if self._averager.ready else None

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the closure so that gradients and loss are means: an optimizer that reads the loss acts the same on all ranks."""
        if self._averager.delayed:
            raise ValueError("step(closure) needs the current gradients, but double_buffering gives those of the previous step")

        def averaged() -> Any:
            self._averager.next_evaluation()
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._averager.drop_graphs()
            return self._averager.mean(loss)

        return averaged

    def synchronize(self) -> None:
        """Make every gradient the mean, unless it is already."""
        self.watch_changes()
        self._averager.synchronize()

    def watch_changes(self) -> None:
        """Follow your edits of `param_groups` or of the inner optimizer."""
        params = dict.fromkeys(p for group in self._optimizer.param_groups for p in group["params"])
        if not self._averager.watches(list(params)):
            self._averager.watch(*parameters_of(self._optimizer))
