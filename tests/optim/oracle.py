"""One process with the whole batch: what N ranks must equal. The same step function runs on both."""

import contextlib
import copy
import itertools

import torch

import phalanx
from phalanx import AllReduce, ReplicaError, create_multi_node_optimizer  # noqa: F401

WORLDS = (1, 2, 3, 4, 5, 8)
SAMPLES = 120  # each of these worlds divides it

torch.manual_seed(7)
# one layer is larger than what takes the way with the fewest steps, whatever algorithm was asked for (128 KiB)
MODEL = torch.nn.Sequential(
    torch.nn.Linear(20, 160), torch.nn.Tanh(), torch.nn.Linear(160, 128), torch.nn.Tanh(), torch.nn.Linear(128, 3)
).double()
SMALL = torch.nn.Sequential(
    torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
).double()
X, Y = torch.randn(8, SAMPLES, 20).double(), torch.randn(8, SAMPLES, 3).double()


def sgd(model):
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def shard(comm, x):
    """This rank's samples; all of them without a communicator."""
    return x if comm is None else x.chunk(comm.size)[comm.rank]


def loss_of(model, comm, t, dtype=torch.float64):
    return ((model(shard(comm, X[t]).to(dtype)) - shard(comm, Y[t]).to(dtype)) ** 2).mean()


def plain_step(model, opt, comm, t):
    opt.zero_grad()
    loss_of(model, comm, t).backward()
    opt.step()


def synchronize(opt):
    if hasattr(opt, "synchronize"):
        opt.synchronize()


def no_sync(opt):
    return opt.no_sync() if hasattr(opt, "no_sync") else contextlib.nullcontext()


def flat(model):
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def alone(step, *, steps=4, model=SMALL, make=sgd):
    """Parameters after each step, in one process."""
    model = copy.deepcopy(model)
    opt, history = make(model), []
    for t in range(steps):
        step(model, opt, None, t)
        history.append(flat(model))
    return history


def together(n, step, *, steps=4, model=SMALL, make=sgd, algorithm=None, hosts=1, **options):
    """Parameters after each step, on n ranks, which must agree bit by bit after each."""

    def train(comm):
        own = copy.deepcopy(model)
        opt, history = create_multi_node_optimizer(make(own), comm, **options), []
        for t in range(steps):
            step(own, opt, comm, t)
            history.append(flat(own))
        return history

    histories = phalanx.run_local(n, train, algorithm=algorithm, hosts=hosts, timeout=20)
    agree(histories)
    return histories[0]


def agree(histories):
    for own in histories[1:]:
        for t, (mine, first) in enumerate(zip(own, histories[0], strict=True)):
            assert torch.equal(mine, first), f"ranks differ after step {t}"


def close(history, wanted, *, rtol=1e-9, atol=1e-10):
    """Step by step; and something was learned at each, so that a step without effect is not mistaken for a right one."""
    assert len(history) == len(wanted)
    for t, (mine, theirs) in enumerate(zip(history, wanted, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=lambda text, t=t: f"step {t}: {text}")
    for before, after in itertools.pairwise(wanted):
        assert not torch.equal(before, after)
