"""Use rules: set the rate of an optimizer, or sample a rule for a plot."""

from __future__ import annotations

import math
from typing import Any

import torch

from phalanx.optim.lr.rule import Rule


def apply(
    optimizer: torch.optim.Optimizer, rule: Rule, progress: float, *, option: str = "lr", correct_momentum: bool = False
) -> float:
    """Set the learning rate of all parameter groups to `rule(progress)`.

    A group with an entry `"lr_scale"` gets that multiple of the rate.

    Args:
        optimizer: Any torch optimizer.
        rule: The rule. A plain factor is not enough: multiply it by the peak rate.
        progress: Epochs so far, such as `step / steps_per_epoch`.
        option: The entry of the groups to set.
        correct_momentum: Multiply the velocities by new rate / old rate (Goyal 2017, remark 2). Use it only with optimizers whose
            velocity contains the rate, as that of `Lars` does.

    Returns:
        The value of the rule.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> phalanx.lr.apply(optimizer, 0.4 * phalanx.lr.warmup(5), progress=2.5), optimizer.param_groups[0]["lr"]
        (0.2, 0.2)
    """
    value = rule(progress)
    for group in optimizer.param_groups:
        old, new = group[option], value * (group.get("lr_scale", 1.0) if option == "lr" else 1.0)
        if correct_momentum and float(old) > 0:
            _scale_velocities(optimizer, group, new / float(old))
        if isinstance(old, torch.Tensor):
            old.fill_(new)  # in place: a captured graph reads this tensor
        else:
            group[option] = new
    return value


def sample(rule: Rule, epochs: float | None = None, points: int = 200) -> list[tuple[float, float]]:
    """Sample a rule at equal distances, for a plot.

    Args:
        rule: The rule.
        epochs: The last epoch. The default is the end of the rule.
        points: The number of values.

    Returns:
        A list of (progress, value).

    Raises:
        ValueError: If the rule has no end and you passed no `epochs`, or `points` is less than 2.

    Example:
        >>> phalanx.lr.sample(phalanx.lr.linear(10), points=3)
        [(0.0, 1.0), (5.0, 0.5), (10.0, 0.0)]
    """
    end = rule.epochs if epochs is None else epochs
    if math.isinf(end) or points < 2:
        raise ValueError(f"sample({rule!r}, {epochs=}, {points=}): at least 2 points, and epochs for a rule without end")
    return [(end * i / (points - 1), rule(end * i / (points - 1))) for i in range(points)]


def _scale_velocities(optimizer: torch.optim.Optimizer, group: dict[str, Any], factor: float) -> None:
    with torch.no_grad():
        for p in group["params"]:
            velocity = optimizer.state[p].get("momentum_buffer") if p in optimizer.state else None
            if velocity is not None:
                velocity.mul_(factor)
