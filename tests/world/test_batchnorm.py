"""Synchronised batch norm on real processes, through shared memory and through torch.distributed, beside overlapped gradients."""

import copy

import pytest
import torch
from torch import nn

import phalanx

SIZES = (5, 2, 0, 4)  # samples of each rank; the third has none


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    ).double()


def inputs(step, ranks):
    g = torch.Generator().manual_seed(step)
    return torch.randn(sum(SIZES[:ranks]), 1, 6, 6, generator=g, dtype=torch.float64).split(SIZES[:ranks])


def train(comm, ranks, *, convert):
    """Four steps on the sum of the losses of all samples; `comm` None: one process."""
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if comm is not None:
        net = phalanx.convert_batchnorm(net, comm) if convert else net
        opt = phalanx.create_multi_node_optimizer(opt, comm, sync=phalanx.AllReduce(overlap=True, growing=1))
    for step in range(4):
        parts = inputs(step, ranks)
        x = torch.cat(parts) if comm is None else parts[comm.rank]
        opt.zero_grad()
        (net(x).square().sum() * (1 if comm is None else ranks)).backward()
        opt.step()
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(("ranks", "native"), [(2, True), (4, True), (2, False)])
def test_training_equals_one_process(pools, ranks, native):
    alone = train(None, ranks, convert=False)
    for found in pools.of(ranks, **({} if native else {"PHALANX_NATIVE": "0"})).run(_converted, ranks):
        torch.testing.assert_close(found, alone, rtol=1e-8, atol=1e-9)


def _converted(comm, ranks):
    return train(comm, ranks, convert=True)


def plain(comm, ranks):
    return train(comm, ranks, convert=False)


def test_plain_batch_norm_does_not(pools):
    alone = train(None, 2, convert=False)
    for found in pools.of(2).run(plain, 2):
        assert not torch.allclose(found["6.weight"], alone["6.weight"], rtol=1e-3, atol=1e-3)


def averaged(comm):
    net = copy.deepcopy(model())
    net(inputs(comm.rank, 2)[0])
    before = {name: x.clone() for name, x in net.named_buffers()}
    phalanx.average_batchnorm_(net, comm)
    return before, {name: x.clone() for name, x in net.named_buffers()}


def test_running_statistics_become_their_mean(pools):
    found = pools.of(4).run(averaged)
    for name in found[0][0]:
        mean = torch.stack([before[name].double() for before, _ in found]).mean(0)
        for _, after in found:
            torch.testing.assert_close(after[name].double(), mean, rtol=1e-12, atol=1e-12)
