"""One rank's route through the epochs: which samples are in which micro-batch. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.data.batch import BatchPlan
from phalanx.data.owed import Ranges, stands_for
from phalanx.data.position import Last, Position, Steps, check_last, micro_batches, share


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Micro-batch `number` of the `of` that a rank has in a step: some of the step's places in an order."""

    seed: int
    epoch: int
    index: int  # of the step in its epoch
    step: range  # the places of the step, all ranks together
    number: int
    of: int
    places: range  # those of this micro-batch
    after: Position  # the position after the step
    owed: Ranges = ()  # what the places from `owed_at` on stand for
    owed_at: int = 0

    @property
    def order(self) -> Ranges:
        """Its places in the order of the epoch."""
        return stands_for(self.places, self.owed_at, self.owed)

    @property
    def ends_step(self) -> bool:
        """Whether it is the last of its step."""
        return self.number == self.of - 1


BatchPolicy = Literal["keep_batch", "keep_share"]
"""What happens to the batch when ranks leave or join.

keep_batch   its size stays, divided over the current ranks
keep_share   each rank's share stays, so the batch shrinks or grows
"""


@dataclass(frozen=True, slots=True)
class World:
    """How batches follow the number of ranks. `first` is the number of ranks that the batch plan was made for.

    `speeds`: samples are divided in these proportions, or evenly if they are for another number of ranks.
    """

    policy: BatchPolicy = "keep_batch"
    first: int = 1
    speeds: tuple[float, ...] = ()

    def part(self, step: range, ranks: int, rank: int) -> range:
        """The places of a step that a rank has."""
        if len(self.speeds) != ranks:
            return share(step, ranks, rank)
        total = sum(self.speeds)
        begin, end = (round(len(step) * sum(self.speeds[:r]) / total) for r in (rank, rank + 1))
        return step[begin:end]

    def batch(self, planned: int, ranks: int) -> int:
        """The samples of a step on `ranks` ranks."""
        return planned if self.policy == "keep_batch" else max(1, planned * ranks // self.first)


@dataclass(frozen=True, slots=True)
class Route:
    """The path of `rank` of `ranks` through `n` samples under a batch plan."""

    n: int
    plan: BatchPlan
    last: Last
    ranks: int = 1
    rank: int = 0
    micro_batch: int | None = None
    world: World | None = None  # of an elastic job, whose number of ranks changes

    def __post_init__(self) -> None:
        check_last(self.last)
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")
        if self.n < 1:
            raise ValueError("there are no samples")
        for stage in self.plan.stages:  # check now, not when its first epoch begins
            if self.world is None:
                stage.split(self.ranks, self.micro_batch)
            if self.last == "drop" and stage.batch > self.n:
                raise ValueError(
                    f"a batch of {stage.batch} of {self.n} samples: last='drop' would leave out all of them; "
                    "take a smaller batch, or last='pad' or 'keep'"
                )

    def steps(self, position: Position) -> Steps:
        """The steps from `position` to the end of its epoch."""
        return Steps(self.n, self.batch(position.epoch), self.last, position.samples)

    def batch(self, epoch: int) -> int:
        """The samples of one step of `epoch`, over all ranks."""
        batch = self.plan.at(epoch).batch
        return batch if self.world is None else self.world.batch(batch, self.ranks)

    def micro_count(self, position: Position) -> int:
        """How many micro-batches a rank has from `position` to the end of its epoch."""
        steps = self.steps(position)
        if not len(steps):
            return 0
        first, final = (len(self._cut(steps[s], position.epoch)) for s in (0, len(steps) - 1))  # only the last may be smaller
        return (len(steps) - 1) * first + final

    def reach(self, position: Position) -> Position:
        """`position`, or the start of the next epoch if nothing is left of its own."""
        if position.samples > self.n:
            raise ValueError(f"{position}: there are {self.n} samples")
        return position if len(self.steps(position)) else Position(position.seed, position.epoch + 1)

    def walk(self, position: Position) -> Iterator[MicroBatch]:
        """Yield all micro-batches from `position` on, epoch after epoch, without end."""
        while True:
            steps = self.steps(position)
            for s in range(len(steps)):
                index, after = steps[s].start // steps.batch, steps.position_after(s, position)
                parts = self._cut(steps[s], position.epoch)
                for number, places in enumerate(parts):
                    at = (position.seed, position.epoch, index, steps[s], number, len(parts), places, after)
                    yield MicroBatch(*at, position.owed, position.samples)
            position = Position(position.seed, position.epoch + 1)

    def _cut(self, step: range, epoch: int) -> tuple[range, ...]:
        stage = self.plan.at(epoch)
        if self.world is None:
            largest = stage.split(self.ranks, self.micro_batch).micro_batch
            return micro_batches(step, self.ranks, self.rank, largest)
        # any number of ranks can divide the batch, give or take one sample; all ranks have the same number of micro-batches
        mine = self.world.part(step, self.ranks, self.rank)
        most = max(len(self.world.part(step, self.ranks, rank)) for rank in range(self.ranks))
        count = max(1, -(-most // self.micro_batch)) if self.micro_batch else self._even_count(step, epoch)
        return tuple(share(mine, count, i) for i in range(count))

    def _even_count(self, step: range, epoch: int) -> int:
        """The number of micro-batches if all shares were equal: larger shares do not get more of them."""
        stage = self.plan.at(epoch)
        largest = -(-self.batch(epoch) // (self.ranks * (stage.micro_steps or 1)))
        return max(1, math.ceil(math.ceil(len(step) / self.ranks) / largest))
