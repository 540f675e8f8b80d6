"""Gossip on a simulated GPU: the same bits as on the CPU, and no step in which the host waits for the device."""

import copy
import os

import pytest
import torch
from tests.simulated_cuda.launch import launch
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process

import phalanx
from phalanx import Gossip, create_multi_node_optimizer

NET = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2).double())
SEEDS = range(int(os.environ.get("PHALANX_TEST_SEEDS", "1")))  # each is another order in which the device may run
SETTLED = 1  # steps after which nothing is agreed on any more


class Mixed(torch.nn.Module):
    """Parameters of two dtypes, so that no list of tensors is of one kind."""

    def __init__(self):
        super().__init__()
        self.net = copy.deepcopy(NET)

    def forward(self, x):
        return self.net[3](self.net[:3](x).double())


def waits(since):
    """Where the host waited for the device."""
    return [str(sync) for sync in process().syncs[since:]]


def batch(comm, t, device):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * comm.rank + t)).to(device)


def train(comm, device, *, steps=5, resume=None, wire=None, **options):
    """The replica after some steps, and the waits of each. At step `resume` all state goes through the host."""
    found = []
    made = lambda: copy.deepcopy(MODEL).to(device)  # noqa: E731
    wrap = lambda model: create_multi_node_optimizer(  # noqa: E731
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), comm, sync=Gossip(patience=60.0, **options), wire=wire
    )
    model = made()
    opt = wrap(model)
    opt.follow(model)
    for t in range(steps):
        if t == resume:
            saved = on_host((model.state_dict(), opt.state_dict(), opt.communication.state_dict()))
            model = made()
            opt = wrap(model)
            opt.follow(model)
            for each, state in zip((model, opt, opt.communication), saved, strict=True):
                each.load_state_dict(state)
        x = batch(comm, t, device)
        before = len(process().syncs) if device != "cpu" else 0
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        found.append(waits(before) if device != "cpu" else [])
    return {name: x.cpu() for name, x in model.state_dict().items()}, found


MODEL = Mixed()


def on_host(state):
    """As a checkpoint has it."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    return type(state)(map(on_host, state)) if isinstance(state, list | tuple) else state


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


MODES = [
    {},
    {"overlap": False},
    {"exchange": "gradients"},
    {"exchange": "gradients", "overlap": False},
    {"wire": torch.bfloat16},
    {"wire": torch.float16, "exchange": "gradients"},
    {"topology": "hypercube"},
]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_gpu_mixes_as_a_cpu_and_the_host_waits_for_nothing(options):
    wanted = phalanx.run_local(4, lambda comm: train(comm, "cpu", **options)[0], timeout=30)
    for seed in SEEDS:
        with simulated(gpus_per_host=4, seed=seed):
            found = launch(4, lambda comm: train(comm, "cuda", **options))
        for (replica, seen), expected in zip(found, wanted, strict=True):
            assert same(replica, expected)
            assert seen[SETTLED:] == [[]] * (len(seen) - SETTLED)


@pytest.mark.parametrize("options", [{}, {"exchange": "gradients"}, {"wire": torch.bfloat16}], ids=str)
def test_a_resumed_exchange_is_mixed_on_the_device(options):
    """A checkpoint brings it to the host; it used to stay there, and met parameters on the GPU."""
    with simulated(gpus_per_host=2, seed=1):
        wanted = launch(2, lambda comm: train(comm, "cuda", **options)[0])
    with simulated(gpus_per_host=2, seed=2):
        found = launch(2, lambda comm: train(comm, "cuda", resume=3, **options)[0])
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_hosts_gossip_on_gpus():
    options = {"level": "host"}
    for seed in SEEDS:
        with simulated(hosts=2, gpus_per_host=2, seed=seed):
            found = launch(4, lambda comm: train(comm, "cuda", **options)[0])
        assert same(found[0], found[1])  # the ranks of a host are one replica
        assert same(found[2], found[3])
        assert not same(found[0], found[2])


# ---- float16 -------------------------------------------------------------------------------------------------------------------


def scaled(comm, device, exchange, make):
    """Rank 1 overflows in steps 0 and 2. Returns parameters after every step, the scale, and where the host waited."""
    p = torch.nn.Parameter(torch.ones(4).to(device))
    opt = create_multi_node_optimizer(make([p]), comm, sync=Gossip(overlap=False, exchange=exchange, patience=60.0))
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=100)
    history, found = [], []
    for t in range(4):
        before = len(process().syncs) if device != "cpu" else 0
        opt.zero_grad()
        loss = p.sum()
        scaler.scale(loss * float("inf") if t in (0, 2) and comm.rank == 1 else loss * (t + 1)).backward()
        scaler.step(opt)
        scaler.update()
        found.append(waits(before) if device != "cpu" else [])
        history.append(p.detach().clone())
    return [x.cpu() for x in history], scaler.get_scale(), found


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("exchange", ["weights", "gradients"])
def test_an_overflow_on_one_rank_is_the_same_on_a_gpu(exchange):
    wanted = phalanx.run_local(2, lambda comm: scaled(comm, "cpu", exchange, sgd), timeout=30)
    for seed in SEEDS:
        with simulated(gpus_per_host=2, seed=seed):
            found = launch(2, lambda comm: scaled(comm, "cuda", exchange, sgd))
        for (replicas, scale, seen), (expected, full, _) in zip(found, wanted, strict=True):
            assert scale == full
            assert all(torch.equal(a, b) for a, b in zip(replicas, expected, strict=True))
            if exchange == "gradients":  # with weights, torch's SGD must not step at all, so the host has to ask
                assert seen[SETTLED:] == [[]] * 3


def adam(params):
    return torch.optim.Adam(params, lr=0.1, fused=True)


def test_a_fused_optimizer_skips_by_itself():
    """Not even with weights does the host ask whether a gradient overflowed."""
    for seed in SEEDS:
        with simulated(gpus_per_host=2, seed=seed):
            found = launch(2, lambda comm: scaled(comm, "cuda", "weights", adam))
        (first, full, _), (second, reduced, _) = found
        assert (full, reduced) == (8.0, 2.0)  # rank 1 overflowed twice
        assert torch.allclose(first[0], torch.full((4,), 0.95))  # rank 0 moved by 0.1, rank 1 not at all
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        # to torch's C++ side simulated tensors are on the CPU, so its Adam copies what was found there
        assert not any(wait.lstrip().startswith("item") for _, _, seen in found for step in seen for wait in step)
