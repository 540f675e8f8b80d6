"""The update rules that Phalanx has settings for. The run sets their learning rate before every step.

Those of torch.optim, and your own, are in own_optimizer.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from phalanx.optim import lr
from phalanx.optim.lars import Lars
from phalanx.optim.rmsprop_warmup import RmspropWarmup

MomentumRule = Literal["fixed", "noise"]


class RuleConfig(ABC):
    """An update rule."""

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of all trained parameters, with their names for messages."""

    def check(self) -> None:  # noqa: B027  most rules are checked when they are made
        """Raise ConfigError for invalid options."""

    def steer(self, optimizer: torch.optim.Optimizer, progress: float) -> None:  # noqa: B027  most rules have nothing to set
        """Set what changes with the epochs, other than rate and momentum."""


@dataclass(frozen=True, kw_only=True)
class SgdConfig(RuleConfig):
    """SGD with momentum."""

    momentum: float = 0.9
    momentum_rule: MomentumRule = "fixed"
    nesterov: bool = False
    weight_decay: float = 5e-5
    decay_all: bool = False

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = decay_groups(model, self.weight_decay, decay_all=self.decay_all)
        return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum, nesterov=self.nesterov)


@dataclass(frozen=True, kw_only=True)
class LarsConfig(RuleConfig):
    """LARS: `phalanx.Lars`, which does not decay biases and batch norms."""

    momentum: float = 0.9
    momentum_rule: MomentumRule = "fixed"
    nesterov: bool = False
    weight_decay: float = 5e-5
    trust_coefficient: float = 0.001
    eps: float = 1e-9
    lr_in_momentum: bool = True
    correct_momentum: bool = False

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return Lars(
            [(name, p) for name, p in model.named_parameters() if p.requires_grad],
            lr=0.0,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            trust_coefficient=self.trust_coefficient,
            eps=self.eps,
            lr_in_momentum=self.lr_in_momentum,
        )


@dataclass(frozen=True, kw_only=True)
class RmspropWarmupConfig(RuleConfig):
    """SGD with momentum that starts as RMSprop (arXiv 1711.04325)."""

    momentum: float = 0.9
    momentum_rule: MomentumRule = "fixed"
    weight_decay: float = 5e-5
    decay_all: bool = False
    rmsprop_rate: float = 3e-4
    ramp_center: float = 10.0
    ramp_period: float = 5.0

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = decay_groups(model, self.weight_decay, decay_all=self.decay_all)
        return RmspropWarmup(groups, lr=0.0, momentum=self.momentum, rmsprop_lr=self.rmsprop_rate)

    def steer(self, optimizer: torch.optim.Optimizer, progress: float) -> None:
        lr.apply(optimizer, lr.elu_ramp(self.ramp_center, self.ramp_period), progress, option="sgd_share")


RULES: dict[str, type[RuleConfig]] = {"sgd": SgdConfig, "lars": LarsConfig, "rmsprop_warmup": RmspropWarmupConfig}


def decay_groups(model: nn.Module, weight_decay: float, *, decay_all: bool) -> list[dict[str, Any]]:
    """Groups of parameters with and without weight decay; biases and batch norms have none unless `decay_all`."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [(name, p) for name, p in named if decay_all or p.dim() > 1]
    plain = [(name, p) for name, p in named if not decay_all and p.dim() <= 1]
    parts: list[dict[str, Any]] = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in parts if group["params"]]
