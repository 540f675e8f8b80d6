"""What varies and what breaks: the distribution of step times, and the share of a machine's time that failures leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, expm1, inf, sqrt

import numpy as np
from numpy.typing import NDArray

from .program import Program
from .step import StepPlan, exchanged, gossip_clocks, predict_step
from .workload import Compute, Model

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Noise:
    """How ranks differ. `jitter` is the relative spread of one rank's steps. The share `stragglers` is `slower` times as slow."""

    jitter: float = 0.0
    stragglers: float = 0.0
    slower: float = 1.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of the step time in seconds, over `samples` simulated steps."""

    p50: float
    p99: float
    mean: float
    samples: int


def spread(
    program: Program,
    model: Model,
    compute: Compute,
    batch: float,
    plan: StepPlan,
    noise: Noise,
    *,
    always: Floats | None = None,
    rounds: Sequence[Program] = (),
    samples: int = 100,
) -> Spread:
    """Step times with randomly slowed ranks: log-normal jitter, and new stragglers in every step. `always` multiplies all.

    `rounds` take turns with `program`, as in `predict_step`.
    """
    if samples < 1:
        raise ValueError(f"{samples} samples; give at least 1")
    programs = (program, *rounds)
    drawn = _slowness(program.cluster.ranks, noise, always)
    if plan.sync == "gossip":  # one long run: a rank that was late in a step is late in the next
        nbytes, mixing = exchanged(program.profile, model, plan)
        works = (compute.seconds(batch) * slowness + compute.optimizer for slowness in islice(drawn, len(programs) + samples))
        ends = [float(clock.mean()) for clock in gossip_clocks(programs, nbytes, works, mixing)][-1 - samples :]
        seconds = [max(plan.input, took) for took in np.diff(ends)]
    else:
        steps = (predict_step(program, model, compute, batch, plan, slowness=slowness) for slowness in drawn)
        seconds = [step.seconds for step in islice(steps, samples)]
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    return Spread(float(p50), float(p99), float(np.mean(seconds)), samples)


def _slowness(ranks: int, noise: Noise, always: Floats | None) -> Iterator[Floats]:
    """For each step, the factor on each rank's computing time."""
    rng = np.random.default_rng(noise.seed)
    while True:
        slowness = np.exp(noise.jitter * rng.standard_normal(ranks))
        slowness[rng.random(ranks) < noise.stragglers] *= noise.slower
        yield slowness if always is None else slowness * always


@dataclass(frozen=True, slots=True)
class Failures:
    """`mtbf` seconds between failures of one host, `checkpoint` seconds to write one, `restart` until training continues."""

    mtbf: float
    checkpoint: float
    restart: float


def best_interval(failures: Failures, hosts: int) -> float:
    """Seconds of training between checkpoints that lose the least time (Young 1974; Daly 2006, first order)."""
    return sqrt(2 * failures.checkpoint * failures.mtbf / hosts) if failures.checkpoint else 0.0


def goodput(failures: Failures, hosts: int, interval: float) -> float:
    """The part of wall time that is useful training, for exponential failures that end the whole job (Daly 2006, complete model).

    With mean M between failures of the job, an interval t of training takes M e^(R/M) (e^((t+C)/M) - 1) seconds.
    """
    if failures.mtbf == inf:
        return interval / (interval + failures.checkpoint) if interval else 1.0
    mean = failures.mtbf / hosts
    if interval <= 0:
        raise ValueError(f"a checkpoint every {interval} s; give more than 0")
    try:
        return interval / (mean * exp(failures.restart / mean) * expm1((interval + failures.checkpoint) / mean))
    except OverflowError:  # the job fails long before it is running again
        return 0.0
