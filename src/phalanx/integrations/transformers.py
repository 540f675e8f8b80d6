"""Hugging Face's Trainer with the multi-node optimizer, gossip included, and without DistributedDataParallel.

    trainer = PhalanxTrainer(model=model, args=args, train_dataset=data, sync=phalanx.Gossip())

A plain Trainer wraps the model in DistributedDataParallel, so a multi-node optimizer inside it would average every gradient a
second time. For your own Trainer: `class MyTrainer(MultiNodeTraining, Seq2SeqTrainer): ...`
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.create import create_communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.gossip import Gossip
from phalanx.grad.local import DiLoCo, LocalSGD
from phalanx.grad.wires import Wire
from phalanx.integrations.plan import Plan, average, multi_node, pause
from phalanx.nn.init import bcast_parameters
from phalanx.schedule import Schedule

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "phalanx.integrations.transformers needs the packages transformers and accelerate: pip install 'transformers[torch]'"
    ) from error


class Bare(torch.nn.Module):
    """Takes the place of DistributedDataParallel: the Trainer treats the model as wrapped, and calls its `no_sync`."""

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.module = module
        self._optimizers = [optimizer]  # in a list, so that it is not part of the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """For `gradient_accumulation_steps`: inside, backward only accumulates gradients."""
        return pause(self._optimizers)


class Together(TrainerCallback):
    """Averages at the end of every epoch, so that all ranks end training with the same model."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        average([kwargs.get("optimizer")])


class MultiNodeTraining:
    """Mixin for a Trainer: `create_optimizer` makes a multi-node optimizer, and DistributedDataParallel is not used.

    `evaluate` and checkpoints first make all replicas equal: gossip's weights, and running statistics of batch norms.
    """

    def __init__(
        self,
        *args: Any,
        sync: AllReduce | Gossip | LocalSGD | DiLoCo | None = None,
        double_buffering: bool = False,
        wire: Wire | None = None,
        bucket_bytes: int | None = None,
        algorithm: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        self._plan = Plan(sync, double_buffering, wire, bucket_bytes)
        self._algorithm = algorithm
        self.comm: Communicator | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(Together())  # type: ignore[attr-defined]  # the Trainer's

    def create_optimizer(self: Any, model: Any = None) -> Any:
        """Wrap the Trainer's optimizer, or the one that you passed, in a multi-node one."""
        self._check()
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if multi_node(optimizer) is None:  # already wrapped in a second `train()`
            if self.comm is None:  # accelerate has connected the ranks by now
                self.comm = create_communicator(self._algorithm, timeout=float(self.args.ddp_timeout))
            self.optimizer = self._plan.wrap(optimizer, self.comm, self.model if model is None else model)
        return self.optimizer

    def _wrap_model(self: Any, model: Any, training: bool = True, dataloader: Any = None) -> Any:  # noqa: FBT002  as there
        if not training:
            return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        if isinstance(model, Bare):
            return model
        self._check()
        own = multi_node(self.optimizer)
        bcast_parameters(model, own.comm)  # all ranks start with rank 0's, as with DistributedDataParallel
        # mixed precision and torch.compile as configured, but no DistributedDataParallel
        return Bare(self.accelerator.prepare_model(model, evaluation_mode=True), own)

    def _check(self: Any) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "PhalanxTrainer trains replicas, and DeepSpeed and FSDP cut them into shards: leave one of the two out. "
                'With FSDP you can use Phalanx\'s backend: torch.distributed.init_process_group("phalanx")'
            )
        if self.args.n_gpu > 1:
            raise ValueError(
                f"this process has {self.args.n_gpu} GPUs, and PhalanxTrainer uses one per process: start it with "
                f"torchrun --nproc-per-node {self.args.n_gpu}, or choose one GPU with CUDA_VISIBLE_DEVICES"
            )

    def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's, which checks the class of the model in some places."""
        return super().training_step(model.module if isinstance(model, Bare) else model, *args, **kwargs)  # type: ignore[misc]

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's, with the same model on all ranks. All ranks call it, as always."""
        average([self.optimizer])
        return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT002  as there
        """Like the Trainer's. During training it saves the mean of all replicas."""
        if _internal_call:  # on all ranks; your own call may be on one
            average([self.optimizer])
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]


class PhalanxTrainer(MultiNodeTraining, Trainer):
    """Hugging Face's Trainer with a multi-node optimizer.

    Args:
        args: The Trainer's own arguments, `model` first.
        sync: How replicas stay together: `phalanx.AllReduce(...)`, the default, `Gossip`, `LocalSGD` or `DiLoCo`.
        double_buffering: As in `create_multi_node_optimizer`, and so are `wire` and `bucket_bytes`.
        wire: Send torch.float16, torch.bfloat16, `phalanx.Int8(...)` or `phalanx.PowerSGD(...)` instead of the gradients as
            they are.
        bucket_bytes: The size of a group of gradients that is sent together.
        algorithm: The schedule of all-reduces, as in `create_communicator`.
        kwargs: The Trainer's own keyword arguments.

    Raises:
        ValueError: In `train()`, with DeepSpeed and FSDP.

    Example:
        >>> from phalanx.integrations.transformers import PhalanxTrainer  # doctest: +SKIP
        >>> PhalanxTrainer(model=model, args=args, train_dataset=data, sync=phalanx.Gossip()).train()  # doctest: +SKIP
    """
