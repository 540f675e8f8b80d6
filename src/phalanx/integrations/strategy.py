"""The part of a Lightning strategy that is ours, for `lightning.pytorch` and for `pytorch_lightning`, whose classes differ.

Lightning's DDPStrategy starts the ranks, connects them and reduces metrics. In the place of DistributedDataParallel comes a
multi-node optimizer: the module stays bare.
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

TIMEOUT = timedelta(minutes=30)  # Lightning's own: work of rank 0 alone may take minutes. A rank that dies is noticed at once


class ClosureFirst(WrappedOptimizer):
    """Calls a closure once, then makes the step without it.

    Lightning's closure is forward and backward. Inside of `step` an optimizer could call it again, as LBFGS does, so there the
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
    """Mixed into Lightning's DDPStrategy: the bare module, and multi-node optimizers."""

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
        """Give all ranks the module of rank 0, as DistributedDataParallel does, and wrap it in nothing."""
        bcast_parameters(self.model, self.comm)

    def setup_optimizers(self: Any, trainer: Any) -> None:
        """Make every optimizer of `configure_optimizers` a multi-node one. Schedulers keep the optimizer inside it."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        models = [self.lightning_module, *[None] * len(self.optimizers)]  # one of them follows the statistics
        self.optimizers = [self._plan.wrap(opt, self.comm, model) for opt, model in zip(self.optimizers, models)]

    def teardown(self: Any) -> None:
        """Leave the ranks."""
        comm = self.__dict__.pop("comm", None)
        if comm is not None:
            comm.close()
        super().teardown()  # type: ignore[misc]

    # ---- the step ----------------------------------------------------------------------------------------------------------

    def optimizer_step(self: Any, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As Lightning's. The closure runs before the step, except for an optimizer that wants to call it several times."""
        scales = getattr(self.precision_plugin, "scaler", None) is not None  # then the plug-in itself calls the closure first
        if not scales and not isinstance(optimizer.optimizer, torch.optim.LBFGS):
            optimizer = ClosureFirst(optimizer)
        return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]

    def block_backward_sync(self: Any) -> AbstractContextManager[Any]:
        """For `accumulate_grad_batches`: backward inside only accumulates."""
        return pause(self.optimizers)

    # ---- one model for all ranks ---------------------------------------------------------------------------------------------

    def on_validation_start(self: Any) -> None:
        """All ranks evaluate the same model."""
        self._average()
        super().on_validation_start()  # type: ignore[misc]

    def on_train_end(self: Any) -> None:
        """All ranks return the same model."""
        self._average()
        super().on_train_end()  # type: ignore[misc]

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """What a checkpoint holds is the mean of all replicas. All ranks call it, as for every checkpoint of Lightning."""
        self._average()
        return super().lightning_module_state_dict()  # type: ignore[misc]

    def _average(self: Any) -> None:
        """Of optimizers whose training has ended the replicas are equal already, and their communicator is closed."""
        comm = self.__dict__.get("comm")
        average(optimizer for optimizer in self.optimizers if optimizer.comm is comm)
