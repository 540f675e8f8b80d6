"""What gossip and local steps share: every rank updates a replica of its own, and some ranks may average their gradients first.

The ranks that average in every step are those of a host that act as one, or all ranks before their first local step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.averager import Averager
from phalanx.grad.replicas import check_replicas
from phalanx.optim.unscaling import Unscaling
from phalanx.optim.wrapped import WrappedOptimizer


class OwnReplica(WrappedOptimizer):
    """A torch optimizer for schedulers and checkpoints, of a rank whose replica differs from the others'."""

    # GradScaler would not call `step` on a rank whose gradients overflowed, and the others would wait or count differently
    _step_supports_amp_scaling = True
    replicas_differ: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Communicator, bucket_bytes: int | None) -> None:
        super().__init__(optimizer, comm)
        self._bucket_bytes = bucket_bytes
        self._together: Communicator | None = None  # the ranks that average their gradients in every step
        self._home: Averager | None = None  # does that
        self._checked: list[torch.nn.Parameter] = []  # parameters that were equal on all ranks
        self._steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this replica, and do with the other ranks what this step asks for. Each rank calls its own `closure`."""
        if not self.comm.elastic:
            return self._step(closure)
        from phalanx.optim.shared_state import elastic_step

        with elastic_step(self):
            return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """The number of steps, the same on every rank."""
        return self._steps

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.parameters()[0] if p.requires_grad]

    # ---- ranks that average in every step --------------------------------------------------------------------------------------

    def _average_among(self, comm: Communicator | None) -> None:
        """From now on the ranks of `comm` average their gradients; no ranks do if it is None."""
        if self._home is not None:
            self._home.watch([], [])  # a watcher of nothing has no hooks
        self._together, self._home = comm, None
        if comm is not None:
            options: dict[str, Any] = {"wire": None, "bucket_bytes": self._bucket_bytes, "delayed": False}
            self._home = Averager(*self.parameters(), comm, AllReduce(), **options)

    def _average_at_home(self) -> None:
        """If some ranks average in every step, make every gradient their mean. After any `backward()` it already is."""
        if self._home is not None:
            if not self._home.watches(self.parameters()[0]):
                self._home.watch(*self.parameters())
            self._home.synchronize()

    def _unscaling(self) -> Unscaling:
        """What a GradScaler has left for this step. An overflow on one rank is one on all that average their gradients."""
        scaler = Unscaling(self, self.optimizer)
        if self._together is not None and isinstance(scaler.found, torch.Tensor):
            scaler.found = self._together.all_reduce(scaler.found.clone(), op="max")
        return scaler

    def _check_new(self, options: Callable[[], list[str]]) -> None:
        """Raise, on all ranks, if parameters that were not seen before differ, or `options`. Later replicas may differ."""
        params, names = self.parameters()
        known = {id(p) for p in self._checked}
        new = [(p, name) for p, name in zip(params, names) if id(p) not in known]
        if new:
            own = [p for p, _ in new], [name for _, name in new], options(), self.comm
            self.comm.as_one(lambda: check_replicas(*own))
            self._checked = params

    # ---- as every multi-node optimizer's --------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only accumulates; outside, too, unless some ranks average in every step."""
        if self._home is None:
            yield
        else:
            with self._home.pause():
                yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        if self._home is not None:
            self._home.drop()
        self.optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups."""
        return self.optimizer.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """All ranks call it. What is in flight arrives at the next step."""
        self.optimizer.add_param_group(param_group)
        if self._home is not None:
            self._home.watch(*self.parameters())
