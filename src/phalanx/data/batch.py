"""Batch plans: the total batch size of each epoch, and how ranks and micro-steps divide it.

The unit is the total batch: the samples of one weight update, over all ranks. Sony's batch-size control (Mikami et al., arXiv
1811.05233) is a list of stages; the learning rate of large-batch rules is a function of the same plan.

    plan = BatchPlan([Stage(epochs=30, batch=32768), Stage(epochs=60, batch=65536)])
    plan.at(29).batch, plan.at(30).batch          32768, 65536
    plan.at(30).split(ranks=512, micro_batch=64)  Split(ranks=512, micro_steps=2, micro_batch=64)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.data.position import Last, Steps, whole_number


@dataclass(frozen=True, slots=True)
class Split:
    """A total batch as ranks x micro_steps x micro_batch."""

    ranks: int
    micro_steps: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Some epochs with one batch size.

    Args:
        epochs: The number of epochs.
        batch: The samples of one update, over all ranks.
        micro_steps: The backward passes per rank and update. The default is 1, or as many as `split` needs.

    Raises:
        ValueError: If a value is less than 1.

    Example:
        >>> phalanx.Stage(epochs=30, batch=32768).split(ranks=512, micro_batch=32)
        Split(ranks=512, micro_steps=2, micro_batch=32)
    """

    epochs: int
    batch: int
    micro_steps: int | None = None

    def __post_init__(self) -> None:
        whole_number("epochs", self.epochs, 1)
        whole_number("batch", self.batch, 1)
        if self.micro_steps is not None:
            whole_number("micro_steps", self.micro_steps, 1)

    def split(self, ranks: int, micro_batch: int | None = None) -> Split:
        """Divide the batch over ranks and backward passes.

        Args:
            ranks: The number of ranks.
            micro_batch: The maximum number of samples of one rank's backward pass.

        Returns:
            A `Split` with `ranks`, `micro_steps` and `micro_batch`.

        Raises:
            ValueError: If the batch does not divide. The message names the nearest batches that do.
        """
        whole_number("ranks", ranks, 1)
        steps = self.micro_steps or 1
        if micro_batch is not None:
            whole_number("micro_batch", micro_batch, 1)
            if self.micro_steps is not None:
                raise ValueError(f"{self}: it has micro_steps already; leave micro_batch={micro_batch} out")
            steps = -(-self.batch // (ranks * micro_batch))
        if micro_batch is not None and steps > 1:
            unit, reason = ranks * micro_batch, f"micro-batches of {micro_batch}"
        else:
            unit, reason = ranks * steps, f"{steps} micro-step{'s' * (steps > 1)}"
        if self.batch % unit:
            raise ValueError(
                f"a batch of {self.batch} does not divide over {ranks} rank{'s' * (ranks > 1)} and {reason}: "
                f"the nearest that do are {' and '.join(map(str, _multiples_around(self.batch, unit)))}"
            )
        return Split(ranks, steps, self.batch // (ranks * steps))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batch sizes over the epochs of a run: stages in order. Later epochs repeat the last stage.

    Args:
        stages: At least one `Stage`.

    Raises:
        ValueError: If there is no stage.

    Example:
        >>> plan = phalanx.BatchPlan([phalanx.Stage(epochs=30, batch=32768), phalanx.Stage(epochs=60, batch=65536)])
        >>> plan.at(29).batch, plan.at(30).batch, plan.epochs
        (32768, 65536, 90)
    """

    stages: tuple[Stage, ...]

    def __init__(self, stages: Iterable[Stage]) -> None:
        object.__setattr__(self, "stages", tuple(stages))
        if not self.stages or not all(isinstance(stage, Stage) for stage in self.stages):
            raise ValueError(f"a batch plan is made of at least one Stage, got {list(self.stages)!r}")

    @property
    def epochs(self) -> int:
        """The number of epochs of all stages."""
        return sum(stage.epochs for stage in self.stages)

    def at(self, epoch: int) -> Stage:
        """The stage of `epoch`."""
        whole_number("epoch", epoch)
        for stage in self.stages:
            if epoch < stage.epochs:
                return stage
            epoch -= stage.epochs
        return self.stages[-1]

    def steps_before(self, epoch: int, n: int, last: Last = "drop") -> int:
        """The number of steps before `epoch`, on n samples. `steps_before(plan.epochs, n)` is the whole run."""
        return sum(count * len(Steps(n, stage.batch, last)) for stage, count in self._epochs_before(epoch))

    def samples_before(self, epoch: int, n: int, last: Last = "drop") -> int:
        """The number of samples of those steps. Padding counts, dropped samples don't."""
        return sum(count * Steps(n, stage.batch, last).samples for stage, count in self._epochs_before(epoch))

    def _epochs_before(self, epoch: int) -> list[tuple[Stage, int]]:
        """The number of epochs before `epoch` in each stage."""
        whole_number("epoch", epoch)
        counts, rest = [], epoch
        for stage in self.stages:
            counts.append((stage, min(rest, stage.epochs)))
            rest -= counts[-1][1]
        return [*counts, (self.stages[-1], rest)]


def _multiples_around(batch: int, unit: int) -> list[int]:
    below = batch // unit * unit
    return [below, below + unit] if below else [unit]
