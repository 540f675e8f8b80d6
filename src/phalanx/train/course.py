"""The course of a run: rate, momentum and batch of every step, computed from the configuration only.

A step belongs to an epoch, and so to a stage of the batch plan. The rate is the rule of `RateConfig` at the step's progress times
the factor of `rate.scaling` for the stage's batch. The momentum is that of the stage, by `optimizer.momentum_rule`. Progress
includes the step itself: the first of 10 steps has 0.1 epochs, the last one exactly 1. So the first step has a rate above zero,
and a warm-up of 36 epochs of 15 steps reaches its peak at step 540.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch

from phalanx.data import BatchPlan, Stage
from phalanx.data.position import Last
from phalanx.optim import lr
from phalanx.train.update import OptimizerConfig, RateConfig

HIGHEST = 1e30  # of a learning rate; the sum of a few would be infinite


@dataclass(frozen=True, slots=True)
class Moment:
    """The settings of one step of a run. Its `number`, from 1, is None if the number of steps per epoch is unknown."""

    number: int | None
    progress: float  # epochs, including this step
    batch: int
    rate: float
    momentum: float | None  # None if the optimizer keeps its own


@dataclass(frozen=True)
class Course:
    """Computes the settings of each step from a batch plan, a rate and an optimizer. ValueError if they contradict."""

    plan: BatchPlan
    rate: RateConfig
    optimizer: OptimizerConfig

    def __post_init__(self) -> None:
        self.rate.over(self.plan.epochs)
        for stage in self.plan.stages:
            self._momentum_of(stage)

    def rate_in(self, epoch: int) -> lr.Rule:
        """The rate as a function of progress, in the stage of `epoch`."""
        return self.rate.scaled(self.plan.at(epoch).batch) * self.rate.over(self.plan.epochs)

    def momentum_in(self, epoch: int) -> float | None:
        """The momentum in the stage of `epoch`; None if the optimizer keeps its own."""
        return self._momentum_of(self.plan.at(epoch))

    def at(self, epoch: int, done: float, number: int | None = None) -> Moment:
        """The step after which the fraction `done` of `epoch` is complete."""
        progress, batch = epoch + done, self.plan.at(epoch).batch
        try:
            rate = self.rate_in(epoch)(progress)
        except OverflowError:
            rate = math.inf
        if not abs(rate) <= HIGHEST:
            raise ValueError(f"the learning rate of epoch {progress:.4g} is {rate:g}: change the settings of `rate`")
        return Moment(number, progress, batch, rate, self.momentum_in(epoch))

    def at_step(self, number: int, samples: int, last: Last) -> Moment:
        """Step `number`, from 1, of a run on `samples` samples; `last` decides about samples that do not fill a batch."""
        epochs = self.plan.epochs
        steps = self.plan.steps_before(epochs, samples, last)
        if not 1 <= number <= steps:
            raise ValueError(f"step {number}: the run has {steps} steps, which are counted from 1")
        epoch = bisect_left(range(epochs), number, key=lambda e: self.plan.steps_before(e + 1, samples, last))
        before, after = (self.plan.steps_before(e, samples, last) for e in (epoch, epoch + 1))
        return self.at(epoch, (number - before) / (after - before), number)

    def steer(self, optimizer: torch.optim.Optimizer, epoch: int, progress: float) -> float:
        """Set the optimizer's values for a step of `epoch`, and return the rate."""
        correct = self.optimizer.correct_momentum
        rate = lr.apply(optimizer, self.rate_in(epoch), progress, correct_momentum=correct)
        momentum = self.momentum_in(epoch)
        if momentum is not None:
            lr.apply(optimizer, lr.constant(1, momentum), progress, option="momentum")
        self.optimizer.rule.steer(optimizer, progress)
        return rate

    def _momentum_of(self, stage: Stage) -> float | None:
        if self.optimizer.is_own:
            return None
        first = self.plan.stages[0]
        if self.optimizer.momentum_rule == "fixed" or stage.batch == first.batch:
            return self.optimizer.momentum
        factor = self.rate.scaled(stage.batch) / self.rate.scaled(first.batch)
        return lr.momentum_for(stage.batch, momentum=self.optimizer.momentum, reference=first.batch, rate_factor=factor)
