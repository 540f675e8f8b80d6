"""How a run updates its weights: optimizer, learning rate over its epochs, and what travels between ranks.

What changes from step to step, by the rules that are named here, is put together in course.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from phalanx.comm.communicator import Communicator
from phalanx.comm.settings import check_timeout
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.gossip import Gossip
from phalanx.optim import lr
from phalanx.optim.gossip_step import GossipOptimizer
from phalanx.optim.lars import Lars
from phalanx.optim.multi_node import MultiNodeOptimizer, create_multi_node_optimizer
from phalanx.optim.rmsprop_warmup import RmspropWarmup

Decay = Literal["constant", "linear", "polynomial", "cosine", "step", "natan"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """SGD with momentum, LARS, or SGD that begins as RMSprop (arXiv 1711.04325).

    `decay_all`: weight decay for biases and batch norms, too. `momentum_rule`: what becomes of the momentum where the batch
    changes: nothing, or "noise", what keeps the noise of SGD (`phalanx.lr.momentum_for`). LARS has `trust_coefficient` and `eps`;
    its velocity contains the rate unless `lr_in_momentum` is False, and `correct_momentum` then makes it follow the rate at once.
    RMSprop's rate is `rmsprop_rate`; it has given way to SGD by half at epoch `ramp_center`, wholly half a `ramp_period` later.
    """

    name: Literal["sgd", "lars", "rmsprop_warmup"] = "sgd"
    momentum: float = 0.9
    momentum_rule: Literal["fixed", "noise"] = "fixed"
    nesterov: bool = False
    weight_decay: float = 5e-5
    decay_all: bool = False
    trust_coefficient: float = 0.001
    eps: float = 1e-9
    lr_in_momentum: bool = True
    correct_momentum: bool = False
    rmsprop_rate: float = 3e-4
    ramp_center: float = 10.0
    ramp_period: float = 5.0

    def __post_init__(self) -> None:
        for name in ("momentum", "weight_decay", "trust_coefficient", "eps", "rmsprop_rate", "ramp_center"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more")
        if self.momentum >= 1:
            raise ValueError(f"momentum={self.momentum}: less than 1, or what was once added never fades")
        if self.ramp_period <= 0:
            raise ValueError(f"ramp_period={self.ramp_period}: epochs, more than 0")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True looks ahead along the momentum, and momentum is 0")
        if self.nesterov and self.name == "rmsprop_warmup":
            raise ValueError("nesterov=True: rmsprop_warmup has no such variant")
        if self.name == "lars" and self.decay_all:
            raise ValueError("decay_all=True: LARS decays no biases and batch norms")
        if self.correct_momentum and not (self.name == "lars" and self.lr_in_momentum):
            raise ValueError("correct_momentum=True is for velocities that contain the rate: name=lars with lr_in_momentum=True")

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
                lr_in_momentum=self.lr_in_momentum,
            )
        decayed = [(name, p) for name, p in named if self.decay_all or p.dim() > 1]
        plain = [(name, p) for name, p in named if not self.decay_all and p.dim() <= 1]
        parts = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in parts if group["params"]]
        if self.name == "rmsprop_warmup":
            return RmspropWarmup(groups, lr=0.0, momentum=self.momentum, rmsprop_lr=self.rmsprop_rate)
        return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum, nesterov=self.nesterov)


@dataclass(frozen=True, kw_only=True)
class RateConfig:
    """The learning rate: `peak` after `warmup` epochs, then `decay` to `end`, a share of the peak.

    That is reached at the end of the run or after `decay_epochs`, and stays. `scaling`: `peak` is the rate for batches of
    `reference` samples, and larger ones, in each stage of a plan, get more in proportion ("linear") or by the root ("sqrt").
    `rule`, a rule of `phalanx.lr` in rates, is for what this cannot say; it replaces all but the scaling.
    """

    peak: float = 0.1
    scaling: Literal["none", "linear", "sqrt"] = "none"
    reference: int | None = None
    warmup: float = 0.0
    warmup_start: float = 0.0  # a share of the peak
    warmup_kind: Literal["linear", "exponential"] = "linear"
    decay: Decay = "cosine"
    decay_epochs: float | None = None
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
        if self.decay_epochs is not None and (self.decay == "step" or self.decay_epochs <= 0):
            raise ValueError(f"decay_epochs={self.decay_epochs:g}: more than 0, and not for decay=step, which has steps")
        if (self.scaling == "none") != (self.reference is None):
            raise ValueError(
                f"scaling={self.scaling}, reference={self.reference}: both, the batch for which peak is right; or none"
            )
        if self.reference is not None and self.reference < 1:
            raise ValueError(f"reference={self.reference}: samples, at least 1")
        if self.warmup_kind == "exponential" and not 0 < self.warmup_start < 1:
            raise ValueError(f"warmup_kind=exponential, warmup_start={self.warmup_start:g}: a share of the peak, such as 0.01")

    def over(self, epochs: int) -> lr.Rule:
        """The rate for a batch of `reference` as a function of epochs, for a run of so many."""
        if self.rule is not None:
            return self.rule
        rest = epochs - self.warmup
        if rest <= 0:
            raise ValueError(
                f"warmup={self.warmup:g} epochs, but the run has {epochs}: leave some to train, by a smaller rate.warmup"
            )
        if self.decay == "step":
            warming = self._warming() >> lr.constant(rest) if self.warmup else lr.constant(epochs)
            return self.peak * (warming * lr.step(*self.steps, factor=self.factor))
        falling = self._falling(self.decay_epochs or rest, (self.turn or epochs / 2) - self.warmup)
        return self.peak * (self._warming() >> falling if self.warmup else falling)

    def scaled(self, batch: int) -> float:
        """How many times the rate for `reference` samples a batch gets."""
        if self.reference is None:
            return 1.0
        rule = lr.linear_scaling if self.scaling == "linear" else lr.sqrt_scaling
        return rule(batch, rate=1.0, reference=self.reference)

    def _warming(self) -> lr.Rule:
        kind = lr.warmup if self.warmup_kind == "linear" else lr.exponential_warmup
        return kind(self.warmup, self.warmup_start)

    def _falling(self, epochs: float, turn: float) -> lr.Rule:
        """From 1; `turn` counts from its own beginning."""
        makers: dict[str, Callable[[], lr.Rule]] = {
            "constant": lambda: lr.constant(epochs),
            "linear": lambda: lr.linear(epochs, self.end),
            "polynomial": lambda: lr.polynomial(epochs, self.power, self.end),
            "cosine": lambda: lr.cosine(epochs, self.end),
            "natan": lambda: lr.natan(epochs, turn, final=self.end or None),
        }
        return makers[self.decay]()


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
    fused: bool = False
    double_buffering: bool = False

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
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
