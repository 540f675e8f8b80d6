"""From step time to a whole training: epochs to an accuracy, hours, money, energy, what failures take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import log

from .chance import Failures, best_interval, goodput

# Epochs of ResNet-50 on ImageNet to 75.9 % top-1 by global batch, with LARS: the reference convergence points of MLPerf Training
# v4.0 (mlcommons/logging, training_4.0.0/rcps_resnet.json).
EPOCHS_TO_ACCURACY = (
    (1632, 35.0),
    (3264, 35.0),
    (4096, 40.0),
    (8192, 42.0),
    (13056, 45.4),
    (32768, 56.0),
    (49152, 68.0),
    (58880, 80.0),
    (65536, 84.5),
    (67840, 86.0),
)
EPOCHS_SOURCE = "MLPerf Training v4.0 reference convergence points: ResNet-50, LARS, 75.9 % top-1"


@dataclass(frozen=True, slots=True)
class Prices:
    """What a device costs per hour, in any currency, and draws in watts, its share of the host included."""

    per_hour: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """A whole run: `hours` of wall time with what failures take."""

    epochs: float
    epochs_source: str
    steps: float
    hours: float
    goodput: float
    checkpoint_every: float | None  # s; None: none is worth its time, or failures were not asked for
    cost: float | None
    kwh: float | None


def epochs_for(batch: float) -> tuple[float, str]:
    """Epochs at this global batch, between the published points linear in the logarithm, and what that rests on."""
    table = EPOCHS_TO_ACCURACY
    if batch <= table[0][0]:
        return table[0][1], f"{EPOCHS_SOURCE}; at {table[0][0]}, the smallest published batch"
    for (small, few), (large, many) in pairwise(table):
        if batch <= large:
            part = log(batch / small) / log(large / small)
            return few + part * (many - few), EPOCHS_SOURCE
    return table[-1][1], f"{EPOCHS_SOURCE}; at {table[-1][0]}, the largest published batch: {batch:g} may need more, or fail"


def whole_training(
    step: float,
    batch: float,
    samples: int,
    *,
    devices: int,
    hosts: int,
    epochs: float | None = None,
    prices: Prices | None = None,
    failures: Failures | None = None,
) -> Training:
    """A run of `epochs` (by default as many as were published for this batch) with steps of `step` seconds."""
    needed, source = epochs_for(batch) if epochs is None else (epochs, "as asked")
    steps = needed * samples / batch
    useful, interval = 1.0, None
    if failures is not None:
        interval = best_interval(failures, hosts)
        if interval < steps * step:
            useful = goodput(failures, hosts, interval)
        else:  # over before a checkpoint pays: a failure begins it anew
            useful, interval = goodput(replace(failures, checkpoint=0.0), hosts, steps * step), None
        if useful <= 0:
            raise ValueError(f"hosts that fail every {failures.mtbf:g} s leave no time to train: give more time between failures")
    hours = steps * step / useful / 3600
    prices = prices or Prices()
    cost = None if prices.per_hour is None else hours * devices * prices.per_hour
    kwh = None if prices.watts is None else hours * devices * prices.watts / 1000
    return Training(needed, source, steps, hours, useful, interval, cost, kwh)
