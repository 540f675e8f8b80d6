"""Our own optimizers and layers on a simulated GPU: the bits of the CPU, and a host that never waits for the device."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from tests.simulated_cuda.launch import launch
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process

import phalanx
from phalanx.optim.one_pass import why_not
from phalanx.optim.rmsprop_warmup import RmspropWarmup

SEEDS = range(int(os.environ.get("PHALANX_TEST_SEEDS", "1")))
NET = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5).double())

OPTIMIZERS = {
    "lars": lambda params: phalanx.Lars(params, lr=2.0, weight_decay=0.1, foreach=True),
    "lars, nesterov": lambda params: phalanx.Lars(params, lr=2.0, nesterov=True, lr_in_momentum=False, foreach=True),
    "lars without momentum": lambda params: phalanx.Lars(params, lr=2.0, momentum=0.0, foreach=True),
    "rmsprop": lambda params: RmspropWarmup(params, lr=0.1, sgd_share=0.5, weight_decay=0.1),
    "late rmsprop": lambda params: RmspropWarmup(params, lr=0.1),
}


def train(device, make, steps=3):
    """The parameters, and how often the host waited in a step."""
    first, _, last = net = copy.deepcopy(NET).to(device)
    opt = make(net.parameters())
    waits = 0
    for t in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(t)).to(device)
        before = len(process().syncs) if device != "cpu" else 0
        opt.zero_grad()
        last(torch.tanh(first(x)).double()).square().mean().backward()
        opt.step()
        waits += len(process().syncs) - before if device != "cpu" else 0
    return [p.detach().cpu() for p in net.parameters()], waits


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    wanted, _ = train("cpu", OPTIMIZERS[name])
    for seed in SEEDS:
        with simulated(seed=seed):
            found, waits = train("cuda", OPTIMIZERS[name])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert waits == 0


def test_lars_takes_the_device_by_itself():
    """Without foreach=True: a parameter that is not on the CPU is updated by multi-tensor operations."""
    with simulated(seed=0):
        _, waits = train("cuda", lambda params: phalanx.Lars(params, lr=2.0))
    assert waits == 0


def test_a_fused_step_is_refused_on_a_gpu_with_the_reason():
    with simulated(seed=0):
        opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(2).to("cuda"))], lr=0.1)
        assert "float32 on cuda:0, not float32 on the CPU" in why_not(opt, SimpleNamespace(shares_memory=True))


# ---- shared batch norm -------------------------------------------------------------------------------------------------------


def normalize(comm, device, options):
    """Gradients of all inputs, the state, and how often the host waited for the device."""
    layer = phalanx.convert_batchnorm(torch.nn.BatchNorm2d(3, **options).to(device), comm)
    seen, waits = [], 0
    for t in range(3):
        x = torch.randn(3 + comm.rank, 3, 2, 2, generator=torch.Generator().manual_seed(10 * comm.rank + t))
        x = x.to(device).requires_grad_()
        before = len(process().syncs) if device != "cpu" else 0
        layer(x).square().sum().backward()
        waits += len(process().syncs) - before if device != "cpu" else 0
        seen.append(x.grad)
    return [x.cpu() for x in (*seen, *layer.state_dict().values())], waits


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_shared_batch_norm(options):
    wanted = phalanx.run_local(2, lambda comm: normalize(comm, "cpu", options), timeout=30)
    for seed in SEEDS:
        with simulated(gpus_per_host=2, seed=seed):
            found = launch(2, lambda comm: normalize(comm, "cuda", options))
        for (mine, waits), (theirs, _) in zip(found, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
            assert waits == 0
