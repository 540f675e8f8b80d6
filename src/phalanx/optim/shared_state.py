"""What a rank that joins a running job gets from the others: parameters, optimizer state, and whatever the script names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.optim.wrapped import WrappedOptimizer


@contextmanager
def elastic_step(opt: WrappedOptimizer) -> Iterator[None]:
    """One step of an elastic job. Hooks run before it if the membership changed, and newcomers may come in after it."""
    following = opt.following
    membership = opt.comm.membership
    if following.seen != membership.epoch:
        following.seen = membership.epoch
        for hook in opt.membership_hooks:
            hook(opt, membership)
    with _rate_of_now(opt.optimizer, following.batch_share):
        yield
    opt.comm.after_step()


@contextmanager
def _rate_of_now(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """The learning rate follows a batch that shrinks and grows with the ranks (linear scaling, Goyal et al. 2017)."""
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


def share(opt: WrappedOptimizer, objects: Mapping[str, Any]) -> None:
    """Let newcomers get this state. On a newcomer, load it."""
    for name, each in objects.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(f"share({name}=...): a {type(each).__name__} has no state_dict() and load_state_dict()")
    following, comm = opt.following, opt.following.comm

    def state() -> dict[str, Any]:
        return {
            "seen": following.seen,
            "exchanges": (comm.exchanges, comm.contributors),
            "own": opt.own_state(),
            "parameters": [p.detach() for p in opt.parameters()[0]],
            "optimizer": opt.optimizer.state_dict(),
            "objects": {name: each.state_dict() for name, each in objects.items()},
        }

    @torch.no_grad()
    def load(found: dict[str, Any]) -> None:
        if found["objects"].keys() != objects.keys():
            raise ValueError(f"the others share {', '.join(found['objects'])}, but this rank shares {', '.join(objects)}")
        comm.exchanges, comm.contributors = found["exchanges"]  # all ranks count the same ones
        for p, x in zip(opt.parameters()[0], found["parameters"], strict=True):
            p.copy_(x)
        opt.optimizer.load_state_dict(found["optimizer"])
        for name, each in objects.items():
            each.load_state_dict(found["objects"][name])
        following.seen = found["seen"]
        opt.load_own_state(found["own"])

    # a Loader: it knows when a step is over, how many samples this rank has in it, and how large the batch is
    following.loader = comm.loader = next((each for each in objects.values() if getattr(each, "world", None) is not None), None)
    comm.share(state, load)
