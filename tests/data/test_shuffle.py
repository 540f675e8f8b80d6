"""AsyncShuffle on ranks that are threads: samples arrive whole and owned once, an epoch is exact, a run can be resumed."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
import torch

import phalanx
from phalanx.data.exchange import ExchangePlan
from phalanx.data.share import SampleLayout, Share
from phalanx.data.shuffle import AsyncShuffle


def dataset(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples that tell their index in every byte of x and in y."""
    i = torch.arange(n)
    x = torch.stack([i % 251, i // 251, (7 * i + 3) % 256, i % 5, i % 11, i % 13], 1).to(torch.uint8).view(n, 2, 3)
    return x, i * 1_000_003


def check_batch(x: torch.Tensor, y: torch.Tensor, n: int) -> list[int]:
    """The indices of a batch whose samples are as they were made."""
    ids = y // 1_000_003
    whole = dataset(n)
    assert torch.equal(x, whole[0][ids])
    assert torch.equal(y, whole[1][ids])
    return ids.tolist()


def train(comm, n, options, epochs, looks, start=None):
    """Iterate, look at who owns what after the steps `looks`, and return the indices of every batch by epoch."""
    shuffle = AsyncShuffle(dataset(n), comm, **options)
    if start:
        shuffle.load_state_dict(start)
    visited: list[list[list[int]]] = []
    step = 0
    for epoch in range(shuffle.state_dict()["epoch"], epochs):
        visited.append([])
        for x, y in shuffle:
            visited[-1].append(check_batch(x, y, n))
            step += 1
            if step in looks:
                at = shuffle.state_dict()
                held = shuffle.held()
                assert held.tolist() == shuffle.plan.held(at["epoch"], at["step"], comm.rank).tolist()
                everywhere = np.concatenate([part.numpy() for part in comm.allgather(torch.from_numpy(held))])
                assert sorted(everywhere.tolist()) == list(range(n))
        assert shuffle.position.epoch == epoch + 1
        assert shuffle.position.samples == 0
    shuffle.close()
    return visited


def cases(count: int, sizes: tuple[int, ...]):
    """Worlds and options at random, the same every time."""
    draw = random.Random(3)
    for number in range(count):
        size = sizes[number % len(sizes)]
        n = draw.randrange(4 * size, 90)
        local_shuffle, last = draw.choice([(True, "drop"), (True, "keep"), (False, "keep")])
        batch = draw.randrange(1, n // size + 1)
        plan = draw.choice(["ring", "random"])
        options = {"batch": batch, "plan": plan, "seed": number, "local_shuffle": local_shuffle, "last": last}
        yield size, n, options, {draw.randrange(1, 30) for _ in range(4)}


def check_visits(by_rank, plan: ExchangePlan) -> None:
    """Over all ranks every epoch trains each sample once, or all but the few that do not fill a batch."""
    for epoch, batches in enumerate(zip(*by_rank)):
        seen = sorted(chain(*(batch for rank in batches for batch in rank)))
        assert len(seen) == len(set(seen)), "no sample is trained twice in an epoch"
        if plan.last == "keep":
            assert seen == list(range(plan.n))
        else:
            assert len(seen) == plan.ranks * plan.steps * plan.batch
            assert {len(batch) for rank in batches for batch in rank} == {plan.batch}
        assert {len(rank) for rank in batches} == {plan.steps}, "all ranks take equally many steps"
        for rank, share in enumerate(plan.shares(epoch)):
            assert set(chain(*batches[rank])) <= set(share.tolist())


def plan_of(n: int, size: int, options: dict) -> ExchangePlan:
    return ExchangePlan(n, size, options["batch"], options["plan"], options["seed"], options["local_shuffle"], options["last"])


@pytest.mark.parametrize(("size", "n", "options", "looks"), list(cases(24, (1, 2, 3, 5, 8))))
def test_threads_own_every_sample_once_and_train_it_once_an_epoch(size, n, options, looks):
    by_rank = phalanx.run_local(size, lambda comm: train(comm, n, options, 3, looks))
    check_visits(by_rank, plan_of(n, size, options))


def test_after_as_many_epochs_as_ranks_every_rank_has_trained_everything():
    for n in (24, 26):
        for visited in phalanx.run_local(4, lambda comm, n=n: train(comm, n, {"batch": 3, "last": "keep"}, 4, set())):
            assert sorted(chain(*chain(*visited))) == list(range(n))


@pytest.mark.parametrize("plan", ["ring", "random"])
@pytest.mark.parametrize("saved", [(0, 3), (1, 0), (2, 5)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(plan, saved):
    options = {"batch": 3, "plan": plan, "seed": 1, "last": "drop"}
    n, size, (epoch, step) = 95, 4, saved
    whole = phalanx.run_local(size, lambda comm: train(comm, n, options, 4, set()))
    assert len(whole[0][0]) > step

    def until_saved(comm):
        shuffle = AsyncShuffle(dataset(n), comm, **options)
        for _ in range(epoch):
            for _ in shuffle:
                pass
        if step:
            for number, _ in enumerate(shuffle, 1):
                if number == step:
                    break
        state = shuffle.state_dict()
        shuffle.close()
        return state

    states = phalanx.run_local(size, until_saved)
    assert all(state == states[0] for state in states)
    assert (states[0]["epoch"], states[0]["step"]) == saved
    resumed = phalanx.run_local(size, lambda comm: train(comm, n, options, 4, {2, 5}, start=states[0]))
    for rank in range(size):
        assert resumed[rank][0] == whole[rank][epoch][step:]
        assert resumed[rank][1:] == whole[rank][epoch + 1 :]


def test_between_epochs_a_run_resumes_on_another_number_of_ranks():
    options = {"batch": 4, "last": "keep"}
    state = AsyncShuffle(dataset(50), phalanx.create_communicator(), **options).state_dict()
    state |= {"epoch": 2, "ranks": 5}
    by_rank = phalanx.run_local(3, lambda comm: train(comm, 50, options, 4, {1, 7}, start=state))
    for batches in zip(*by_rank):
        assert sorted(chain(*(batch for rank in batches for batch in rank))) == list(range(50))

    with pytest.raises(ValueError, match=r"ranks=5, step 1 of epoch 2.*at the end of an epoch"):
        phalanx.run_local(3, lambda comm: train(comm, 50, options, 4, set(), start={**state, "step": 1}))
    with pytest.raises(ValueError, match=r"kind='random'.*same data and options"):
        phalanx.run_local(3, lambda comm: train(comm, 50, options, 4, set(), start={**state, "kind": "random"}))
    with pytest.raises(ValueError, match="not the state of an AsyncShuffle: it has no n, ranks"):
        phalanx.run_local(3, lambda comm: train(comm, 50, options, 4, set(), start={"epoch": 2, "step": 0}))


def test_the_seed_of_a_state_replaces_the_one_given():
    def first_batch(comm, seed, start=None):
        shuffle = AsyncShuffle(dataset(30), comm, batch=5, seed=seed)
        if start:
            shuffle.load_state_dict(start)
        return shuffle.state_dict(), next(iter(shuffle))[1].tolist()

    comm = phalanx.create_communicator()
    state, batch = first_batch(comm, 3)
    assert first_batch(comm, 4)[1] != batch
    assert first_batch(comm, 4, start=state)[1] == batch


def test_a_state_comes_before_the_first_batch():
    shuffle = AsyncShuffle(dataset(10), phalanx.create_communicator(), batch=2)
    state = shuffle.state_dict()
    shuffle.load_state_dict(state)
    next(iter(shuffle))
    with pytest.raises(RuntimeError, match="before the first batch"):
        shuffle.load_state_dict(state)


def augmented(comm, n):
    def jitter(x, draws):
        return x.double().flatten(1) + torch.from_numpy(draws.uniform(0, 6))

    shuffle = AsyncShuffle(dataset(n), comm, batch=2, seed=5, transform=jitter, last="keep")
    found = {}
    for epoch in range(3):
        for x, y in shuffle:
            found |= {(epoch, int(label)): row.tolist() for row, label in zip(x, y)}
    shuffle.close()
    return found


def test_augmentation_does_not_depend_on_the_rank_that_holds_a_sample():
    alone = phalanx.run_local(1, lambda comm: augmented(comm, 30))[0]
    assert len(alone) == 90
    assert len({tuple(row) for row in alone.values()}) == 90
    together = phalanx.run_local(4, lambda comm: augmented(comm, 30))
    assert {key: row for part in together for key, row in part.items()} == alone


def test_steps_tell_where_they_are():
    shuffle = AsyncShuffle(dataset(20), phalanx.create_communicator(), batch=6, last="drop")
    assert len(shuffle) == 3
    for epoch in range(2):
        for index, step in enumerate(shuffle.steps()):
            ((x, _),) = step.micro
            assert (step.epoch, step.index, step.batch, step.samples, len(x)) == (epoch, index, 6, 6, 6)
            assert shuffle.position.samples == (6 * (index + 1) if index < 2 else 0)


def test_a_batch_may_be_written_to():
    """What the user does to a batch, or a transform that works in place, does not reach the samples that travel."""

    def spoil(comm):
        shuffle = AsyncShuffle(dataset(40), comm, batch=5, last="keep")
        for _ in range(2):
            for x, y in shuffle:
                check_batch(x, y, 40)
                x.zero_()
                y.zero_()
        shuffle.close()

    for size in (1, 2):
        phalanx.run_local(size, spoil)


class OnlyMine:
    """Data that exist on one rank only: `take` is asked for nothing else."""

    def __init__(self, n: int, comm) -> None:
        self.n, self.mine = n, phalanx.data.scatter_index(n, comm.size, comm.rank, equal_length=False)
        x, y = dataset(n)
        self.x, self.y = x[self.mine.start : self.mine.stop], y[self.mine.start : self.mine.stop]

    def __len__(self) -> int:
        return self.n

    def take(self, indices):
        assert set(indices.tolist()) <= set(self.mine)
        return self.x[indices - self.mine.start], self.y[indices - self.mine.start]


def test_a_rank_reads_its_share_and_nothing_else():
    def read(comm):
        with AsyncShuffle(OnlyMine(31, comm), comm, batch=3) as shuffle:
            return [check_batch(x, y, 31) for _ in range(2) for x, y in shuffle]

    first, second, third = phalanx.run_local(3, read)
    assert len(first) == len(second) == len(third) == 6


@pytest.mark.parametrize("y", [torch.arange(40).half().view(20, 2, 1), torch.zeros(20, 0), torch.arange(20).bfloat16()])
def test_labels_and_samples_of_any_dtype_and_shape_travel(y):
    def go(comm):
        x = torch.arange(60, dtype=torch.float64).view(20, 3)
        with AsyncShuffle((x, y), comm, batch=3) as shuffle:
            for _ in range(3):
                for a, b in shuffle:
                    ids = (a[:, 0] / 3).long()
                    assert torch.equal(a, x[ids])
                    assert torch.equal(b, y[ids])

    phalanx.run_local(3, go)


def test_ranks_that_disagree_are_told_before_anything_travels():
    def go(comm):
        shuffle = AsyncShuffle(dataset(40), comm, batch=5, seed=comm.rank)
        next(iter(shuffle))

    with pytest.raises(ValueError, match=r"ranks disagree on seed: \[0, 1, 2\]"):
        phalanx.run_local(3, go)


@pytest.mark.parametrize("data", [[b"jpeg"], torch.zeros(4), (torch.zeros(4), torch.zeros(5)), 7])
def test_what_cannot_be_held_in_memory_is_an_error(data):
    with pytest.raises(TypeError, match=r"Arrays.*take\(indices\)"):
        AsyncShuffle(data, phalanx.create_communicator(), batch=1)


def test_a_sample_that_arrives_twice_is_noticed():
    """The negative control of everything above: a share does not swallow a duplicate."""
    x, y = dataset(10)
    share = Share((x, y), np.arange(6), capacity=8)
    layout = SampleLayout.of(x, y)
    message = layout.message(torch.zeros(layout.nbytes(2), dtype=torch.uint8), 2)
    share.take_out(np.array([4, 1]), message)
    assert share.ids().tolist() == [0, 2, 3, 5]
    share.put(message)
    share.index()
    share.put(message)
    with pytest.raises(RuntimeError, match="arrived twice"):
        share.index()
