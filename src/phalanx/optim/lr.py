"""Learning-rate rules: pure functions of progress, which is counted in epochs.

    rule = 31.2 * (lr.warmup(epochs=25) >> lr.polynomial(epochs=65, power=2, end=1e-4 / 31.2))
    lr.apply(optimizer, rule, progress=step / steps_per_epoch)

A rule is a frozen dataclass; `rule(progress)` is a number, and nothing is remembered between two calls, so a resumed run goes on
exactly. Epochs, not steps: a plan that changes the batch changes the number of steps per epoch, and the rules stay as they are.

    a >> b     first a for its epochs, then b, which counts from its own beginning
    a * b      the product of both at the same progress: lr.warmup(5) * lr.step(30, 60, 80)
    0.1 * a    values of a rule are factors, 1 at the peak; a number makes rates of them

Before its beginning a rule has its first value, after its epochs the last one. `apply` drives any torch optimizer, and so does
`LambdaLR(optimizer, lambda step: rule(step / steps_per_epoch))`, with factors where the optimizer has the peak rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


class Rule:
    """A function of progress, counted in epochs. Call it, multiply it, or chain it with `>>`.

    Before its beginning a rule has its first value, and after its epochs the last one. Nothing is remembered between two calls,
    so a resumed run continues exactly.

    Subclasses are frozen dataclasses with `epochs` (infinite if the rule has no end) and `at`.

    Example:
        >>> rule = 0.1 * (phalanx.lr.warmup(5) >> phalanx.lr.cosine(85))
        >>> rule(0), rule(5), rule(90)
        (0.0, 0.1, 0.0)
    """

    __slots__ = ()
    epochs: float

    def __post_init__(self) -> None:
        if not self.epochs > 0:
            raise ValueError(f"{self!r}: epochs are more than 0; leave the rule out instead")

    def at(self, progress: float) -> float:
        """The value at a progress from 0 to `epochs`."""
        raise NotImplementedError

    def __call__(self, progress: float) -> float:
        return self.at(min(max(float(progress), 0.0), self.epochs))

    def __rshift__(self, after: Rule) -> Rule:
        return Chain(_parts(self, Chain) + _parts(after, Chain)) if isinstance(after, Rule) else NotImplemented

    def __mul__(self, other: Rule | float) -> Rule:
        if isinstance(other, Rule):
            return Product(_parts(self, Product) + _parts(other, Product))
        return Scaled(float(other), self) if isinstance(other, int | float) else NotImplemented

    __rmul__ = __mul__


# ---- the rules: named as they are used, like functions -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class constant(Rule):  # noqa: N801
    """One value for all epochs.

    Args:
        epochs: How long the rule lasts.
        value: The value.

    Example:
        >>> phalanx.lr.constant(30, 0.5)(12)
        0.5
    """

    epochs: float
    value: float = 1.0

    def at(self, progress: float) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class warmup(Rule):  # noqa: N801
    """A straight line from `start` to 1 (Goyal et al., arXiv 1706.02677: 5 epochs from 1 / ranks; Fujitsu: 36 epochs from 0).

    Args:
        epochs: How long the line is.
        start: The first value.

    Example:
        >>> rule = phalanx.lr.warmup(4)
        >>> [rule(epoch) for epoch in range(5)]
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    epochs: float
    start: float = 0.0

    def at(self, progress: float) -> float:
        return self.start + (1.0 - self.start) * (progress / self.epochs)


@dataclass(frozen=True, slots=True)
class exponential_warmup(Rule):  # noqa: N801
    """From `start` to 1 by equal factors in equal times.

    Args:
        epochs: How long it takes.
        start: The first value, more than 0.

    Raises:
        ValueError: If `start` is not more than 0.

    Example:
        >>> phalanx.lr.exponential_warmup(2, start=0.01)(1)
        0.1
    """

    epochs: float
    start: float = 0.01

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if not self.start > 0:
            raise ValueError(f"exponential_warmup(start={self.start}): no factor leads from 0 to 1; begin above 0, at 0.01 say")

    def at(self, progress: float) -> float:
        return float(self.start ** (1.0 - progress / self.epochs))


@dataclass(frozen=True, slots=True, init=False)
class step(Rule):  # noqa: N801
    """1, multiplied by `factor` at each of `at_epochs`.

    Args:
        *at_epochs: Epochs in ascending order.
        factor: What each of them multiplies by.

    Raises:
        ValueError: If the epochs are not in ascending order.

    Example:
        >>> rule = phalanx.lr.step(30, 60, factor=0.5)
        >>> rule(29), rule(30), rule(60)
        (1.0, 0.5, 0.25)
    """

    at_epochs: tuple[float, ...]
    factor: float = 0.1

    def __init__(self, *at_epochs: float, factor: float = 0.1) -> None:
        if list(at_epochs) != sorted(set(at_epochs)):
            raise ValueError(f"step{at_epochs}: epochs in ascending order, each once")
        object.__setattr__(self, "at_epochs", at_epochs)
        object.__setattr__(self, "factor", factor)

    @property
    def epochs(self) -> float:  # type: ignore[override]
        return math.inf

    def at(self, progress: float) -> float:
        return float(self.factor ** sum(progress >= epoch for epoch in self.at_epochs))

    def __repr__(self) -> str:
        return f"step({', '.join(map(repr, self.at_epochs))}, factor={self.factor!r})"


@dataclass(frozen=True, slots=True)
class linear(Rule):  # noqa: N801
    """A straight line from 1 to `end`.

    Args:
        epochs: How long the line is.
        end: The last value.

    Example:
        >>> phalanx.lr.linear(10)(5)
        0.5
    """

    epochs: float
    end: float = 0.0

    def at(self, progress: float) -> float:
        return 1.0 - (1.0 - self.end) * (progress / self.epochs)


@dataclass(frozen=True, slots=True)
class polynomial(Rule):  # noqa: N801
    """From 1 to `end` as (1 - end) * (1 - p)**power + end, where p is the part of `epochs` done.

    Args:
        epochs: How long it takes.
        power: 2 in MLPerf's reference, 2.2 in Fujitsu's "power".
        end: The last value.

    Raises:
        ValueError: If `power` is not more than 0.

    Example:
        >>> phalanx.lr.polynomial(10, power=2)(5)
        0.25
    """

    epochs: float
    power: float = 2.0
    end: float = 0.0

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if not self.power > 0:
            raise ValueError(f"polynomial(power={self.power}): more than 0")

    def at(self, progress: float) -> float:
        return float((1.0 - self.end) * (1.0 - progress / self.epochs) ** self.power + self.end)


@dataclass(frozen=True, slots=True)
class cosine(Rule):  # noqa: N801
    """Half a wave from 1 to `end` (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    Args:
        epochs: How long it takes.
        end: The last value.

    Example:
        >>> phalanx.lr.cosine(10)(10)
        0.0
    """

    epochs: float
    end: float = 0.0

    def at(self, progress: float) -> float:
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * (progress / self.epochs)))


@dataclass(frozen=True, slots=True)
class natan(Rule):  # noqa: N801
    """Fujitsu's arc tangent: 0.5 - atan(x / decay + x**3 / 1000) / pi, where x is the epochs since `turn`.

    As in their code (MLPerf Training v0.6, open division), x counts twice after the turn.

    Args:
        epochs: How long it takes.
        turn: The epoch at which the value is 0.5.
        decay: A larger number falls more slowly.
        final: Stretch the part after the turn so that the last value is this one.

    Raises:
        ValueError: If `turn` does not lie inside `epochs`, or `decay` is not more than 0.

    Example:
        >>> phalanx.lr.natan(90, turn=45)(45)
        0.5
    """

    epochs: float
    turn: float
    decay: float = 2.0
    final: float | None = None

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if not 0 < self.turn < self.epochs:
            raise ValueError(f"natan(epochs={self.epochs}, turn={self.turn}): the turn lies between 0 and the end")
        if not self.decay > 0:
            raise ValueError(f"natan(decay={self.decay}): more than 0")

    def at(self, progress: float) -> float:
        value = self._falling(progress)
        if self.final is None or progress < self.turn:
            return value
        return 0.5 - (0.5 - value) * (0.5 - self.final) / (0.5 - self._falling(self.epochs))

    def _falling(self, progress: float) -> float:
        x = progress - self.turn
        x = 2 * x if x > 0 else x
        return 0.5 - math.atan(x / self.decay + x**3 / 1000.0) / math.pi


@dataclass(frozen=True, slots=True)
class elu_ramp(Rule):  # noqa: N801
    """The share of SGD in the RMSprop warm-up of Akiba et al. (arXiv 1711.04325): exponential up to 1/2, then linear up to 1.

    Args:
        center: The epoch at which it reaches 1/2.
        period: It reaches 1 half a period later.

    Example:
        >>> phalanx.lr.elu_ramp(center=10, period=5)(10)
        0.5
    """

    center: float = 10.0
    period: float = 5.0

    @property
    def epochs(self) -> float:  # type: ignore[override]
        return self.center + self.period / 2

    def at(self, progress: float) -> float:
        x = (progress - self.center) / self.period
        return 0.5 * math.exp(2.0 * x) if x < 0 else min(0.5 + x, 1.0)


def slow_start() -> Rule:
    """The 90 epochs of Akiba et al. (arXiv 1711.04325), as factors of 0.1 * batch / 256. The peak is one half, held for 40
    epochs.

    Returns:
        A rule of 90 epochs.

    Example:
        >>> phalanx.lr.slow_start()(50)
        0.075
    """
    return constant(40, 0.5) >> constant(30, 0.075) >> constant(15, 0.01) >> constant(5, 0.001)


# ---- compositions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chain(Rule):
    """Rules one after another. `a >> b` makes it. The end of one rule belongs to the next.

    Args:
        rules: The rules in order. Only the last may be without an end.

    Raises:
        ValueError: If another rule than the last has no end.

    Example:
        >>> phalanx.lr.warmup(5) >> phalanx.lr.linear(10)
        warmup(epochs=5, start=0.0) >> linear(epochs=10, end=0.0)
    """

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        for rule in self.rules[:-1]:
            if math.isinf(rule.epochs):
                raise ValueError(f"{rule!r} has no end, so nothing comes after it; multiply the rules, or give it epochs")

    @property
    def epochs(self) -> float:  # type: ignore[override]
        return math.fsum(rule.epochs for rule in self.rules)

    def at(self, progress: float) -> float:
        begin = 0.0
        for rule in self.rules[:-1]:
            if progress < begin + rule.epochs:
                return rule(progress - begin)
            begin += rule.epochs
        return self.rules[-1](progress - begin)

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.rules))


@dataclass(frozen=True, slots=True)
class Product(Rule):
    """Rules multiplied at the same progress. `a * b` makes it.

    Args:
        rules: The rules.

    Example:
        >>> (phalanx.lr.warmup(4) * phalanx.lr.step(2, factor=0.5))(2)
        0.25
    """

    rules: tuple[Rule, ...]

    @property
    def epochs(self) -> float:  # type: ignore[override]
        ends = [rule.epochs for rule in self.rules if not math.isinf(rule.epochs)]
        return max(ends) if len(ends) == len(self.rules) else math.inf

    def at(self, progress: float) -> float:
        return math.prod(rule(progress) for rule in self.rules)

    def __repr__(self) -> str:
        return " * ".join(_in_brackets(rule) for rule in self.rules)


@dataclass(frozen=True, slots=True)
class Scaled(Rule):
    """A rule times a number. `0.1 * a` makes it.

    Args:
        factor: The number.
        rule: The rule.

    Example:
        >>> (0.1 * phalanx.lr.warmup(5))(5)
        0.1
    """

    factor: float
    rule: Rule

    @property
    def epochs(self) -> float:  # type: ignore[override]
        return self.rule.epochs

    def at(self, progress: float) -> float:
        return self.factor * self.rule(progress)

    def __repr__(self) -> str:
        return f"{self.factor!r} * {_in_brackets(self.rule)}"


# ---- rates and momentum for a batch ------------------------------------------------------------------------------------------


def linear_scaling(batch: float, *, rate: float = 0.1, reference: float = 256) -> float:
    """The peak rate for a batch, proportional to it (Goyal et al. 2017).

    Args:
        batch: The samples of one update.
        rate: The rate that is right for `reference`.
        reference: The batch that `rate` is right for.

    Returns:
        rate * batch / reference.

    Example:
        >>> phalanx.lr.linear_scaling(8192)
        3.2
    """
    return rate * batch / reference


def sqrt_scaling(batch: float, *, rate: float = 0.1, reference: float = 256) -> float:
    """The peak rate that keeps the variance of a step, proportional to the root of the batch (Krizhevsky, arXiv 1404.5997).

    Args:
        batch: The samples of one update.
        rate: The rate that is right for `reference`.
        reference: The batch that `rate` is right for.

    Returns:
        rate * sqrt(batch / reference).

    Example:
        >>> phalanx.lr.sqrt_scaling(1024)
        0.2
    """
    return rate * math.sqrt(batch / reference)


def momentum_for(batch: float, *, momentum: float = 0.9, reference: float, rate_factor: float = 1.0) -> float:
    """The momentum that keeps the noise of SGD when the batch changes (Smith et al., arXiv 1711.00489).

    The noise scale rate * N / (batch * (1 - momentum)) stays the same.

    Args:
        batch: The new batch.
        momentum: The momentum that is right for `reference`.
        reference: The old batch.
        rate_factor: The factor by which the rate changes.

    Returns:
        The new momentum.

    Raises:
        ValueError: If no momentum keeps the noise. The message names a rate factor that does.

    Example:
        >>> phalanx.lr.momentum_for(512, momentum=0.9, reference=256)
        0.95
    """
    found = 1.0 - (1.0 - momentum) * rate_factor * reference / batch
    if not 0 <= found < 1:
        raise ValueError(
            f"momentum_for({batch}, momentum={momentum}, reference={reference}, rate_factor={rate_factor}) is {found:.3g}: "
            f"no momentum keeps the noise; change the rate by {batch / reference:.3g} as well"
        )
    return found


# ---- driving an optimizer ----------------------------------------------------------------------------------------------------


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
            old.fill_(new)  # a captured graph reads this very tensor
        else:
            group[option] = new
    return value


def sample(rule: Rule, epochs: float | None = None, points: int = 200) -> list[tuple[float, float]]:
    """Values of a rule at equal distances, for a plot.

    Args:
        rule: The rule.
        epochs: The last epoch. By default that of the rule.
        points: The number of values.

    Returns:
        A list of (progress, value).

    Raises:
        ValueError: If the rule has no end and you gave no `epochs`, or `points` is less than 2.

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


def _parts(rule: Rule, kind: type[Chain] | type[Product]) -> tuple[Rule, ...]:
    return rule.rules if isinstance(rule, kind) else (rule,)


def _in_brackets(rule: Rule) -> str:
    return f"({rule!r})" if isinstance(rule, Chain) else repr(rule)
