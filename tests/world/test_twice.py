"""A multi-node optimizer inside DistributedDataParallel: both average, and rank 0 hears of it once."""

import contextlib
import copy
import warnings

import pytest
import torch
from tests.optim.oracle import MODEL, loss_of

import phalanx

OPTIONS = {
    "all-reduce": {},
    "in backward": {"sync": phalanx.AllReduce(overlap=True)},
    "weighted": {"sync": phalanx.AllReduce(weighted=True)},
    "double buffering": {"double_buffering": True},
    "gossip": {"sync": phalanx.Gossip()},
    "gossip of gradients": {"sync": phalanx.Gossip(exchange="gradients")},
}


def heard(comm, wrap, options, *, accumulate=False, clip=False, meddle=None, steps=3):
    """How often this rank was warned of a second average."""
    own = copy.deepcopy(MODEL)
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(own.parameters(), lr=0.1), comm, **options)
    wrap = wrap and comm.size > 1  # a world of one has no process group
    model = torch.nn.parallel.DistributedDataParallel(own) if wrap else own
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(steps):
            opt.zero_grad()
            if accumulate:
                with model.no_sync() if wrap else contextlib.nullcontext():
                    loss_of(model, comm, t).backward()
            loss_of(model, comm, t).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(own.parameters(), 0.01)
            if meddle == "zero":
                own.zero_grad()
                loss_of(model, comm, t).backward()
            opt.step()
    return [str(each.message) for each in caught if "DistributedDataParallel" in str(each.message)]


def play(comm, wrap, options, how):
    told = heard(comm, wrap, OPTIONS[options], **how)
    expected = int(wrap and comm.size > 1 and comm.rank == 0)
    assert len(told) == expected, told
    for text in told:
        assert "Use one of the two" in text
        assert ("gossip saves nothing" in text) == options.startswith("gossip")


@pytest.mark.parametrize("options", OPTIONS)
def test_a_second_average_is_noticed(world, options):
    world.run(play, True, options, {})


@pytest.mark.parametrize("options", OPTIONS)
def test_a_bare_model_is_not_suspected(world, options):
    world.run(play, False, options, {"clip": True})


@pytest.mark.parametrize("wrap", [True, False])
def test_accumulation_and_clipping_change_nothing(world, wrap):
    world.run(play, wrap, "all-reduce", {"accumulate": True, "clip": True})


def test_gradients_that_are_thrown_away_are_not_suspected(world):
    world.run(play, False, "all-reduce", {"meddle": "zero"})


def two_optimizers(comm):
    """Of the same parameters: both average in turn, and neither is DistributedDataParallel."""
    own = copy.deepcopy(MODEL)
    opts = [phalanx.create_multi_node_optimizer(torch.optim.SGD(own.parameters(), lr=0.1), comm) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(3):
            for opt in opts:
                opt.zero_grad()
            loss_of(own, comm, t).backward()
            opts[t % 2].step()
    assert not [each for each in caught if "DistributedDataParallel" in str(each.message)]


def test_two_optimizers_of_ours_are_not_suspected(world):
    world.run(two_optimizers)
