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
    """A function of progress. Subclasses are frozen dataclasses with `epochs` (infinite if they have no end) and `at`."""

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
    """One value."""

    epochs: float
    value: float = 1.0

    def at(self, progress: float) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class warmup(Rule):  # noqa: N801
    """From `start` to 1 on a straight line (Goyal et al., arXiv 1706.02677: 5 epochs from 1 / ranks; Fujitsu: 36 from 0)."""

    epochs: float
    start: float = 0.0

    def at(self, progress: float) -> float:
        return self.start + (1.0 - self.start) * (progress / self.epochs)


@dataclass(frozen=True, slots=True)
class exponential_warmup(Rule):  # noqa: N801
    """From `start` to 1 by equal factors in equal times."""

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
    """1, multiplied by `factor` at each of the epochs `at_epochs`: step(30, 60, 80)."""

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
    """From 1 to `end` on a straight line."""

    epochs: float
    end: float = 0.0

    def at(self, progress: float) -> float:
        return 1.0 - (1.0 - self.end) * (progress / self.epochs)


@dataclass(frozen=True, slots=True)
class polynomial(Rule):  # noqa: N801
    """From 1 to `end` as (1 - end) * (1 - p)**power + end: MLPerf with power 2, Fujitsu ("power") with 2.2."""

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
    """From 1 to `end` on half a wave (Loshchilov and Hutter, arXiv 1608.03983, without restarts)."""

    epochs: float
    end: float = 0.0

    def at(self, progress: float) -> float:
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * (progress / self.epochs)))


@dataclass(frozen=True, slots=True)
class natan(Rule):  # noqa: N801
    """Fujitsu's arc tangent: 0.5 - atan(x / decay + x**3 / 1000) / pi, with x the epochs since `turn`, where it is 0.5.

    As in their code (MLPerf Training v0.6, open division): after the turn x counts twice, and `final`, if given, stretches that
    part so that the last value is `final`.
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

    1/2 is reached at `center`, 1 half a `period` later.
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
    """The 90 epochs of Akiba et al. (arXiv 1711.04325), factors of 0.1 * batch / 256: a half, and that for long, is the peak."""
    return constant(40, 0.5) >> constant(30, 0.075) >> constant(15, 0.01) >> constant(5, 0.001)


# ---- compositions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chain(Rule):
    """One rule after another; made by `>>`. Where one ends the next begins: the end itself belongs to the next."""

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
    """Rules side by side; made by `*`."""

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
    """A rule times a number; made by `*`."""

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
    """The peak rate for `batch` samples per step, where `rate` is right for `reference`: proportional (Goyal 2017)."""
    return rate * batch / reference


def sqrt_scaling(batch: float, *, rate: float = 0.1, reference: float = 256) -> float:
    """The peak rate that keeps the variance of a step: proportional to the root of the batch (Krizhevsky, arXiv 1404.5997)."""
    return rate * math.sqrt(batch / reference)


def momentum_for(batch: float, *, momentum: float = 0.9, reference: float, rate_factor: float = 1.0) -> float:
    """The momentum that keeps the noise of SGD when the batch changes from `reference` and the rate by `rate_factor`.

    The noise scale rate * N / (batch * (1 - momentum)) stays the same (Smith et al., arXiv 1711.00489). A batch that shrinks
    without its rate asks for less than no momentum: that is an error.
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
    """Set the learning rate (or another `option`) of all groups to `rule(progress)` and return it.

    A group with an entry "lr_scale" gets so many times the rate. `correct_momentum` multiplies the velocities by new rate / old
    rate: for optimizers whose velocity contains the rate, as that of `Lars` does (Goyal 2017, remark 2), and no others.
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
    """(progress, value) at `points` equal distances over the rule's epochs, or over `epochs`: for a plot."""
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
