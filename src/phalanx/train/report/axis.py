"""An axis of a plot: map values to positions, choose round ticks, and format numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Format = Callable[[float], str]


@dataclass(frozen=True)
class AxisScale:
    """Maps values to positions on the page: `low` at `begin`, `high` at `end`, logarithmic if `log`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    if high <= low:
        pad = abs(low) / 2 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from at most `low` to at least `high`, every n-th if there are many."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    apart = max(1, math.ceil((last - first) / 6))
    return [10.0**i for i in range(first, max(last, first + 1) + apart, apart) if i < last + apart]


def number(value: float) -> str:
    """`0.05`, `120`, `2.5k`, `1e-06`."""
    size = abs(value)
    if size >= 10_000:
        for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= limit:
                return f"{value / limit:.4g}{letter}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """`97.5 %`."""
    return f"{100 * value:.4g} %"


def milliseconds(value: float) -> str:
    """Seconds as `12.5 ms`."""
    return f"{1000 * value:.3g} ms"


UNITS: dict[str, Format] = {"number": number, "percent": percent, "ms": milliseconds}
