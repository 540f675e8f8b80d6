"""Shared by all frameworks: the options of a multi-node optimizer, kept until the framework has made an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.gossip import Gossip
from phalanx.grad.local import DiLoCo, LocalSGD
from phalanx.grad.wires import Wire
from phalanx.optim.create import create_multi_node_optimizer
from phalanx.optim.wrapped import WrappedOptimizer


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of `create_multi_node_optimizer`."""

    sync: AllReduce | Gossip | LocalSGD | DiLoCo | None = None
    double_buffering: bool = False
    wire: Wire | None = None
    bucket_bytes: int | None = None

    def wrap(self, optimizer: torch.optim.Optimizer, comm: Communicator, model: torch.nn.Module | None) -> Any:
        """Wrap an optimizer in a multi-node one, which also synchronises the running statistics of `model`. Collective."""
        wrapped: Any = create_multi_node_optimizer(  # type: ignore[call-overload, unused-ignore]  # any of the two kinds
            optimizer,
            comm,
            sync=self.sync,
            double_buffering=self.double_buffering,
            wire=self.wire,
            bucket_bytes=self.bucket_bytes,
        )
        if model is not None:
            wrapped.follow(model)
        return wrapped


def seconds_of(timeout: timedelta) -> float:
    """Lightning's timeout in seconds."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is a datetime.timedelta, as in Lightning's DDPStrategy, got {timeout!r}")
    return timeout.total_seconds()


def multi_node(optimizer: Any) -> Any:
    """The multi-node optimizer inside a framework's wrappers, or None."""
    while not isinstance(optimizer, WrappedOptimizer) or isinstance(optimizer.optimizer, WrappedOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            return None
    return optimizer


def average(optimizers: Iterable[Any]) -> None:
    """Make all replicas equal before they are saved or evaluated: gossip's weights, and running statistics. All ranks call it."""
    for optimizer in optimizers:
        own = multi_node(optimizer)
        if own is not None and own.steps:
            own.average_()


@contextmanager
def pause(optimizers: Iterable[Any]) -> Iterator[None]:
    """Inside, backward only accumulates gradients."""
    with ExitStack() as paused:
        for optimizer in optimizers:
            own = multi_node(optimizer)
            if own is not None:
                paused.enter_context(own.no_sync())
        yield
