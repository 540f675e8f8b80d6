"""Which rank sends which samples where during an epoch: a pure function, the same on all ranks, without communication.

The data set is split strictly over the ranks. In an epoch a rank visits what it held at the start, once, in chunks. Each chunk
is sent to another rank as soon as it was read, and as many samples come back. So after an epoch a rank holds other data, and at
any moment every sample has one owner.

    ring      every chunk goes to rank - 1: after e epochs rank r holds the share that rank r + e began with
    random    chunk by chunk, a new ring of the ranks in random order

    plan = ExchangePlan(n=50_000, ranks=4, batch=128)
    plan.destinations(epoch=0, step=3)          rank r sends to destinations[r]
    plan.owners(epoch=2, step=10)               the rank that owns each sample after 10 steps of epoch 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.data.order import epoch_order
from phalanx.data.scatter import scatter_index

Indices = NDArray[np.int64]
Kind = Literal["ring", "random"]
Last = Literal["drop", "keep"]


@dataclass(frozen=True)
class ExchangePlan:
    """`n` samples on `ranks`, read in batches of `batch` per rank. `last` decides about samples beyond full batches.

    An epoch has `steps` steps on every rank; step s reads chunk s of a rank's order. Chunks are cut evenly. With "drop" they are
    at least as large as a batch: the batch is their beginning, and the few samples after it are sent on untrained (other ones in
    each epoch). With "keep" they are at most as large, and all samples are trained. If `ranks` does not divide `n`, shares differ
    in their last chunk only: the odd sample is sent with it.
    """

    n: int
    ranks: int
    batch: int
    kind: Kind = "ring"
    seed: int = 0
    local_shuffle: bool = True
    last: Last = "drop"

    def __post_init__(self) -> None:
        for name, value in {"ranks": self.ranks, "batch": self.batch}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number, 1 or more")
        if self.kind not in ("ring", "random"):
            raise ValueError(f"plan={self.kind!r}: use ring or random")
        if self.last not in ("drop", "keep"):
            raise ValueError(f"last={self.last!r}: use drop or keep")
        if self.n < self.ranks:
            raise ValueError(f"{self.n} samples cannot be shared by {self.ranks} ranks: at least one for each")
        if self.last == "drop" and self.batch > self.fewest:
            raise ValueError(
                f"batch={self.batch} is more than the {self.fewest} samples that a rank holds ({self.n} on {self.ranks} ranks): "
                f"use a batch of at most {self.fewest}, or last='keep'"
            )

    # ---- sizes -------------------------------------------------------------------------------------------------------------

    @property
    def fewest(self) -> int:
        """Samples of the smallest share."""
        return self.n // self.ranks

    @property
    def capacity(self) -> int:
        """Samples of the largest share; a rank never needs room for more."""
        return -(-self.n // self.ranks)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.fewest // self.batch if self.last == "drop" else -(-self.capacity // self.batch)

    def start(self, step: int) -> int:
        """Where chunk `step` begins in the order of any rank; the last chunk ends with the order."""
        return step * self.capacity // self.steps

    def rows(self, step: int) -> int:
        """The rows of a message that holds any rank's chunk `step`. The last row may be empty."""
        return self.start(step + 1) - self.start(step)

    def trained(self, step: int) -> int:
        """The number of samples that all ranks together train in `step`."""
        if self.last == "drop":
            return self.batch * self.ranks
        return self.n - self.start(step) * self.ranks if step == self.steps - 1 else self.rows(step) * self.ranks

    # ---- one step of one rank ------------------------------------------------------------------------------------------------

    def order(self, epoch: int, rank: int, share: Indices) -> Indices:
        """Put `share`, the ascending samples that `rank` holds when `epoch` begins, in visiting order."""
        if not self.local_shuffle:
            return share
        return share[epoch_order(self.seed << 33 | rank << 1, epoch, len(share))[:]]

    def chunk(self, order: Indices, step: int) -> Indices:
        """The part of a rank's `order` that step `step` reads and sends."""
        return order[self.start(step) : self.start(step + 1) if step + 1 < self.steps else None]

    def destinations(self, epoch: int, step: int) -> Indices:
        """destinations[r] is the rank that rank r sends to. It is one large cycle, so no rank sends to itself."""
        if self.kind == "ring":
            return (np.arange(self.ranks) - 1) % self.ranks
        around = epoch_order(self.seed << 33 | 1, epoch * self.steps + step, self.ranks)[:]
        found = np.empty_like(around)
        found[around] = np.roll(around, 1)
        return found

    # ---- ownership -------------------------------------------------------------------------------------------------------------

    def shares(self, epoch: int) -> list[Indices]:
        """What each rank holds when `epoch` begins, ascending. The random plan has to replay all epochs."""
        first = [_array(scatter_index(self.n, self.ranks, rank, equal_length=False)) for rank in range(self.ranks)]
        if self.kind == "ring":
            return [first[(rank + epoch) % self.ranks] for rank in range(self.ranks)]
        shares = first
        for played in range(epoch):
            shares = _by_owner(self._owners(shares, played, self.steps), self.ranks)
        return shares

    def owners(self, epoch: int, step: int = 0) -> Indices:
        """owners[i] is the rank that owns sample i when the chunks before `step` have arrived."""
        return self._owners(self.shares(epoch), epoch, step)

    def held(self, epoch: int, step: int, rank: int) -> Indices:
        """What `rank` owns at that moment, ascending."""
        return np.flatnonzero(self.owners(epoch, step) == rank)

    def _owners(self, shares: list[Indices], epoch: int, step: int) -> Indices:
        owners = np.empty(self.n, np.int64)
        orders = [self.order(epoch, rank, share) for rank, share in enumerate(shares)]
        for rank, order in enumerate(orders):
            owners[order] = rank
        for done in range(step if self.ranks > 1 else 0):
            destinations = self.destinations(epoch, done)
            for rank, order in enumerate(orders):
                owners[self.chunk(order, done)] = destinations[rank]
        return owners


def _array(places: range) -> Indices:
    return np.arange(places.start, places.stop, places.step)


def _by_owner(owners: Indices, ranks: int) -> list[Indices]:
    grouped = np.argsort(owners, kind="stable")  # stable: ascending within each rank
    return np.split(grouped, np.cumsum(np.bincount(owners, minlength=ranks))[:-1])
