"""How a run updates its weights: optimizer, learning rate over its epochs, and what travels between ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.gossip import Gossip
from phalanx.optim import lr
from phalanx.optim.gossip_step import GossipOptimizer
from phalanx.optim.lars import Lars
from phalanx.optim.multi_node import MultiNodeOptimizer, create_multi_node_optimizer

Decay = Literal["constant", "linear", "polynomial", "cosine", "step", "natan"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """SGD with momentum, or LARS. `decay_all`: weight decay for biases and batch norms, too."""

    name: Literal["sgd", "lars"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-5
    decay_all: bool = False
    trust_coefficient: float = 0.001
    eps: float = 1e-9

    def __post_init__(self) -> None:
        for name in ("momentum", "weight_decay", "trust_coefficient", "eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True looks ahead along the momentum, and momentum is 0")
        if self.name == "lars" and self.decay_all:
            raise ValueError("decay_all=True: LARS decays no biases and batch norms")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over all parameters that are trained, by name, so that messages can name them."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if self.name == "lars":
            return Lars(
                named,
                lr=0.0,
                momentum=self.momentum,
                nesterov=self.nesterov,
                weight_decay=self.weight_decay,
                trust_coefficient=self.trust_coefficient,
                eps=self.eps,
            )
        decayed = [(name, p) for name, p in named if self.decay_all or p.dim() > 1]
        plain = [(name, p) for name, p in named if not self.decay_all and p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.SGD(
            [group for group in groups if group["params"]], lr=0.0, momentum=self.momentum, nesterov=self.nesterov
        )


@dataclass(frozen=True, kw_only=True)
class RateConfig:
    """The learning rate: `peak` after `warmup` epochs, then `decay` to `end` (a share of the peak) at the end of the run.

    `rule`, a rule of `phalanx.lr` in rates, is for what this cannot say; it replaces all of the others.
    """

    peak: float = 0.1
    warmup: float = 0.0
    warmup_start: float = 0.0
    decay: Decay = "cosine"
    end: float = 0.0
    power: float = 2.0  # of polynomial
    steps: tuple[float, ...] = ()  # of step: epochs of the run
    factor: float = 0.1  # of step
    turn: float | None = None  # of natan: the epoch of the run where half of the peak is reached
    rule: lr.Rule | None = None

    def __post_init__(self) -> None:
        for name in ("peak", "warmup", "warmup_start", "end", "factor"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more")
        if self.steps and self.decay != "step":
            raise ValueError(f"steps={self.steps}: only decay=step has some, not {self.decay}")
        if self.decay == "step" and not self.steps:
            raise ValueError("decay=step has steps, the epochs where the rate falls")
        if self.turn is not None and self.decay != "natan":
            raise ValueError(f"turn={self.turn}: only decay=natan has one, not {self.decay}")

    def over(self, epochs: int) -> lr.Rule:
        """The rate as a function of epochs, for a run of so many."""
        if self.rule is not None:
            return self.rule
        rest = epochs - self.warmup
        if rest <= 0:
            raise ValueError(f"warmup={self.warmup:g} epochs, but the run has {epochs}: leave some to train")
        if self.decay == "step":
            warming = lr.warmup(self.warmup, self.warmup_start) >> lr.constant(rest) if self.warmup else lr.constant(epochs)
            return self.peak * (warming * lr.step(*self.steps, factor=self.factor))
        falling: lr.Rule = {
            "constant": lambda: lr.constant(rest),
            "linear": lambda: lr.linear(rest, self.end),
            "polynomial": lambda: lr.polynomial(rest, self.power, self.end),
            "cosine": lambda: lr.cosine(rest, self.end),
            "natan": lambda: lr.natan(rest, (self.turn or epochs / 2) - self.warmup, final=self.end or None),
        }[self.decay]()
        return self.peak * (lr.warmup(self.warmup, self.warmup_start) >> falling if self.warmup else falling)


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How ranks communicate. `algorithm` is a name such as "torus:2x4"; None chooses for the hosts found.

    `sync`: "gossip" mixes replicas with one partner per step, as `gossip` says; they are averaged before every evaluation.
    """

    sync: Literal["allreduce", "gossip"] = "allreduce"
    gossip: Gossip = field(default_factory=Gossip)
    algorithm: str | None = None
    timeout: float = 60.0
    wire: Literal["float16", "bfloat16"] | None = None
    bucket_bytes: int | None = 8 << 20  # fixed, where None measures: sums of a resumed run are cut as they were
    growing: int | None = None
    overlap: bool | None = None
    fused: bool | None = None
    double_buffering: bool = False

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout}: seconds, more than 0")
        for name in ("bucket_bytes", "growing"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        if self.fused and (self.wire or self.double_buffering):
            raise ValueError("fused=True goes without wire and double_buffering: nothing travels")
        if self.sync == "gossip" and (self.fused or self.double_buffering or self.growing is not None):
            raise ValueError("sync=gossip goes without fused, double_buffering and growing, which are for all-reduce")

    def wrap(
        self, optimizer: torch.optim.Optimizer, comm: Communicator, *, weighted: bool
    ) -> MultiNodeOptimizer | GossipOptimizer:
        """The multi-node optimizer; `weighted` where ranks may have different numbers of samples in a step."""
        if self.sync == "gossip":
            return create_multi_node_optimizer(
                optimizer, comm, sync=self.gossip, wire=getattr(torch, self.wire) if self.wire else None
            )
        return create_multi_node_optimizer(
            optimizer,
            comm,
            sync=AllReduce(
                growing=self.growing,
                overlap=self.overlap,
                weighted=weighted,
                record=True,
                fused=self.fused,
            ),
            double_buffering=self.double_buffering,
            wire=getattr(torch, self.wire) if self.wire else None,
            bucket_bytes=self.bucket_bytes if self.growing is None else None,
        )
