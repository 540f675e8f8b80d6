"""The exchange plan as a value: every sample has one owner at every moment, and shares stay balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.data.exchange import ExchangePlan
from phalanx.data.scatter import scatter_index


@st.composite
def plans(draw: st.DrawFn) -> ExchangePlan:
    ranks = draw(st.integers(1, 9))
    n = draw(st.integers(ranks, 60))
    last = draw(st.sampled_from(["drop", "keep"]))
    batch = draw(st.integers(1, n // ranks if last == "drop" else n))
    kind = draw(st.sampled_from(["ring", "random"]))
    return ExchangePlan(n, ranks, batch, kind, draw(st.integers(0, 5)), draw(st.booleans()), last)


def play(plan: ExchangePlan, epochs: int):
    """A naive oracle: bags of samples that ranks empty into each other. Yields (epoch, step, bags) before every step."""
    bags = [set(scatter_index(plan.n, plan.ranks, rank, equal_length=False)) for rank in range(plan.ranks)]
    for epoch in range(epochs):
        orders = [plan.order(epoch, rank, np.array(sorted(bag))) for rank, bag in enumerate(bags)]
        for step in range(plan.steps):
            yield epoch, step, [set(bag) for bag in bags]
            chunks = [{int(i) for i in plan.chunk(order, step)} for order in orders]
            for rank, dest in enumerate(plan.destinations(epoch, step)):
                assert chunks[rank] <= bags[rank]
                bags[rank] -= chunks[rank]
                bags[dest] |= chunks[rank]
    yield epochs, 0, bags


def check(plan: ExchangePlan, epochs: int) -> None:
    """What must hold of any plan, at every step."""
    for epoch, step, bags in play(plan, epochs):
        assert sorted(i for bag in bags for i in bag) == list(range(plan.n)), "owned exactly once"
        assert {len(bag) for bag in bags} <= {plan.fewest, plan.capacity}, "shares stay balanced"
        owners = plan.owners(epoch, step)
        for rank, bag in enumerate(bags):
            assert set(np.flatnonzero(owners == rank).tolist()) == bag, "the plan knows it without playing"
            assert plan.held(epoch, step, rank).tolist() == sorted(bag)


@settings(max_examples=times(100, seldom=40), deadline=None)
@given(plans(), st.integers(1, 3))
def test_every_sample_has_one_owner_at_every_step(plan, epochs):
    check(plan, epochs)


class Crooked(ExchangePlan):
    """A mutant: rank 0 gets the chunks of two ranks."""

    def destinations(self, epoch, step):
        found = super().destinations(epoch, step)
        found[found == 1] = 0
        return found


def test_a_plan_that_is_no_permutation_is_rejected():
    check(ExchangePlan(24, 3, 2), 1)
    with pytest.raises(AssertionError, match="balanced"):
        check(Crooked(24, 3, 2), 1)


@settings(max_examples=times(150, seldom=60), deadline=None)
@given(plans(), st.integers(0, 3))
def test_an_epoch_visits_what_a_rank_held_at_its_beginning_once(plan, epoch):
    for rank, share in enumerate(plan.shares(epoch)):
        order = plan.order(epoch, rank, share)
        chunks = [plan.chunk(order, step) for step in range(plan.steps)]
        assert np.concatenate(chunks).tolist() == order.tolist()
        assert sorted(order.tolist()) == share.tolist()
        for step, chunk in enumerate(chunks):
            assert plan.rows(step) - (step == plan.steps - 1) <= len(chunk) <= plan.rows(step)
            if plan.last == "drop":
                assert len(chunk) >= plan.batch
            else:
                assert len(chunk) <= plan.batch
    orders = [plan.order(epoch, rank, share) for rank, share in enumerate(plan.shares(epoch))]
    for step in range(plan.steps):
        assert plan.trained(step) == sum(len(plan.chunk(order, step)[: plan.batch]) for order in orders)
    if plan.last == "drop":  # what is left out is less than one batch and the odd sample
        assert plan.fewest - plan.steps * plan.batch < plan.batch


@settings(max_examples=times(100, seldom=40), deadline=None)
@given(plans(), st.integers(0, 3), st.integers(0, 3))
def test_destinations_are_one_cycle_through_all_ranks(plan, epoch, step):
    destinations = plan.destinations(epoch, step)
    if plan.kind == "ring":
        assert destinations.tolist() == [(rank - 1) % plan.ranks for rank in range(plan.ranks)]
    rank, seen = 0, []
    for _ in range(plan.ranks):
        rank = int(destinations[rank])
        seen.append(rank)
    assert sorted(seen) == list(range(plan.ranks))
    assert rank == 0


def test_on_the_ring_shares_go_round():
    plan = ExchangePlan(n=23, ranks=4, batch=2)
    first = plan.shares(0)
    assert sorted(len(share) for share in first) == [5, 6, 6, 6]
    for epoch in range(9):
        for rank, share in enumerate(plan.shares(epoch)):
            assert share.tolist() == first[(rank + epoch) % 4].tolist()


def test_a_random_plan_mixes_and_differs_from_step_to_step():
    plan = ExchangePlan(n=8000, ranks=8, batch=10, kind="random")
    rings = {tuple(plan.destinations(epoch, step)) for epoch in range(2) for step in range(plan.steps)}
    assert len(rings) > 150
    mine = plan.shares(0)[3]
    other = plan.shares(1)[3]
    # 125 of 1000 from each of 8 origins, standard deviation about 10 (chunks are of 10 samples: about 33)
    from_each = np.bincount(other // 1000, minlength=8)
    assert from_each[3] == 0  # whatever rank 3 held has left it
    assert from_each[[0, 1, 2, 4, 5, 6, 7]].min() > 30
    later = plan.shares(6)[3]
    assert 60 < np.isin(later, mine).sum() < 220


def test_seeds_ranks_and_epochs_have_orders_of_their_own():
    share = np.arange(500)
    orders = {
        tuple(ExchangePlan(2000, 4, 10, seed=seed).order(epoch, rank, share)[:20])
        for seed in range(3) for epoch in range(3) for rank in range(4)
    }  # fmt: skip
    assert len(orders) == 36
    still = ExchangePlan(2000, 4, 10, local_shuffle=False)
    assert still.order(5, 2, share).tolist() == share.tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 3, "ranks": 4, "batch": 1}, "3 samples cannot be shared by 4 ranks"),
        ({"n": 40, "ranks": 4, "batch": 11}, "batch of at most 10, or last='keep'"),
        ({"n": 40, "ranks": 4, "batch": 0}, "batch=0"),
        ({"n": 40, "ranks": 4, "batch": 2, "kind": "star"}, "use ring or random"),
        ({"n": 40, "ranks": 4, "batch": 2, "last": "pad"}, "use drop or keep"),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_says_why(arguments, words):
    with pytest.raises(ValueError, match=words):
        ExchangePlan(**arguments)
