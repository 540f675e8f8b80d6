"""What study_large_batch.py does, as values: methods, sets of data, and the runs that they ask for after the rows there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RANKS = 2
SEARCH_SEED = 100


@dataclass(frozen=True)
class Method:
    """Settings on top of a recipe. `linear`: its rate follows the linear rule from the smallest batch on."""

    name: str
    settings: tuple[str, ...]
    linear: bool = False
    warm: bool = True
    controlled: bool = False  # an earlier stage has a smaller batch
    from_smallest: bool = True  # whether it is another method at the smallest batch
    to_largest: bool = True  # if not, it is there to make the judge, the best of the smallest batch, better
    factor: float = 1.0  # of the rate that the linear rule gives

    @property
    def optimizer(self) -> str:
        return "lars" if "optimizer.name=lars" in self.settings else "sgd"

    @property
    def as_searched(self) -> tuple[Any, ...]:
        """Equal for methods that differ only in what they make of the rates that were found."""
        return self.settings, self.warm, self.controlled


@dataclass(frozen=True)
class Data:
    """What is studied on one set of data; `rates` are those that are tried, at the smallest and at the largest batch."""

    name: str
    recipe: str
    batches: tuple[int, ...]
    methods: tuple[str, ...]
    rates: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]  # by optimizer
    epochs: int
    warmup: int
    small_epochs: int  # of the first stage, where the batch is controlled
    micro_batch: int
    quick_epochs: int
    with_lars: tuple[str, ...] = ()  # settings of methods that have it

    def has(self, method: Method, batch: int) -> bool:
        """Whether it is studied at this batch."""
        return method.from_smallest if batch == self.batches[0] else method.to_largest

    def settings(self, method: Method, batch: int, rate: float, epochs: int) -> list[str]:
        """All that differs from the recipe, seed and directory of the data aside."""
        small = round(self.small_epochs * epochs / self.epochs)
        stages = f"{small}x{batch // SMALLER},{epochs - small}x{batch}" if method.controlled else ""
        micro = min(self.micro_batch, batch // RANKS // (SMALLER if method.controlled else 1))
        return [
            f"epochs={epochs}",
            f"batch={batch}",
            f"stages={stages}",
            f"micro_batch={micro}",
            f"rate.peak={rate:.6g}",
            "rate.decay=linear",
            *method.settings,
            *(self.with_lars if method.optimizer == "lars" else ()),
            f"rate.warmup={self.warmup * epochs / self.epochs if method.warm else 0:g}",
            f"rate.reference={batch}",  # a smaller first stage has its rate in proportion
            f"evaluate_every={epochs}",
            f"log_every={LOG_EVERY}",
            "trace_steps=0",
        ]


LOG_EVERY = 1_000_000  # steps: once per epoch, because every interval asks all ranks
SMALLER = 4  # the first stage of a controlled batch has a quarter of it
PLAIN = ("optimizer.name=sgd", "label_smoothing=0")
PLAIN_SMOOTH = ("optimizer.name=sgd", "label_smoothing=0.1")
LARS = ("optimizer.name=lars", "label_smoothing=0")
SMOOTH = ("optimizer.name=lars", "label_smoothing=0.1")
POLYNOMIAL = ("rate.decay=polynomial", "rate.power=2")  # as in the published runs with LARS
METHODS = {
    method.name: method
    for method in (
        Method("SGD, linear rule", PLAIN, linear=True, warm=False),
        Method("+ warm-up", PLAIN, linear=True),
        Method("SGD + warm-up, own rate", PLAIN, from_smallest=False),
        Method("+ LARS", LARS),
        Method("+ label smoothing", SMOOTH),
        Method("+ batch-size control", SMOOTH, controlled=True, from_smallest=False),
        Method("SGD + label smoothing", PLAIN_SMOOTH, linear=True, to_largest=False),
        # the area under a parabola is two thirds of that under a line: LARS, too, has its best peak there at twice the rate
        Method("SGD + label smoothing, polynomial", (*PLAIN_SMOOTH, *POLYNOMIAL), linear=True, to_largest=False, factor=2.0),
    )
}
DATA = {
    data.name: data
    for data in (
        Data(
            name="fashion-mnist",
            recipe="fashion-mnist-8k",
            batches=(128, 512, 2048, 8192),
            methods=tuple(name for name, method in METHODS.items() if method.to_largest),
            rates={
                "sgd": ((0.025, 0.05, 0.1), (0.2, 0.4, 0.8, 1.6)),
                "lars": ((0.5, 1.0, 2.0, 4.0), (4.0, 8.0, 16.0, 32.0, 64.0)),
            },
            epochs=24,
            warmup=4,
            small_epochs=6,
            micro_batch=1024,
            quick_epochs=4,
        ),
        Data(
            name="cifar10",
            recipe="cifar10-8k",
            batches=(128, 8192),
            methods=("SGD, linear rule", "+ batch-size control", "SGD + label smoothing", "SGD + label smoothing, polynomial"),
            rates={
                "sgd": ((0.0125, 0.025, 0.05), ()),  # at the largest batch the linear rule has the only one
                "lars": ((), (16.0, 32.0, 64.0)),
            },
            epochs=30,
            warmup=4,
            small_epochs=10,
            micro_batch=128,
            quick_epochs=4,
            with_lars=POLYNOMIAL,
        ),
    )
}


# ---- what is to be done --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One row of the study."""

    data: str
    purpose: str  # "search" or "grid"
    method: str
    batch: int
    rate: float
    seed: int
    epochs: int

    def found_in(self, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        return next((row for row in rows if vars(self).items() <= row.items()), None)


def searches(data: Data) -> Iterator[Run]:
    """The rates to try at the largest batch for every method that uses what is found, at the smallest for every optimizer."""
    for end in (-1, 0):
        done = set()
        for name in data.methods:
            method = METHODS[name]
            key = method.as_searched if end else method.optimizer
            used = not method.linear if end else method.from_smallest
            if used and key not in done:
                done.add(key)
                for rate in data.rates[method.optimizer][end]:
                    yield Run(data.name, "search", name, data.batches[end], rate, SEARCH_SEED, data.epochs)


def best_rate(data: Data, method: Method, end: int, rows: list[dict[str, Any]]) -> float:
    """The rate with the highest accuracy at one end of the batches; the smaller one of equals."""
    found = []
    for run in searches(data):
        other = METHODS[run.method]
        same = other.as_searched == method.as_searched if end else other.optimizer == method.optimizer
        if run.batch != data.batches[end] or not same:
            continue
        row = run.found_in(rows)
        assert row is not None, f"{run} comes before the grid"
        found.append((row["accuracy"], -run.rate))
    return -max(found)[1]


def rate_for(data: Data, method: Method, batch: int, rows: list[dict[str, Any]]) -> float:
    """By the linear rule, or by equal factors between what was found at both ends."""
    low, high = data.batches[0], data.batches[-1]
    if method.linear:
        return method.factor * best_rate(data, method, 0, rows) * batch / low
    if batch == high:
        return best_rate(data, method, -1, rows)
    way = math.log(batch / low) / math.log(high / low)
    return float(f"{best_rate(data, method, 0, rows) ** (1 - way) * best_rate(data, method, -1, rows) ** way:.4g}")


def untried_rate(data: Data, method: Method, end: int) -> float:
    """From the middle of the search, by the linear rule where a method follows that."""
    small, large = data.rates[method.optimizer]
    if method.linear:
        return method.factor * small[1] * data.batches[end] / data.batches[0]
    return (large if end else small)[1]


def grid(data: Data, seed: int, rows: list[dict[str, Any]]) -> Iterator[Run]:
    """All methods at all batches, both ends first; at the smallest only those that differ from another one there."""
    for batch in (data.batches[-1], data.batches[0], *data.batches[1:-1]):
        for name in data.methods:
            method = METHODS[name]
            if data.has(method, batch):
                rate = rate_for(data, method, batch, rows)
                yield Run(data.name, "grid", name, batch, rate, seed, data.epochs)
