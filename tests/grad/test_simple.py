"""The averager against the one of twenty lines: the same means, whatever the groups and whenever they leave."""

from __future__ import annotations

import copy

import pytest
import torch

import phalanx
from phalanx.grad.simple import average_gradients


def layers() -> torch.nn.Module:
    """Whole numbers, so that a mean over 4 ranks is exact in any order of adding."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 2))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel()).view_as(p) % 5 - 2 + number % 2)
    return model


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.filterwarnings("ignore:rank .. no gradient:UserWarning")
def test_both_averagers_give_the_same_means(overlap, bucket_bytes, unused):
    def run(comm):
        clever = layers()
        simple = copy.deepcopy(clever)
        sync = phalanx.AllReduce(overlap=overlap)
        inner = torch.optim.SGD(clever.parameters(), lr=0.25)
        opt = phalanx.create_multi_node_optimizer(inner, comm, sync=sync, bucket_bytes=bucket_bytes)
        plain = torch.optim.SGD(simple.parameters(), lr=0.25)
        for step in range(3):
            x = torch.arange(10.0).view(2, 5) % 3 + comm.rank + step
            for model, optimizer in ((clever, opt), (simple, plain)):
                optimizer.zero_grad()
                used = model[:2] if unused and comm.rank == 1 else model
                used(x).sum().backward()
            average_gradients(simple.parameters(), comm)
            for p, q in zip(clever.parameters(), simple.parameters()):
                assert torch.equal(p.grad, q.grad)
            opt.step()
            plain.step()
            with torch.no_grad():  # back to whole numbers
                for p, q in zip(clever.parameters(), simple.parameters()):
                    assert torch.equal(p, q)
                    p.round_().clamp_(-4, 4)
                    q.round_().clamp_(-4, 4)

    phalanx.run_local(4, run)
