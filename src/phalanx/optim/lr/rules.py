"""The rules, named in lower case because they are used like functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.optim.lr.rule import Rule


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
    """From `start` to 1, growing by equal factors in equal times.

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
            raise ValueError(f"exponential_warmup(start={self.start}): no factor leads from 0 to 1; use start=0.01, for example")

    def at(self, progress: float) -> float:
        return float(self.start ** (1.0 - progress / self.epochs))


@dataclass(frozen=True, slots=True, init=False)
class step(Rule):  # noqa: N801
    """Starts at 1 and is multiplied by `factor` at each of `at_epochs`.

    Args:
        *at_epochs: Epochs in ascending order.
        factor: The factor at each of them.

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
    """From 1 to `end` as (1 - end) * (1 - p)**power + end, where p is the fraction of `epochs` done.

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
            raise ValueError(f"natan(epochs={self.epochs}, turn={self.turn}): the turn must lie between 0 and the end")
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
    """The weight of SGD in the RMSprop warm-up of Akiba et al. (arXiv 1711.04325): exponential up to 1/2, then linear up to 1.

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
