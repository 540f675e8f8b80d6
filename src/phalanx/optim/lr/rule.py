"""The base class of learning-rate rules, and how rules are chained, multiplied and scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass


class Rule:
    """A function of progress, counted in epochs. Call it, multiply it, or chain it with `>>`.

    Before its start a rule has its first value, and after its epochs the last one. A rule has no state,
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
            raise ValueError(f"{self!r}: epochs must be more than 0; leave the rule out instead")

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


@dataclass(frozen=True, slots=True)
class Chain(Rule):
    """Rules in sequence, made by `a >> b`. The end of one rule belongs to the next.

    Args:
        rules: The rules in order. Only the last may have no end.

    Raises:
        ValueError: If a rule other than the last has no end.

    Example:
        >>> phalanx.lr.warmup(5) >> phalanx.lr.linear(10)
        warmup(epochs=5, start=0.0) >> linear(epochs=10, end=0.0)
    """

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        for rule in self.rules[:-1]:
            if math.isinf(rule.epochs):
                raise ValueError(f"{rule!r} has no end, so nothing can follow it; multiply the rules, or give it epochs")

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
    """Rules multiplied at the same progress, made by `a * b`.

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
    """A rule times a number, made by `0.1 * a`.

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


def _parts(rule: Rule, kind: type[Chain] | type[Product]) -> tuple[Rule, ...]:
    return rule.rules if isinstance(rule, kind) else (rule,)


def _in_brackets(rule: Rule) -> str:
    return f"({rule!r})" if isinstance(rule, Chain) else repr(rule)
