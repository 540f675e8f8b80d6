"""Our part of a Lightning strategy, shared by `lightning.pytorch` and `pytorch_lightning`, whose classes differ.

Lightning's DDPStrategy starts the ranks, connects them and reduces metrics. A multi-node optimizer replaces
DistributedDataParallel, so the module is not wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.create import create_communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.gossip import Gossip
from phalanx.grad.local import DiLoCo, LocalSGD
from phalanx.grad.wires import Wire
from phalanx.integrations.plan import Plan, average, pause, seconds_of
from phalanx.nn.init import bcast_parameters
from phalanx.optim.wrapped import WrappedOptimizer
from phalanx.schedule import Schedule

TIMEOUT = timedelta(minutes=30)  # Lightning's own: work on rank 0 alone may take minutes. A dead rank is noticed at once


class ClosureFirst(WrappedOptimizer):
    """Calls a closure once, then steps without it.

    Lightning's closure runs forward and backward. Inside `step`, an optimizer could call it again, as LBFGS does, so the
    gradients would have to be averaged in every call: no double buffering, no fused step.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.optimizer.step()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT002  torch's signature
        self.optimizer.zero_grad(set_to_none)


class MultiNodeReplicas:
    """Mixed into Lightning's DDPStrategy: an unwrapped module, and multi-node optimizers."""

    comm: Communicator

    def __init__(
        self,
        *,
        sync: AllReduce | Gossip | LocalSGD | DiLoCo | None = None,
        double_buffering: bool = False,
        wire: Wire | None = None,
        bucket_bytes: int | None = None,
        algorithm: Schedule | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = TIMEOUT,
        start_method: str = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )  # type: ignore[call-arg]  # DDPStrategy's
        self._plan = Plan(sync, double_buffering, wire, bucket_bytes)
        self._algorithm, self._seconds = algorithm, seconds_of(timeout)

    # ---- set-up ------------------------------------------------------------------------------------------------------------

    def setup_environment(self: Any) -> None:
        """Connect the ranks: Lightning's process group, and a communicator that uses it."""
        super().setup_environment()  # type: ignore[misc]
        self.comm = create_communicator(self._algorithm, timeout=self._seconds)

    def configure_ddp(self: Any) -> None:
        """Give all ranks the module of rank 0, as DistributedDataParallel does, without wrapping it."""
        bcast_parameters(self.model, self.comm)

    def setup_optimizers(self: Any, trainer: Any) -> None:
        """Make every optimizer of `configure_optimizers` a multi-node one. Schedulers keep the inner optimizer."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        models = [self.lightning_module, *[None] * len(self.optimizers)]  # only the first follows the statistics
        self.optimizers = [self._plan.wrap(opt, self.comm, model) for opt, model in zip(self.optimizers, models)]

    def teardown(self: Any) -> None:
        """Close the communicator."""
        comm = self.__dict__.pop("comm", None)
        if comm is not None:
            comm.close()
        super().teardown()  # type: ignore[misc]

    # ---- the step ----------------------------------------------------------------------------------------------------------

    def optimizer_step(self: Any, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Like Lightning's, but the closure runs before the step, unless the optimizer has to call it several times."""
        scales = getattr(self.precision_plugin, "scaler", None) is not None  # if so, the plug-in itself calls the closure first
        if not scales and not isinstance(optimizer.optimizer, torch.optim.LBFGS):
            optimizer = ClosureFirst(optimizer, self.comm)
        return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]

    def block_backward_sync(self: Any) -> AbstractContextManager[Any]:
        """For `accumulate_grad_batches`: inside, backward only accumulates gradients."""
        return pause(self.optimizers)

    # ---- one model for all ranks ---------------------------------------------------------------------------------------------

    def on_validation_start(self: Any) -> None:
        """Average, so that all ranks evaluate the same model."""
        self._average()
        super().on_validation_start()  # type: ignore[misc]

    def on_train_end(self: Any) -> None:
        """Average, so that all ranks return the same model."""
        self._average()
        super().on_train_end()  # type: ignore[misc]

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """Return the mean of all replicas for a checkpoint. All ranks call it, as for every Lightning checkpoint."""
        self._average()
        return super().lightning_module_state_dict()  # type: ignore[misc]

    def _average(self: Any) -> None:
        """Average the replicas. After training they are already equal, and the communicator is closed."""
        comm = self.__dict__.get("comm")
        average(optimizer for optimizer in self.optimizers if optimizer.comm is comm)
