"""From step time to a whole training run: epochs to an accuracy, hours, money, energy, and time lost to failures."""

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
ACCURACY = 75.9  # % top-1 of these
LEAST_GOODPUT = 0.01  # with less, a run does not end


@dataclass(frozen=True, slots=True)
class Reached:
    """An accuracy that a published run of ResNet-50 reached with this batch, or smaller ones."""

    accuracy: float
    batch: float
    epochs: float
    source: str


BESIDE = (  # what the table above does not have: more accuracy, or larger batches
    Reached(76.3, 8192, 90.0, "Goyal et al., arXiv 1706.02677: 76.3 % with a batch of 8,192 and 90 epochs"),
    Reached(75.08, 81920, 90.0, "Yamazaki et al., arXiv 1903.12650: 75.08 % with a batch of 81,920 and 90 epochs"),
)


@dataclass(frozen=True, slots=True)
class Prices:
    """What a device costs per hour, in any currency, and draws in watts, its share of the host included."""

    per_hour: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """A whole run: `hours` of wall time, including what failures cost."""

    epochs: float
    epochs_source: str
    steps: float
    hours: float
    goodput: float
    checkpoint_every: float | None  # s; None: none is worth its time, or failures were not given
    cost: float | None
    kwh: float | None


def largest_batch(accuracy: float | None = None) -> float:
    """The largest batch with which a published run reached `accuracy` (in %; by default that of MLPerf)."""
    wanted = ACCURACY if accuracy is None else accuracy
    known = [float(EPOCHS_TO_ACCURACY[-1][0])] if wanted <= ACCURACY else []
    known += [reached.batch for reached in BESIDE if reached.accuracy >= wanted]
    if not known:
        best = max(BESIDE, key=lambda reached: reached.accuracy)
        raise ValueError(f"no published run of ResNet-50 that we know reached {wanted:g} %; the best is {best.source}")
    return max(known)


def epochs_for(batch: float, accuracy: float | None = None) -> tuple[float, str]:
    """Epochs at this global batch, and their source. Between published points, they are linear in the logarithm."""
    table = EPOCHS_TO_ACCURACY
    largest = largest_batch(accuracy)
    wanted = ACCURACY if accuracy is None else accuracy
    if wanted > ACCURACY or (accuracy is not None and batch > table[-1][0]):
        for reached in BESIDE:
            if reached.accuracy >= wanted and batch <= reached.batch:
                return reached.epochs, reached.source
        raise ValueError(
            f"no published run of ResNet-50 that we know reached {wanted:g} % with a batch of {batch:g}; {largest:g} did"
        )
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
    accuracy: float | None = None,
    prices: Prices | None = None,
    failures: Failures | None = None,
) -> Training:
    """A run of `epochs` (by default as many as were published for this batch) with steps of `step` seconds."""
    needed, source = epochs_for(batch, accuracy) if epochs is None else (epochs, "as asked")
    steps = needed * samples / batch
    useful, interval = 1.0, None
    if failures is not None:
        interval = best_interval(failures, hosts)
        if interval < steps * step:
            useful = goodput(failures, hosts, interval)
        else:  # over before a checkpoint pays off: a failure restarts the run
            useful, interval = goodput(replace(failures, checkpoint=0.0), hosts, steps * step), None
        if useful < LEAST_GOODPUT:
            raise ValueError(
                f"{hosts} host(s) that fail every {failures.mtbf / 3600:g} h stop the job every {failures.mtbf / hosts:.3g} s,"
                f" and it needs {failures.restart:g} s to continue: it would never end."
                " Give fewer hosts, a longer --mtbf or a shorter --restart"
            )
    hours = steps * step / useful / 3600
    prices = prices or Prices()
    cost = None if prices.per_hour is None else hours * devices * prices.per_hour
    kwh = None if prices.watts is None else hours * devices * prices.watts / 1000
    return Training(needed, source, steps, hours, useful, interval, cost, kwh)
