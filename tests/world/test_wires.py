"""Every wire with every way to synchronise, on hosts whose ranks share memory: replicas are equal, and train as without a wire.

The judge is the same training on ranks that are threads, where nothing passes through shared memory or gloo.
"""

import copy

import pytest
import torch
from tests.long import often
from tests.world.test_eight_bits import on_pretended_hosts
from torch import nn

import phalanx

STEPS = 8
ALLREDUCE = {
    "default": {},
    "overlap": {"sync": phalanx.AllReduce(overlap=True)},
    "no overlap": {"sync": phalanx.AllReduce(overlap=False)},
    "weighted": {"sync": phalanx.AllReduce(weighted=True)},
    "delayed": {"double_buffering": True},
    "groups": {"bucket_bytes": 3000},
}
LOCAL = {
    "local": {"sync": phalanx.LocalSGD(every=2)},
    "local, ranks": {"sync": phalanx.LocalSGD(every=2, level="rank")},
    "local, start": {"sync": phalanx.LocalSGD(every=2, level="rank", start=3)},
}
# how far the parameters may be from those without a wire, of how far they have moved
WIRES = {
    "none": (None, 1e-5),
    "float16": (torch.float16, 0.05),
    "bfloat16": (torch.bfloat16, 0.05),
    "int8": (phalanx.Int8(block=32), 0.05),
    "int8, stochastic": (phalanx.Int8(block=32, rounding="stochastic"), 0.05),
    "int8, ranks": (phalanx.Int8(level="rank"), 0.05),
    "powersgd": (phalanx.PowerSGD(rank=2), 0.6),
    "powersgd, start": (phalanx.PowerSGD(rank=3, start=3), 0.6),
}


def network(odd):
    wide, wider = 41 + odd, 300 + odd
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(13, wide), nn.Tanh(), nn.Linear(wide, wider), nn.Tanh(), nn.Linear(wider, 7))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(comm, model, options):
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), comm, **options)
    if getattr(options.get("sync"), "weighted", False):
        opt.weight = 1 + comm.rank
    for step in range(STEPS):
        own = torch.Generator().manual_seed(100 * comm.rank + step)
        opt.zero_grad()
        model(torch.randn(16, 13, generator=own)).square().mean().backward()
        opt.step()
    if hasattr(opt, "average_"):
        opt.average_()
    return flat(model)


def cases():
    for name, (wire, _) in WIRES.items():
        for kind, options in (ALLREDUCE | LOCAL).items():
            if kind in ALLREDUCE or not isinstance(wire, phalanx.PowerSGD):  # which local steps refuse
                for shape in ((4, 2), (6, 3), (3, 2)) if kind in ALLREDUCE else ((4, 2), (6, 3)):
                    yield pytest.param(name, options, shape, id=f"{name}-{kind}-{shape}")


CASES = list(cases())


@pytest.mark.parametrize(
    ("wire", "options", "shape"), [*CASES[::40], *often(*(case for case in CASES if case not in CASES[::40]))]
)
def test_replicas_are_equal_and_near(pools, wire, options, shape):
    ranks, per_host = shape
    wire, bound = WIRES[wire]
    for odd in (0, 1, 3):
        start = network(odd)
        own = options if wire is None else {**options, "wire": wire}
        found = pools.of(ranks).run(on_pretended_hosts, per_host, train, start, own, deadline=60)
        assert all(torch.equal(replica, found[0]) for replica in found)
        hosts = ranks // per_host if ranks % per_host == 0 else 1
        replicas = [copy.deepcopy(start) for _ in range(ranks)]
        judge = phalanx.run_local(ranks, lambda comm: train(comm, replicas[comm.rank], options), hosts=hosts)[0]  # noqa: B023
        assert float((found[0] - judge).norm()) < bound * float((judge - flat(start)).norm()), odd
