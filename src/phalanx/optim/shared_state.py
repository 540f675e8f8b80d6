"""What a rank that joins a running job gets from the others: parameters, optimizer state, and whatever the script names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.elastic.communicator import ElasticCommunicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.averager import Averager
from phalanx.grad.elastic import ElasticAverager
from phalanx.grad.wires import Wire
from phalanx.optim.wrapped import WrappedOptimizer


def elastic_averager(
    params: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    comm: Communicator,
    sync: AllReduce,
    *,
    wire: Wire | None,
    bucket_bytes: int | None,
) -> ElasticAverager:
    """The averager of an elastic communicator."""
    assert isinstance(comm, ElasticCommunicator)
    return ElasticAverager(params, names, comm, sync, wire=wire, bucket_bytes=bucket_bytes)


@contextmanager
def rate_of_now(optimizer: torch.optim.Optimizer, averager: Averager) -> Iterator[None]:
    """The learning rate follows the batch, where that shrinks and grows with the ranks (linear scaling, Goyal et al. 2017)."""
    factor = averager.batch_share if isinstance(averager, ElasticAverager) else 1.0
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate


def call_hooks(opt: WrappedOptimizer, averager: Averager, hooks: Sequence[Callable[..., None]]) -> None:
    """Tell the hooks about a change of membership: before the first update after it, and on all ranks, those that joined too."""
    assert isinstance(averager, ElasticAverager)
    membership = averager.comm.membership
    if averager.seen != membership.epoch:
        averager.seen = membership.epoch
        for hook in hooks:
            hook(opt, membership)


def share(opt: WrappedOptimizer, averager: Averager, objects: Mapping[str, Any]) -> None:
    """Let newcomers get this; on a newcomer, get it."""
    for name, each in objects.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(f"share({name}=...): a {type(each).__name__} has no state_dict() and load_state_dict()")
    assert isinstance(averager, ElasticAverager)
    comm = averager.comm

    def state() -> dict[str, Any]:
        return {
            "averager": averager.state(),
            "parameters": [p.detach() for p in opt.parameters()[0]],
            "optimizer": opt.optimizer.state_dict(),
            "objects": {name: each.state_dict() for name, each in objects.items()},
        }

    @torch.no_grad()
    def load(found: dict[str, Any]) -> None:
        if found["objects"].keys() != objects.keys():
            raise ValueError(f"the others share {', '.join(found['objects'])}, this rank shares {', '.join(objects)}")
        for p, x in zip(opt.parameters()[0], found["parameters"], strict=True):
            p.copy_(x)
        opt.optimizer.load_state_dict(found["optimizer"])
        for name, each in objects.items():
            each.load_state_dict(found["objects"][name])
        averager.load(found["averager"])

    # a Loader: it knows when a step is over, how many samples this rank has in it, and how large the batch is
    averager.loader = comm.loader = next((each for each in objects.values() if getattr(each, "world", None) is not None), None)
    comm.share(state, load)
