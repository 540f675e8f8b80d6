"""Which samples a step takes and which a rank gets, so that each comes exactly once and a run resumes anywhere.

An epoch visits the places 0, 1, 2, ... of its order. A step takes the next `batch` places for any number of ranks; the ranks
divide that run among themselves, and each cuts its part into micro-batches. So a position is one number, the places consumed, and
a run may resume on another number of ranks:

    places of the order    0 1 2 3 4 5 6 7 | 8 9 ...              batch 8
    saved on 4 ranks       a a b b c c d d |                      Position(seed, epoch, samples=8)
    resumed on 2 ranks                     | a a a a b b b b
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal, get_args

from phalanx.data.owed import Ranges, after

Last = Literal["drop", "pad", "keep"]
"""What happens to places that do not fill a batch.

drop    they are left out; another epoch leaves out others
pad     the batch is filled from the beginning of the same epoch's order
keep    they make a smaller batch: every sample exactly once
"""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a run: the next sample is number `samples` of the order of `epoch`.

    It does not depend on the number of ranks, so you can resume on more or fewer.

    Args:
        seed: The seed of the run.
        epoch: The epoch, from 0.
        samples: The samples of this epoch that all ranks together have consumed.
        owed: Places of this epoch that ranks took but died before training: they come next. See owed.py.

    Raises:
        ValueError: If a value is negative.

    Example:
        >>> phalanx.data.Position(seed=0, epoch=2, samples=512)
        Position(seed=0, epoch=2, samples=512, owed=())
    """

    seed: int
    epoch: int = 0
    samples: int = 0
    owed: Ranges = ()

    def __post_init__(self) -> None:
        for name in ("seed", "epoch", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{self}: {name} must be 0 or more")


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one epoch of `n` samples, from place `start` on: `len(steps)`, `steps[s]` the places of step s.

    Places are a range; those of a padded batch run beyond n and wrap around: place p is element p % n of the order.
    """

    n: int
    batch: int
    last: Last
    start: int = 0

    def __post_init__(self) -> None:
        check_last(self.last)
        if self.n < 0 or self.batch < 1:
            raise ValueError(f"{self.n} samples in batches of {self.batch}: samples are 0 or more, a batch has at least 1")
        if not 0 <= self.start <= self.n:
            raise ValueError(f"start={self.start} of an epoch of {self.n} samples")

    def __len__(self) -> int:
        rest = self.n - self.start
        return rest // self.batch if self.last == "drop" else -(-rest // self.batch)

    def __getitem__(self, s: int) -> range:
        if not 0 <= s < len(self):
            raise IndexError(f"step {s} of {len(self)}")
        begin = self.start + s * self.batch
        end = begin + self.batch
        return range(begin, min(end, self.n) if self.last == "keep" else end)

    @property
    def samples(self) -> int:
        """The number of samples of all steps, including padding."""
        return self[len(self) - 1].stop - self.start if len(self) else 0

    def position_after(self, s: int, position: Position) -> Position:
        """The position after step s, if the run began at `position`. After the last step it is in the next epoch."""
        if s == len(self) - 1:
            return Position(position.seed, position.epoch + 1)
        return Position(position.seed, position.epoch, self[s].stop, after(position.owed, self[s].stop - self.start))


def share(places: range, parts: int, part: int) -> range:
    """Contiguous part `part` of `parts`, whose sizes differ by at most one."""
    return places[len(places) * part // parts : len(places) * (part + 1) // parts]


def micro_batches(places: range, ranks: int, rank: int, largest: int) -> tuple[range, ...]:
    """The part of a step's `places` that `rank` gets, in micro-batches of at most `largest`.

    All ranks have the same number of them; in a smaller last batch some may be empty.
    """
    largest_part = -(-len(places) // ranks)
    count = -(-largest_part // largest)
    mine = share(places, ranks, rank)
    return tuple(share(mine, count, i) for i in range(count))


def check_last(last: str) -> None:
    """Raise unless `last` is one of the three rules."""
    if last not in get_args(Last):
        raise ValueError(f"last={last!r}: must be one of {', '.join(map(repr, get_args(Last)))}")


def whole_number(name: str, value: int, least: int = 0) -> int:
    """Return `value` as an int. Errors call it `name`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be a whole number") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
    return number
