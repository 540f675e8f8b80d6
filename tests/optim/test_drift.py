"""Bits that flip in memory: the rank is named within `check_every` steps, or healed. Equal ranks raise no alarm."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from tests.long import times

import phalanx
from phalanx.grad.drift import minority

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from silent_corruption import build, clean, flip, flipped, step


@pytest.mark.parametrize("policy", ["stop", "heal"])
@pytest.mark.parametrize("seed", range(times(20, seldom=2)))
def test_a_flipped_bit_is_named_within_k_steps(seed, policy):
    every = 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = phalanx.run_local(3, lambda comm: flipped(comm, seed, every, policy), timeout=30)
    for row in rows:
        assert row["named"] or row["gone"], row  # gone: an update has rounded it away, and all ranks are equal
        assert row.get("after_steps", 0) <= every, row
        assert row.get("healed", True), row


@pytest.mark.parametrize("seed", range(times(10, seldom=1)))  # 10,000 steps in one test take minutes on a slow machine
def test_equal_ranks_raise_no_alarm(seed):
    steps = times(1000, seldom=60)
    for row in phalanx.run_local(3, lambda comm: clean(comm, steps, every=3, seed=seed), timeout=60):
        assert row["alarms"] == 0


@pytest.mark.parametrize("policy", ["stop", "heal"])
def test_two_ranks_cannot_tell_who_is_right(policy):
    def train(comm):
        model, opt = build("sgd", comm, 1, policy)
        generator = torch.Generator().manual_seed(comm.rank)
        step(model, opt, generator)
        if comm.rank == 1:
            flip(model[0].weight, 3, 20)
        with pytest.raises(phalanx.ReplicaError) as caught:
            step(model, opt, generator)
        return str(caught.value), opt.differences[0].ranks, opt.differences[0].healed

    for text, ranks, healed in phalanx.run_local(2, train, timeout=20):
        assert "With two ranks you cannot tell which is right" in text
        assert "in 0.weight" in text
        assert (ranks, healed) == ((0, 1), False)


def test_healed_ranks_continue_as_if_nothing_had_happened():
    def train(comm, disturbed):
        model, opt = build("sgd", comm, 1, "heal")
        generator = torch.Generator().manual_seed(comm.rank)
        for number in range(6):
            step(model, opt, generator)
            if disturbed and number == 3 and comm.rank == 2:  # of the momentum: it has an effect in the next step alone
                flip(opt.state[model[2].bias]["momentum_buffer"], 1, 22)
                opt._averager.check_replicas(opt.optimizer.state)  # the check of this step, after the flip
            elif disturbed and number == 3:
                opt._averager.check_replicas(opt.optimizer.state)
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    undisturbed = phalanx.run_local(3, lambda comm: train(comm, False), timeout=20)
    with pytest.warns(UserWarning, match="the optimizer state of rank 2 differ"):
        healed = phalanx.run_local(3, lambda comm: train(comm, True), timeout=20)
    for own in healed:
        assert torch.equal(own, undisturbed[0])


@pytest.mark.parametrize(
    ("every", "who"),
    [("aab", (2,)), ("baa", (0,)), ("ab", None), ("aabb", None), ("aaabc", (3, 4)), ("abc", None), ("aa", ())],
)
def test_only_a_majority_decides(every, who):
    assert minority(list(every)) == who


def test_a_policy_that_does_not_exist():
    with pytest.raises(ValueError, match="on_difference='ignore': stop or heal"):
        phalanx.AllReduce(on_difference="ignore")
