"""Any optimizer of torch.optim by its name in lower case, or your own by its import path.

    optimizer.name=adamw optimizer.args.betas=[0.9,0.95]        torch.optim.AdamW(parameters, betas=(0.9, 0.95))
    optimizer=my_package.lion:Lion                              a class, or a function that makes an optimizer

It gets the arguments in `optimizer.args`, and decays all parameters, as torch does, unless `optimizer.decay_all=false`. The run
sets its learning rate before every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from phalanx.train.import_path import (
    accepts,
    as_given,
    blamed_on,
    check_arguments_of,
    check_import_path,
    find_callable,
    parameters_of,
)
from phalanx.train.optimizers import RULES, RuleConfig, decay_groups
from phalanx.train.setting_text import ConfigError

TORCH: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
CLOSURES = "lbfgs"  # computes the loss several times per step, which a run does once
PLACEHOLDER = 1.0  # a learning rate that every optimizer accepts; the run replaces it before the first step


def check_name(name: str) -> None:
    """Raise ValueError if this is not an optimizer."""
    if name.lower() == CLOSURES:
        raise ValueError("LBFGS computes the loss several times per step, which `phalanx train` does once: choose another one")
    if name not in RULES and name.lower() not in TORCH:
        others = sorted(set(TORCH) - set(RULES) - {CLOSURES})
        check_import_path(name, ", ".join([*RULES, *others]))


@dataclass(frozen=True)
class OwnRule(RuleConfig):
    """An optimizer of torch.optim or of the user's; `weight_decay` None for its own default."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    weight_decay: float | None = None
    decay_all: bool = True

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        factory, args = self.find(), dict(self.args)
        if "lr" in args:
            raise ConfigError(f"optimizer.args.lr={args['lr']}: the run sets the learning rate: use rate.peak, and rate.decay")
        if self.weight_decay is not None and not self._takes(factory, "weight_decay"):
            words = f"optimizer.weight_decay={self.weight_decay:g}: {self.name} has none"
            raise ConfigError(f"{words}: --set optimizer.weight_decay=none")
        if self.weight_decay is not None:
            args.setdefault("weight_decay", self.weight_decay)
        if self._takes(factory, "lr"):
            args["lr"] = PLACEHOLDER
        check_arguments_of(factory, args, self.name, "optimizer", given=1)
        with blamed_on(f"optimizer={self.name}"):
            made = factory(
                self._parameters(model, args.get("weight_decay", _default(factory, "weight_decay"))), **as_given(factory, args)
            )
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer={self.name} gives a {type(made).__name__}, not a torch.optim.Optimizer")
        if any("lr" not in group for group in made.param_groups):
            raise ConfigError(f"optimizer={self.name} has no learning rate `lr` in its param_groups, which the run would set")
        return made

    def _parameters(self, model: nn.Module, decay: float | None) -> list[Any]:
        """The trained parameters, with names for torch's own classes, and in groups if some have no decay."""
        trained: list[Any] = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not self.decay_all and decay:
            trained = decay_groups(model, decay, decay_all=False)
        if self.name.lower() in TORCH:
            return trained
        # a user's function may inspect the parameters and does not expect names
        return [{**own, "params": [p for _, p in own["params"]]} if isinstance(own, dict) else own[1] for own in trained]

    @staticmethod
    def _takes(factory: Callable[..., Any], name: str) -> bool:
        """Whether a function takes an argument of this name, also as one of its `**options`."""
        known = parameters_of(factory)
        return known is None or accepts(factory, name) or any(p.kind is p.VAR_KEYWORD for p in known)

    def find(self) -> Callable[..., Any]:
        """The class, or the function that makes an optimizer."""
        return TORCH[self.name.lower()] if self.name.lower() in TORCH else find_callable(self.name, "optimizer")

    def check(self) -> None:
        """Raise ConfigError for arguments that it does not take. Tries it on one small matrix."""
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(2, 2))  # draws nothing: ranks may be threads that build networks
        self.build(model)


def _default(function: Callable[..., Any], name: str) -> Any:
    found = [p.default for p in parameters_of(function) or [] if p.name == name]
    return found[0] if found and found[0] is not inspect.Parameter.empty else None
