"""How a run updates its weights: optimizer and learning rate. See communication.py for how ranks communicate.

course.py computes the values of each step by the rules named here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from phalanx.optim import lr
from phalanx.train.argument_text import check_arguments
from phalanx.train.communication import CommConfig
from phalanx.train.components import pick, settings_of
from phalanx.train.optimizers import RULES, LarsConfig, MomentumRule, RmspropWarmupConfig, RuleConfig, SgdConfig
from phalanx.train.own_optimizer import OwnRule, check_name
from phalanx.train.settings import setting

__all__ = ["CommConfig", "OptimizerConfig", "RateConfig"]  # recipes import them from here

Decay = Literal["constant", "linear", "polynomial", "cosine", "step", "natan"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of all update rules of optimizers.py; `name` chooses the rule; the others apply if the rule has them.

    A rule of own_optimizer.py has `args`, `weight_decay` and `decay_all`.
    """

    HEAD: ClassVar[str] = "name"

    name: str = setting(
        "sgd", "The update rule; also any other optimizer of torch.optim, in lower case.", names=(*RULES, "adamw", "adam")
    )
    args: dict[str, Any] = setting({}, "Argument NAME of a torch.optim optimizer or your own, such as betas=[0.9, 0.95].")
    momentum: float = setting(SgdConfig.momentum, "sgd, lars, rmsprop_warmup: share of the velocity that each step keeps.")
    momentum_rule: MomentumRule = setting(
        SgdConfig.momentum_rule, "Keep the momentum when the batch changes, or choose it so that the noise of SGD stays the same."
    )
    nesterov: bool = setting(SgdConfig.nesterov, "Nesterov's momentum; for sgd and lars.")
    weight_decay: float | None = setting(
        None, f"Weight decay; none for the rule's default: {SgdConfig.weight_decay:g}, or that of the class in torch.optim."
    )
    decay_all: bool | None = setting(
        None, "Decay biases and batch norms, too; not for lars. None: sgd and rmsprop_warmup do not, others do as torch does."
    )
    trust_coefficient: float = setting(LarsConfig.trust_coefficient, "LARS: factor of the ratio of weight norm to gradient norm.")
    eps: float = setting(LarsConfig.eps, "LARS: added to the denominator of that ratio.")
    lr_in_momentum: bool = setting(LarsConfig.lr_in_momentum, "LARS: let the velocity contain the learning rate.")
    correct_momentum: bool = setting(
        LarsConfig.correct_momentum, "LARS: rescale the velocity when the rate changes; this needs lr_in_momentum."
    )
    rmsprop_rate: float = setting(RmspropWarmupConfig.rmsprop_rate, "rmsprop_warmup: learning rate of RMSprop.")
    ramp_center: float = setting(
        RmspropWarmupConfig.ramp_center, "rmsprop_warmup: epoch at which RMSprop and SGD have equal shares."
    )
    ramp_period: float = setting(
        RmspropWarmupConfig.ramp_period, "rmsprop_warmup: epochs of the ramp; half of it after `ramp_center` only SGD is left."
    )

    def __post_init__(self) -> None:
        check_name(self.name)
        check_arguments(self.args, "args")
        if self.args and not self.is_own:
            raise ValueError(f"args ({', '.join(self.args)}): {self.name} has settings, such as optimizer.momentum")
        for name in ("momentum", "weight_decay", "trust_coefficient", "eps", "rmsprop_rate", "ramp_center"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more")
        if self.momentum >= 1:
            raise ValueError(f"momentum={self.momentum}: less than 1, or old gradients never fade")
        if self.ramp_period <= 0:
            raise ValueError(f"ramp_period={self.ramp_period}: epochs, more than 0")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum, but momentum is 0")
        if self.nesterov and self.name == "rmsprop_warmup":
            raise ValueError("nesterov=True: rmsprop_warmup has no such variant")
        if self.name == "lars" and self.decay_all:
            raise ValueError("decay_all=True: LARS decays no biases and batch norms")
        if self.momentum_rule != "fixed" and self.is_own:
            raise ValueError(f"momentum_rule={self.momentum_rule} is for {', '.join(RULES)}, not for {self.name}")
        if self.correct_momentum and not (self.name == "lars" and self.lr_in_momentum):
            raise ValueError("correct_momentum=True is for velocities that contain the rate: name=lars with lr_in_momentum=True")

    @classmethod
    def of(cls, rule: RuleConfig) -> OptimizerConfig:
        """The settings of an update rule, as written in a recipe: `OptimizerConfig.of(LarsConfig(momentum=0.95))`."""
        usual = {f.name: f.default for f in fields(rule)} if type(rule) in RULES.values() else {}  # type: ignore[arg-type]
        optional = {f.name for f in fields(cls) if f.default is None}
        found = settings_of(RULES, rule)
        return cls(**{name: value for name, value in found.items() if name not in optional or value != usual[name]})

    @property
    def is_own(self) -> bool:
        """Whether the rule is from torch.optim or the user's own."""
        return self.name not in RULES

    @property
    def rule(self) -> RuleConfig:
        """The update rule with its own settings."""
        if self.is_own:
            return OwnRule(self.name, self.args, self.weight_decay, decay_all=self.decay_all is not False)
        return pick(RULES, self)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of all trained parameters."""
        return self.rule.build(model)


@dataclass(frozen=True, kw_only=True)
class RateConfig:
    """The learning rate: `peak` after `warmup` epochs, then `decay` down to `end`."""

    peak: float = setting(0.1, "Highest learning rate.")
    scaling: Literal["none", "linear", "sqrt"] = setting(
        "none", "Scale the rate with the batch, or with its square root; `peak` is then the rate of `reference` samples."
    )
    reference: int | None = setting(None, "Batch for which `peak` is right, with `scaling`.")
    warmup: float = setting(0.0, "Epochs over which the rate rises to `peak`.")
    warmup_start: float = setting(0.0, "Share of the peak at which the warm-up begins.")
    warmup_kind: Literal["linear", "exponential"] = setting("linear", "Shape of the warm-up.")
    decay: Decay = setting("cosine", "Shape of the decay after the warm-up.")
    decay_epochs: float | None = setting(None, "Epochs of the decay, after which the rate stays; none for the rest of the run.")
    end: float = setting(0.0, "Share of the peak at which the decay ends.")
    power: float = setting(2.0, "decay=polynomial: its power.")
    steps: tuple[float, ...] = setting((), "decay=step: epochs of the run at which the rate falls.")
    factor: float = setting(0.1, "decay=step: factor of each fall.")
    turn: float | None = setting(None, "decay=natan: epoch of the run at which the rate is half the peak; none for the middle.")
    rule: lr.Rule | None = setting(
        None, "A rule of `phalanx.lr`, for rates that the other settings cannot express; it replaces all but the scaling."
    )

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
                f"scaling={self.scaling}, reference={self.reference}: set both (peak is right for batches of reference), or none"
            )
        if self.reference is not None and self.reference < 1:
            raise ValueError(f"reference={self.reference}: samples, at least 1")
        if self.warmup_kind == "exponential" and not 0 < self.warmup_start < 1:
            raise ValueError(f"warmup_kind=exponential, warmup_start={self.warmup_start:g}: a share of the peak, such as 0.01")

    def over(self, epochs: int) -> lr.Rule:
        """The rate for a batch of `reference` as a function of progress, in a run of `epochs` epochs."""
        if self.rule is not None:
            return self.rule
        rest = epochs - self.warmup
        if rest <= 0:
            raise ValueError(f"warmup={self.warmup:g} epochs, but the run has {epochs}: use a smaller rate.warmup")
        if self.decay == "step":
            warming = self._warmup_rule() >> lr.constant(rest) if self.warmup else lr.constant(epochs)
            return self.peak * (warming * lr.step(*self.steps, factor=self.factor))
        falling = self._decay_rule(self.decay_epochs or rest, (self.turn or epochs / 2) - self.warmup)
        return self.peak * (self._warmup_rule() >> falling if self.warmup else falling)

    def scaled(self, batch: int) -> float:
        """The factor of the rate for a batch, relative to one of `reference` samples."""
        if self.reference is None:
            return 1.0
        rule = lr.linear_scaling if self.scaling == "linear" else lr.sqrt_scaling
        return rule(batch, rate=1.0, reference=self.reference)

    def _warmup_rule(self) -> lr.Rule:
        kind = lr.warmup if self.warmup_kind == "linear" else lr.exponential_warmup
        return kind(self.warmup, self.warmup_start)

    def _decay_rule(self, epochs: float, turn: float) -> lr.Rule:
        """The decay from 1; `turn` counts from the end of the warm-up."""
        makers: dict[str, Callable[[], lr.Rule]] = {
            "constant": lambda: lr.constant(epochs),
            "linear": lambda: lr.linear(epochs, self.end),
            "polynomial": lambda: lr.polynomial(epochs, self.power, self.end),
            "cosine": lambda: lr.cosine(epochs, self.end),
            "natan": lambda: lr.natan(epochs, turn, final=self.end or None),
        }
        return makers[self.decay]()
