"""Samples of ranks that die come again: exactly once per epoch, whoever dies and joins when. No process, no communication."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

import phalanx
from phalanx.comm.elastic.membership import Membership
from phalanx.data import Loader
from phalanx.data.owed import after, count, listed, stands_for, until, within

OWED = ((4, 6), (11, 12), (20, 25))


def test_the_parts_of_what_is_owed_make_the_whole():
    for taken in range(count(OWED) + 2):
        both = [*listed(until(OWED, taken)), *listed(after(OWED, taken))]
        assert both == list(listed(OWED))


def test_places_stand_for_what_is_owed_and_then_for_themselves():
    everything = [*range(10, 12), *listed(OWED), *range(20, 30)]
    for begin in range(10, 30):
        for end in range(begin, 30):
            found = listed(stands_for(range(begin, end), 12, OWED)).tolist()
            assert found == everything[begin - 10 : end - 10], (begin, end)


def test_nothing_is_owed():
    assert stands_for(range(3, 7), 3, ()) == ((3, 7),)
    assert stands_for(range(0), 0, OWED) == ()


def test_padding_is_folded():
    assert within(((8, 13), (25, 26)), 10) == ((8, 10), (0, 3), (5, 6))


@dataclass
class Exchanges:
    """What all ranks have trained, and which of it has reached the others."""

    number: int = 0
    contributors: tuple[int, ...] = ()
    earlier: dict[int, tuple[int, ...]] = field(default_factory=dict)
    waiting: dict[int, list[int]] = field(default_factory=dict)  # samples of each member since the last exchange
    used: Counter = field(default_factory=Counter)

    def commit(self, contributors: list[int]) -> None:
        self.earlier[self.number] = self.contributors
        self.number, self.contributors = self.number + 1, tuple(contributors)
        for member in contributors:
            self.used.update(self.waiting.get(member, []))
        self.waiting = {}


@dataclass
class Seat:
    """What a loader sees of an elastic communicator: one rank's view of a world that the test changes."""

    member: int
    world: list[int]
    job: Exchanges
    elastic: bool = True
    exchanges: int = 0
    contributors: tuple[int, ...] = ()
    earlier: dict[int, tuple[int, ...]] = field(default_factory=dict)
    in_flight: int = 0
    is_new: bool = False
    loader: object = None
    joins: list[int] = field(default_factory=list)  # newcomers that are let in between two steps
    sent: dict | None = None

    @property
    def rank(self) -> int:
        return self.world.index(self.member)

    @property
    def size(self) -> int:
        return len(self.world)

    @property
    def membership(self) -> Membership:
        return Membership(1, tuple(self.world))

    def land(self, *, at_end: bool) -> None:
        """All ranks come here, one after the other: the first one makes the exchange."""
        if self.exchanges == self.job.number:
            self.job.commit(self.world)
        self.look()

    def look(self) -> None:
        """See the exchanges that were made."""
        self.exchanges, self.contributors, self.earlier = self.job.number, self.job.contributors, dict(self.job.earlier)

    def between_steps(self, caller: Loader) -> None:
        self.sent = caller.state_dict() if self.joins else None  # what a newcomer gets, at this very moment
        self.world, self.joins = self.world + self.joins, []


def run(n: int, batch: int, ranks: int, epochs: int, seed: int, policy: str, every: int = 1, more: int = 0) -> Counter:
    """Train with random deaths and newcomers; how often each sample was in a step that counted.

    `every`: steps per exchange. `more`: exchanges that follow it at once, such as `opt.average_()`.
    """
    generator = random.Random(seed)
    job = Exchanges()
    data = (torch.arange(n), torch.arange(n))

    def sit(member: int, world: list[int]) -> tuple[Seat, Loader]:
        seat = Seat(member, list(world), job)
        loader = Loader(data, seat, batch=batch, last="keep", workers=0, on_change=policy)
        seat.loader = loader
        return seat, loader

    seats = {member: sit(member, range(ranks)) for member in range(ranks)}
    walks = {member: iter(loader) for member, (_, loader) in seats.items()}
    number, steps = ranks, 0
    while True:
        took = {}
        for member, (_, loader) in seats.items():
            batch_of = next(walks[member], None)
            if batch_of is None:
                walks[member] = iter(loader)
                batch_of = next(walks[member]) if loader.position.epoch < epochs else None
            took[member] = batch_of
        if all(batch_of is None for batch_of in took.values()):
            break
        assert None not in took.values(), "all ranks are in the same epoch"
        here = sorted(seats)
        lost = [m for m in here if generator.random() < 0.15][: len(here) - 1]
        counted = [m for m in here if m not in lost or generator.random() < 0.3]  # some die after their gradients have left
        steps += 1
        for member in here:
            job.waiting.setdefault(member, []).extend(took[member][1].tolist())
        if steps % every == 0:
            job.commit(counted)
        for member in lost:
            del seats[member], walks[member]
        for _ in range(more if steps % every == 0 else 0):
            job.commit(list(seats))
        new = generator.random() < 0.2
        for seat, _ in seats.values():
            seat.look()
            seat.world = [m for m in seat.world if m in seats]
            seat.joins = [number] if new else []
        if new:
            # the others let it in when they ask for their next batch; it gets their state then
            some, source = next(iter(seats.values()))
            source._follow(source._under_way)
            let_in = not some.joins
            if let_in:
                for _, loader in seats.values():
                    if loader is not source:
                        loader._follow(loader._under_way)
                seats[number] = sit(number, some.world)
                seats[number][0].exchanges, seats[number][0].is_new = job.number, True
                seats[number][1].load_state_dict(some.sent)
                seats[number][0].is_new = False
                walks[number] = iter(seats[number][1])
            else:
                for seat, _ in seats.values():
                    seat.joins = []
            number += 1
    return job.used


@pytest.mark.parametrize("policy", ["keep_batch", "keep_share"])
@pytest.mark.parametrize(("n", "batch", "ranks"), [(40, 8, 4), (41, 12, 4), (23, 6, 3), (10, 2, 2), (17, 17, 1)])
def test_every_sample_is_used_exactly_once_per_epoch(n, batch, ranks, policy):
    for seed in range(12):
        assert run(n, batch, ranks, 3, seed, policy) == dict.fromkeys(range(n), 3), seed


@pytest.mark.parametrize(("n", "batch", "ranks"), [(40, 8, 4), (41, 12, 4), (23, 6, 3), (10, 2, 2)])
def test_samples_of_local_steps_are_used_exactly_once_per_epoch(n, batch, ranks):
    """What a dead rank did since the last exchange, in several steps, has reached nobody."""
    for seed in range(12):
        every = 2 + seed % 4
        assert run(n, batch, ranks, 3, seed, "keep_batch", every) == dict.fromkeys(range(n), 3), (seed, every)


@pytest.mark.parametrize("more", [1, 2])
@pytest.mark.parametrize(("n", "batch", "ranks"), [(40, 8, 4), (41, 12, 4), (10, 2, 2)])
def test_a_sample_counts_in_the_exchange_that_it_waited_for(n, batch, ranks, more):
    """A rank dies after the exchange, and before the next one, without another step between them."""
    for seed in range(12):
        every = 1 + seed % 3
        assert run(n, batch, ranks, 3, seed, "keep_batch", every, more) == dict.fromkeys(range(n), 3), (seed, every)


def test_exchanges_are_forgotten():
    with phalanx.create_communicator(elastic=True) as comm:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = phalanx.create_multi_node_optimizer(optimizer, comm, sync=phalanx.LocalSGD(every=2))
        loader = Loader((torch.ones(16, 1),), comm, batch=2, workers=0)
        for shared in ({}, {"loader": loader}):  # without a loader nothing asks for them
            opt.share(**shared)
            for (x,) in loader:
                opt.zero_grad()
                model(x).sum().backward()
                opt.step()
                opt.average_()
                assert len(comm.earlier) <= 2
        assert comm.exchanges >= 24
