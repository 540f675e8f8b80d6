"""Formal sums: what a slot holds, as an exact combination of the ranks' inputs."""

from __future__ import annotations

from fractions import Fraction

JUNK = -1  # the origin of undefined contents that a collective leaves behind


class FormalSum:
    """An exact linear combination of the ranks' inputs, {origin: weight}. Immutable, so slots may share it."""

    __slots__ = ("weights",)

    def __init__(self, weights: dict[int, int | Fraction]) -> None:
        self.weights = weights

    def __add__(self, other: FormalSum) -> FormalSum:
        small, large = sorted((self.weights, other.weights), key=len)
        weights = large.copy()
        for origin, weight in small.items():
            weights[origin] = weights.get(origin, 0) + weight
        return FormalSum(weights)

    def times(self, factor: Fraction) -> FormalSum:
        """Multiply every weight by `factor`. Zero times junk is still junk: it may be infinite or NaN."""
        if not factor:
            return FormalSum({JUNK: 1} if JUNK in self.weights else {})
        return FormalSum({origin: weight * factor for origin, weight in self.weights.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FormalSum) and self.weights == other.weights

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """`x0 + 2*x1 + ?`; more than three consecutive origins of equal weight become `x0 + ... + x5`."""
        runs: list[list[int]] = []
        for origin in sorted(self.weights.keys() - {JUNK}):
            weight = self.weights[origin]
            if runs and runs[-1][-1] == origin - 1 and self.weights[runs[-1][-1]] == weight:
                runs[-1].append(origin)
            else:
                runs.append([origin])
        terms: list[str] = []
        for run in runs:
            weight = self.weights[run[0]]
            shown = [f"x{origin}" if weight == 1 else f"{_number(weight)}*x{origin}" for origin in run]
            terms += shown if len(run) <= 3 else [shown[0], "...", shown[-1]]
        if len(terms) > 24:
            terms[12:-11] = [f"<{len(terms) - 23} terms>"]
        if JUNK in self.weights:
            terms.append("?")
        return " + ".join(terms) or "0"


def _number(weight: int | Fraction) -> str:
    """Format a weight. After thousands of additions it may have more digits than Python prints."""
    size = weight.numerator.bit_length() - weight.denominator.bit_length()
    return str(weight) if max(weight.numerator.bit_length(), weight.denominator.bit_length()) < 256 else f"(about 2^{size})"
