"""How a loader follows an elastic job: which ranks share a step, what a dead rank owed, and when new ranks join."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from phalanx.data.loader_options import one_of
from phalanx.data.owed import Ranges, count, stands_for, within
from phalanx.data.position import Position
from phalanx.data.route import BatchPolicy, MicroBatch, World
from phalanx.data.supply import Numbered

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken:
    """A step whose samples were taken, and the exchange that they wait for."""

    exchange: int  # its number
    epoch: int
    step: range  # the places of all ranks
    owed: Ranges
    owed_at: int
    members: tuple[int, ...]  # who shared them
    speeds: tuple[float, ...]  # and how

    def share_of(self, rank: int) -> Ranges:
        """The places of the order that one of them had."""
        part = World(speeds=self.speeds).part(self.step, len(self.members), rank)
        return stands_for(part, self.owed_at, self.owed)

    def to_state(self, exchanges: int) -> list[Any]:
        """As plain data, for a rank that joins and counts exchanges from another number on."""
        step = [self.step.start, self.step.stop]
        return [self.exchange - exchanges, self.epoch, step, list(self.owed), self.owed_at, list(self.members), list(self.speeds)]

    @staticmethod
    def of(state: Sequence[Any], exchanges: int) -> Taken:
        ahead, epoch, step, owed, owed_at, members, speeds = state
        places = tuple((int(first), int(last)) for first, last in owed)
        return Taken(exchanges + ahead, epoch, range(*step), places, owed_at, tuple(members), tuple(speeds))


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
        self._taken: list[Taken] = []  # steps that wait for their exchange
        self._sharers: tuple[int, ...] = comm.membership.ranks  # the ranks that share the steps of the current route
        self._exchanges = comm.exchanges
        self.uneven = False  # whether ranks have different numbers of samples in the current step
        self.samples = 0  # this rank's samples in the current step
        self.waited = 0.0  # seconds that the loader has waited for input

    @property
    def leads(self) -> bool:
        """Whether this loader feeds training, not evaluation."""
        return self._comm.loader is self._owner

    @property
    def batch_share(self) -> float:
        """The current batch size as a fraction of the planned one."""
        return 1.0 if self.settings.policy == "keep_batch" else self._comm.size / self.settings.first

    def took(self, wanted: MicroBatch) -> None:
        """Record that this rank got the last micro-batch of a step."""
        route = self.supply.route
        by_speed = len(route.world.speeds) == route.ranks if route.world is not None else False
        self.uneven = by_speed or len(wanted.step) % route.ranks != 0
        world = route.world or World()
        self.samples = len(world.part(wanted.step, route.ranks, route.rank))
        if self.leads:
            exchange = self._comm.exchanges + self._comm.in_flight + 1
            taken = Taken(exchange, wanted.epoch, wanted.step, wanted.owed, wanted.owed_at, self._sharers, world.speeds)
            self._taken.append(taken)

    def timed(self, get: Callable[[], T]) -> T:
        """Call `get`, which waits for input, and count the time."""
        begun = time.perf_counter()
        found = get()
        self.waited += time.perf_counter() - begun
        return found

    def rebalance(self, speeds: tuple[float, ...]) -> None:
        """From the next step on, divide samples in these proportions. All ranks call it, in the same step."""
        self.settings = replace(self.settings, speeds=speeds)

    def has_changed(self, *, let_in: bool) -> bool:
        """Between two steps, let new ranks join and divide what is left. Returns whether this rank's share changed.

        `let_in` is False at the end of an epoch, when the others may evaluate first.
        """
        if let_in:
            self._comm.between_steps(self._owner)
        before = self.supply.route
        if self._sharers != self._comm.membership.ranks:
            self._sharers, self.settings = self._comm.membership.ranks, replace(self.settings, speeds=())
        self.supply.route = replace(before, rank=self._comm.rank, ranks=self._comm.size, world=self.settings)
        return self.supply.route != before

    def follow(self, position: Position) -> Position:
        """Between two steps: where the run stands. At the end of an epoch nothing of it stays in flight.

        So the next epoch never owes samples of this one.
        """
        position = self.settle(position)
        if self.leads and any(step.epoch < position.epoch for step in self._taken):
            self._comm.land(at_end=True)
            position = self.settle(position)
        return position

    def settle(self, position: Position) -> Position:
        """The position after an exchange: samples of members that missed it are owed."""
        return self.supply.reach(self._settled(position, self.supply.route.n))

    def _settled(self, position: Position, n: int) -> Position:
        if not self.leads or self._comm.exchanges == self._exchanges:
            return position  # gradients are still being accumulated
        self._exchanges = self._comm.exchanges
        taken = [step for step in self._taken if step.exchange <= self._exchanges]
        self._taken = self._taken[len(taken) :]
        lost: Ranges = ()
        for step in taken:
            here = self._comm.earlier.get(step.exchange, self._comm.contributors)  # later exchanges may have others
            for rank, member in enumerate(step.members):
                if member not in here:
                    lost += step.share_of(rank)
        self._comm.earlier.clear()  # steps that are taken from now on wait for later exchanges
        if not lost:
            return position
        epoch = taken[-1].epoch
        lost = within(lost, n)
        if position.epoch > epoch:  # it was the last step of its epoch, so the epoch is not over
            return Position(position.seed, epoch, max(0, n - count(lost)), lost)
        return replace(position, samples=max(0, position.samples - count(lost)), owed=lost + position.owed)

    def state(self, position: Position) -> dict[str, Any]:
        state: dict[str, Any] = {"first_ranks": self.settings.first}
        if position.owed:
            state["owed"] = list(position.owed)
        if self._taken:  # for ranks that join: one of those who took them may still die
            state["taken"] = [step.to_state(self._comm.exchanges) for step in self._taken]
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        self.settings = replace(self.settings, first=int(state.get("first_ranks", self.settings.first)))
        self._exchanges = self._comm.exchanges
        joins = self._comm.is_new  # in a job that was resumed, all who shared them are gone, and nobody owes them
        self._taken = [Taken.of(step, self._exchanges) for step in state.get("taken", ())] if joins else []
