"""A strategy for `lightning.fabric.Fabric` that trains with the multi-node optimizer, gossip included.

fabric = Fabric(strategy=PhalanxStrategy(sync=phalanx.Gossip()), devices=4, accelerator="cpu")
model, optimizer = fabric.setup(model, optimizer)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
from phalanx.integrations.strategy import TIMEOUT
from phalanx.nn.init import bcast_parameters
from phalanx.schedule import Schedule

try:
    from lightning.fabric.strategies import DDPStrategy
except ImportError as error:
    raise ImportError("phalanx.integrations.fabric needs the package lightning: pip install lightning") from error


class PhalanxStrategy(DDPStrategy):
    """Fabric's DDPStrategy with a multi-node optimizer in place of DistributedDataParallel.

    Set the model and its optimizers up together: `model, optimizer = fabric.setup(model, optimizer)`. `fabric.save` first makes
    all replicas equal. Before an evaluation, call `optimizer.average_()` on all ranks: gossip and batch norms need it.

    Args:
        sync: How replicas stay together: `phalanx.AllReduce(...)`, the default, `Gossip`, `LocalSGD` or `DiLoCo`.
        double_buffering: As in `create_multi_node_optimizer`, and so are `wire` and `bucket_bytes`.
        wire: Send torch.float16, torch.bfloat16, `phalanx.Int8(...)` or `phalanx.PowerSGD(...)` instead of the gradients as
            they are.
        bucket_bytes: The size of a group of gradients that is sent together.
        algorithm: The schedule of all-reduces, as in `create_communicator`.
        process_group_backend: Of Fabric's own process group: "gloo", "nccl" or "phalanx".
        timeout: Bounds every wait.
        start_method: How Fabric starts the ranks if no launcher has: "popen", "spawn", "fork" or "forkserver".
        fabrics: Set by Fabric itself: `accelerator`, `parallel_devices`, `cluster_environment`, `checkpoint_io`, `precision`.

    Raises:
        TypeError: If you pass an option of DistributedDataParallel.

    Example:
        >>> from phalanx.integrations.fabric import PhalanxStrategy  # doctest: +SKIP
        >>> fabric = Fabric(strategy=PhalanxStrategy(sync=phalanx.Gossip()))  # doctest: +SKIP
    """

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
        **fabrics: Any,
    ) -> None:
        extra = fabrics.keys() - {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision"}
        if extra:  # DDPStrategy would keep them for a DistributedDataParallel, which we do not use
            raise TypeError(
                f"PhalanxStrategy has no argument {sorted(extra)[0]!r}: options of DistributedDataParallel do not apply"
            )
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,  # type: ignore[arg-type, unused-ignore]
            **fabrics,
        )
        self._plan = Plan(sync, double_buffering, wire, bucket_bytes)
        self._algorithm, self._seconds = algorithm, seconds_of(timeout)
        self._optimizers: list[Any] = []
        self._backward_sync_control = _Pausing(self._optimizers)

    def setup_environment(self) -> None:
        """Connect the ranks: Fabric's process group, and a communicator that uses it."""
        super().setup_environment()
        self.comm = create_communicator(self._algorithm, timeout=self._seconds)

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Give all ranks the module of rank 0, without wrapping it."""
        bcast_parameters(module, self.comm)
        return module

    def setup_module_and_optimizers(self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        """Set up the module and its optimizers. The first optimizer also synchronises the module's running statistics."""
        module = self.setup_module(module)
        models = [module, *[None] * len(optimizers)]
        made = [self._plan.wrap(optimizer, self.comm, model) for optimizer, model in zip(optimizers, models)]
        self._optimizers += made
        return module, made, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Set up an optimizer without its module."""
        self._optimizers.append(self._plan.wrap(optimizer, self.comm, None))
        return self._optimizers[-1]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save the mean of all replicas. All ranks call it, as for every checkpoint of Fabric."""
        average(self._optimizers)
        super().save_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        """Close the communicator."""
        comm = self.__dict__.pop("comm", None)
        if comm is not None:
            comm.close()
        super().teardown()


class _Pausing:
    """Implements `fabric.no_backward_sync(model)`."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = optimizers

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return pause(self._optimizers) if enabled else nullcontext()
