"""Momentum SGD that starts as RMSprop (Akiba, Suzuki, Fukuda, "Extremely Large Minibatch SGD", arXiv 1711.04325).

    m = decay * m + (1 - decay) * g * g
    v = momentum * v - (sgd_share + (1 - sgd_share) * rmsprop_lr / lr / (sqrt(m) + eps)) * g
    w += lr * v

Here g is the gradient plus weight_decay * w. The share of SGD grows from nearly 0 to 1 over the first epochs, by its own rule:

    lr.apply(optimizer, lr.elu_ramp(center=10, period=5), progress, option="sgd_share")

The formulas are from the paper; the numbers for decay, eps and rmsprop_lr are quoted second hand. Once the share is 1, the second
moment is no longer needed and is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT


class RmspropWarmup(torch.optim.Optimizer):
    """The rule above. Unless you call `lr.apply`, the share keeps its value: by default 1, which is momentum SGD."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        sgd_share: float = 1.0,
        rmsprop_lr: float = 3e-4,
        decay: float = 0.99,
        eps: float = 1e-8,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay), ("rmsprop_lr", rmsprop_lr)):
            if not float(value) >= 0:
                raise ValueError(f"RmspropWarmup: {name}={value!r}: a number, 0 or more")
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "sgd_share": sgd_share,
            "rmsprop_lr": rmsprop_lr,
            "decay": decay,
            "eps": eps,
        }
        super().__init__(params, options)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters once. Gradients are only read."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _move(group, p, p.grad, self.state[p])
        return loss


def _move(group: dict[str, Any], w: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    lr, share = float(group["lr"]), group["sgd_share"]
    if lr == 0:
        return  # the share of RMSprop is divided by the rate
    if group["weight_decay"]:
        g = g.add(w, alpha=group["weight_decay"])
    v = _moment(state, "momentum_buffer", w)
    v.mul_(group["momentum"]).sub_(g, alpha=share)
    if share < 1:
        m = _moment(state, "square_average", w)
        m.mul_(group["decay"]).addcmul_(g, g, value=1 - group["decay"])
        v.addcdiv_(g, m.sqrt().add_(group["eps"]), value=-(1 - share) * group["rmsprop_lr"] / lr)
    else:
        state.pop("square_average", None)
    w.add_(v, alpha=lr)


def _moment(state: dict[str, Any], name: str, w: torch.Tensor) -> torch.Tensor:
    """Return a moment of `w`, zeros at first. Made once, because zeros cost a pass over memory."""
    if name not in state:
        state[name] = torch.zeros_like(w)
    moment: torch.Tensor = state[name]
    return moment
