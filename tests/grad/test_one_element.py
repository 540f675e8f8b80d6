"""A parameter of one element may have any stride and counts as contiguous, but torch does not view it as bytes."""

import pytest
import torch

import phalanx
from phalanx.nn.init import digest
from phalanx.train.checkpoint.replicas import fingerprint
from phalanx.train.checkpoint.tree import storable

MAKE = [lambda: torch.zeros(4)[::4], lambda: torch.zeros(3, 1)[::3], lambda: torch.zeros(2, 8)[:1, ::8]]


@pytest.mark.parametrize("make", MAKE)
def test_it_trains_on_two_ranks_that_compare_their_parameters(make):
    def play(comm):
        p = torch.nn.Parameter(make())
        opt = phalanx.create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, sync=phalanx.AllReduce(check_every=1))
        for _ in range(2):
            opt.zero_grad()
            (p * (comm.rank + 1)).sum().backward()
            opt.step()
        return p.item()

    assert phalanx.run_local(2, play) == [-3.0, -3.0]


@pytest.mark.parametrize("make", MAKE)
def test_it_is_saved_and_compared_like_any_other(make):
    odd, plain = make(), make().clone(memory_format=torch.contiguous_format)
    assert fingerprint(odd) == fingerprint(plain)
    assert storable(odd.to(torch.complex64)).tolist() == storable(plain.to(torch.complex64)).tolist()
    models = [torch.nn.Module(), torch.nn.Module()]
    for model, x in zip(models, (odd, plain)):
        model.p = torch.nn.Parameter(x)
    assert digest(models[0]) == digest(models[1])
