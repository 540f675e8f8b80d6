"""One rank's route through the epochs: which samples come in which micro-batch. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.data.batch import BatchPlan
from phalanx.data.position import Last, Position, Steps, check_last, micro_batches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Number `number` of the `of` micro-batches that a rank has in a step: some of the step's places in an order."""

    seed: int
    epoch: int
    index: int  # of the step in its epoch
    step: range  # the places of the step, all ranks together
    number: int
    of: int
    places: range  # those of this micro-batch
    after: Position  # where the run stands when the step is done

    @property
    def ends_step(self) -> bool:
        """Whether it is the last of its step."""
        return self.number == self.of - 1


@dataclass(frozen=True, slots=True)
class Route:
    """The way of `rank` among `ranks` through `n` samples under a batch plan."""

    n: int
    plan: BatchPlan
    last: Last
    ranks: int = 1
    rank: int = 0
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        check_last(self.last)
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")
        if self.n < 1:
            raise ValueError("there are no samples")
        for stage in self.plan.stages:  # now, and not when its first epoch begins
            stage.split(self.ranks, self.micro_batch)
            if self.last == "drop" and stage.batch > self.n:
                raise ValueError(
                    f"a batch of {stage.batch} of {self.n} samples: last='drop' would leave out all of them; "
                    "take a smaller batch, or last='pad' or 'keep'"
                )

    def steps(self, position: Position) -> Steps:
        """The steps from `position` to the end of its epoch."""
        return Steps(self.n, self.plan.at(position.epoch).batch, self.last, position.samples)

    def micro_count(self, position: Position) -> int:
        """How many micro-batches a rank has from `position` to the end of its epoch."""
        steps = self.steps(position)
        if not len(steps):
            return 0
        first, final = (len(self._cut(steps[s], position.epoch)) for s in (0, len(steps) - 1))  # only the last may be smaller
        return (len(steps) - 1) * first + final

    def reach(self, position: Position) -> Position:
        """`position`, or the next epoch where nothing is left of its own."""
        if position.samples > self.n:
            raise ValueError(f"{position}: there are {self.n} samples")
        return position if len(self.steps(position)) else Position(position.seed, position.epoch + 1)

    def walk(self, position: Position) -> Iterator[MicroBatch]:
        """All micro-batches from `position` on, through this epoch and the next, without end."""
        while True:
            steps = self.steps(position)
            for s in range(len(steps)):
                index, after = steps[s].start // steps.batch, steps.position_after(s, position)
                parts = self._cut(steps[s], position.epoch)
                for number, places in enumerate(parts):
                    yield MicroBatch(position.seed, position.epoch, index, steps[s], number, len(parts), places, after)
            position = Position(position.seed, position.epoch + 1)

    def _cut(self, step: range, epoch: int) -> tuple[range, ...]:
        largest = self.plan.at(epoch).split(self.ranks, self.micro_batch).micro_batch
        return micro_batches(step, self.ranks, self.rank, largest)
