"""One replica of parameters and momentum per host: the same training, nothing that a user notices."""

import copy
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

import phalanx
from phalanx.comm.transports import shm

pytestmark = pytest.mark.skipif(bool(shm.UNAVAILABLE), reason=shm.UNAVAILABLE)

FUSED = phalanx.AllReduce(fused=True)
OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    {"lr": 0.05, "momentum": 0.9, "nesterov": True},
]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(216, 10)
    )
    return net.to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(120, 1, 8, 8, generator=g), torch.randint(0, 10, (120,), generator=g)


def gradients(net: torch.nn.Module, step: int, comm: phalanx.Communicator) -> None:
    net.train()
    x, y = (part[comm.rank :: comm.size] for part in batch(step))
    net.zero_grad()
    cross_entropy(net(x), y).backward()


def flat(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def train(comm, options, sync, steps=6, schedule=False):
    net = model()
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(net.parameters(), **options), comm, sync=sync)
    rates = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5) if schedule else None
    for step in range(steps):
        gradients(net, step, comm)
        opt.step()
        if rates is not None:
            rates.step()
    return net, opt


def compare(comm, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused, inner = train(comm, options, FUSED, schedule=True)
    usual, other = train(comm, options, phalanx.AllReduce(overlap=False), schedule=True)
    torch.testing.assert_close(flat(fused), flat(usual), rtol=1e-5, atol=1e-6)
    assert not torch.equal(flat(fused), flat(model()))
    if options.get("momentum"):
        mine, his = inner.state_dict()["state"], other.state_dict()["state"]
        assert mine.keys() == his.keys()
        for key, state in mine.items():
            torch.testing.assert_close(state["momentum_buffer"], his[key]["momentum_buffer"], rtol=1e-4, atol=1e-5)
    return flat(fused)


def test_fused_training_equals_the_usual_one(world):
    first, *others = world.run(compare, OPTIONS[1])
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_so_it_does_with_all_options(pair, options):
    first, second = pair.run(compare, options)
    assert torch.equal(first, second)


def resume(comm):
    """A checkpoint of a fused run goes on in a fused run, in a usual one, and in plain torch."""
    options = OPTIONS[1]
    net, opt = train(comm, options, FUSED, steps=3)
    saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
    for step in range(3, 6):
        gradients(net, step, comm)
        opt.step()
    for sync in (FUSED, phalanx.AllReduce(overlap=False)):
        again = model()
        made = phalanx.create_multi_node_optimizer(torch.optim.SGD(again.parameters(), **options), comm, sync=sync)
        if sync.fused:  # also into one that has its replica already
            gradients(again, 0, comm)
            made.step()
            comm.barrier()
        again.load_state_dict(saved[0])
        made.load_state_dict(saved[1])
        comm.barrier()
        for step in range(3, 6):
            gradients(again, step, comm)
            made.step()
        torch.testing.assert_close(flat(again), flat(net), rtol=1e-5, atol=1e-6)
    torch.optim.SGD(model().parameters(), **options).load_state_dict(saved[1])


def test_checkpoints_do_not_notice(pools):
    pools.of(3).run(resume)


def clipped(comm, sync):
    net = model()
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), comm, sync=sync)
    for step in range(3):
        gradients(net, step, comm)
        opt.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        opt.step()
    net.eval()
    return flat(net), net(batch(9)[0][:4]).detach()


def both_clipped(comm):
    for mine, his in zip(clipped(comm, FUSED), clipped(comm, phalanx.AllReduce(overlap=False))):
        torch.testing.assert_close(mine, his, rtol=1e-4, atol=1e-5)


def test_clipping_after_synchronize(pools):
    pools.of(2).run(both_clipped)


def frozen_and_added(comm):
    runs = []
    for sync in (FUSED, phalanx.AllReduce(overlap=False)):
        net = model()
        conv, _, _, _, head = net
        opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(conv.parameters(), lr=0.1, momentum=0.9), comm, sync=sync)
        for step in range(6):
            if step == 2:
                opt.add_param_group({"params": list(head.parameters()), "lr": 0.02})
            conv.weight.requires_grad_(step != 4)
            gradients(net, step, comm)
            opt.step()
        runs.append(flat(net))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


def test_parameters_added_and_frozen(pools):
    pools.of(2).run(frozen_and_added)


def refused(comm, native):
    net = model()
    adam = torch.optim.AdamW(net.parameters()) if native else torch.optim.SGD(net.parameters(), lr=0.1)
    opt = phalanx.create_multi_node_optimizer(adam, comm, sync=FUSED)
    gradients(net, 0, comm)
    with pytest.warns(UserWarning, match="AdamW" if native else "share memory"):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        gradients(net, 1, comm)
        opt.step()
    return flat(net)


@pytest.mark.parametrize("native", [True, False])
def test_what_cannot_be_fused_runs_as_usual_and_says_so_once(pools, native):
    first, second = pools.of(2, **({} if native else {"PHALANX_NATIVE": "0"})).run(refused, native)
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(model()))


def memory(comm):
    net = torch.nn.Linear(1000, 1000)
    phalanx.bcast_parameters(net, comm)
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), comm, sync=FUSED)
    net(torch.ones(2, 1000)).sum().backward()
    opt.step()
    before = net.weight.detach().clone()
    comm.barrier()
    if comm.rank == 0:
        with torch.no_grad():
            net.weight[0, 0] = 123.0
    comm.barrier()
    return net.weight[0, 0].item(), before[0, 0].item()


def test_there_is_one_replica_on_the_host(pools):
    for seen, before in pools.of(3).run(memory):
        assert seen == 123.0 != before


@pytest.mark.parametrize("option", [{"wire": torch.bfloat16}, {"double_buffering": True}])
def test_options_that_contradict_it_are_refused(option):
    comm = phalanx.create_communicator()
    with pytest.raises(ValueError, match="fused"):
        phalanx.create_multi_node_optimizer(torch.optim.SGD(model().parameters(), lr=0.1), comm, sync=FUSED, **option)
