"""How a loader follows an elastic job: who shares a step, what a dead rank owed, and when newcomers come in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from phalanx.data.loader_options import one_of
from phalanx.data.owed import Ranges, count, stands_for, within
from phalanx.data.position import Position
from phalanx.data.route import BatchPolicy, MicroBatch, World
from phalanx.data.supply import Numbered

T = TypeVar("T")


class FollowedWorld:
    """The world of an elastic communicator, as the loader `owner` sees it."""

    supply: Numbered  # of the loader

    @staticmethod
    def of(comm: Any, owner: object, policy: BatchPolicy) -> FollowedWorld | None:
        """The world of `comm`; None if it never changes."""
        one_of("on_change", policy, BatchPolicy)
        return FollowedWorld(comm, owner, policy) if getattr(comm, "elastic", False) else None

    def __init__(self, comm: Any, owner: object, policy: BatchPolicy) -> None:
        self._comm, self._owner = comm, owner
        self.settings = World(policy, comm.size)
        # steps that wait for their exchange, who shared them, and how
        self._taken: list[tuple[MicroBatch, tuple[int, ...], World | None]] = []
        self._sharers: tuple[int, ...] = comm.membership.ranks  # who shares the steps of the route of now
        self._exchanges = comm.exchanges
        self.uneven = False  # whether ranks have different numbers of samples in the step of now
        self.samples = 0  # this rank's in the step of now
        self.waited = 0.0  # seconds that the loader has waited for input

    @property
    def leads(self) -> bool:
        """Whether this loader feeds the training, and not an evaluation."""
        return self._comm.loader is self._owner

    @property
    def batch_share(self) -> float:
        """The batch of now, in terms of the planned one."""
        return 1.0 if self.settings.policy == "keep_batch" else self._comm.size / self.settings.first

    def took(self, wanted: MicroBatch) -> None:
        """This rank got the last micro-batch of a step."""
        route = self.supply.route
        by_speed = len(route.world.speeds) == route.ranks if route.world is not None else False
        self.uneven = by_speed or len(wanted.step) % route.ranks != 0
        self.samples = len(self._part(route.world, wanted.step, route.ranks, route.rank))
        if self.leads:
            self._taken.append((wanted, self._sharers, route.world))

    def timed(self, get: Callable[[], T]) -> T:
        """What `get` returns, which waits for input."""
        begun = time.perf_counter()
        found = get()
        self.waited += time.perf_counter() - begun
        return found

    def rebalance(self, speeds: tuple[float, ...]) -> None:
        """From the next step on, share samples out in these proportions. All ranks call it, in the same step."""
        self.settings = replace(self.settings, speeds=speeds)

    @staticmethod
    def _part(world: World | None, step: range, ranks: int, rank: int) -> range:
        return (world or World()).part(step, ranks, rank)

    def has_changed(self, *, let_in: bool) -> bool:
        """Between two steps: newcomers come in, and all share what is left. Whether this rank has another share now.

        `let_in` is False at the end of an epoch, when the others may evaluate first.
        """
        if let_in:
            self._comm.between_steps(self._owner)
        before = self.supply.route
        if self._sharers != self._comm.membership.ranks:
            self._sharers, self.settings = self._comm.membership.ranks, replace(self.settings, speeds=())
        self.supply.route = replace(before, rank=self._comm.rank, ranks=self._comm.size, world=self.settings)
        return self.supply.route != before

    def settle(self, position: Position) -> Position:
        """Where the run stands after an exchange: what members took who were not in it is owed."""
        return self.supply.reach(self._settled(position, self.supply.route.n))

    def _settled(self, position: Position, n: int) -> Position:
        if not self.leads or self._comm.exchanges == self._exchanges:
            return position  # gradients are still being accumulated
        self._exchanges, taken, self._taken = self._comm.exchanges, self._taken, []
        here = set(self._comm.contributors)
        lost: Ranges = ()
        for wanted, members, world in taken:
            for rank, member in enumerate(members):
                if member not in here:
                    lost += stands_for(self._part(world, wanted.step, len(members), rank), wanted.owed_at, wanted.owed)
        if not lost:
            return position
        epoch = taken[-1][0].epoch
        lost = within(lost, n)
        if position.epoch > epoch:  # it was the last step of its epoch, which is not over then
            return Position(position.seed, epoch, max(0, n - count(lost)), lost)
        return replace(position, samples=max(0, position.samples - count(lost)), owed=lost + position.owed)

    def state(self, position: Position) -> dict[str, Any]:
        return {"first_ranks": self.settings.first} | ({"owed": list(position.owed)} if position.owed else {})

    def load(self, state: Mapping[str, Any]) -> None:
        self.settings = replace(self.settings, first=int(state.get("first_ranks", self.settings.first)))
        self._taken, self._exchanges = [], self._comm.exchanges
