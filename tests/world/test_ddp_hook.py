"""phalanx.ddp_hook: DistributedDataParallel with our schedules has the gradients of plain DistributedDataParallel."""

import contextlib
import copy
import os

import pytest
import torch
from tests.optim.oracle import MODEL, flat, loss_of
from tests.world.conftest import ONLY
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper

from phalanx import Communicator, ddp_hook

# MODEL has 170 KB in 6 tensors: at 0.05 MB several buckets, one of them larger than what takes the shortest way
CAP = 0.05


def gradients(comm, hook, options, steps=3):
    own = copy.deepcopy(MODEL)
    model = torch.nn.parallel.DistributedDataParallel(own, bucket_cap_mb=CAP, **options)
    buckets = []
    if hook is not None:

        def counting(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buckets.append(bucket.index())
            return hook(state, bucket)

        model.register_comm_hook(comm, counting)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for t in range(steps):
        opt.zero_grad()
        loss_of(model, comm, t).backward()
        seen.append(torch.cat([p.grad.reshape(-1) for p in own.parameters()]))
        opt.step()
    return seen, flat(own), buckets


def compare(comm, options):
    plain, plain_weights, _ = gradients(comm, None, options)
    ours, weights, buckets = gradients(comm, ddp_hook, options)
    assert len(set(buckets)) > 1
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
        assert mine.abs().max() > 0
    torch.testing.assert_close(weights, plain_weights, rtol=1e-9, atol=1e-12)
    return weights


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (3, {}),
        (2, {"gradient_as_bucket_view": True}),
        (2, {"static_graph": True}),
        (2, {"find_unused_parameters": True}),
    ],
    ids=str,
)
def test_gradients_are_those_of_plain_ddp(pools, size, options):
    if ONLY not in (None, size):
        pytest.skip(f"needs {size} ranks, PHALANX_TEST_WORLD is {ONLY}")
    results = pools.of(size).run(compare, options)
    assert all(torch.equal(other, results[0]) for other in results)


def compare_beside_idle_cores(comm, cores):
    """The same with so many cores per rank: buckets then leave while backward runs, or wait for the last one."""
    before = os.sched_getaffinity
    os.sched_getaffinity = lambda pid: range(cores * comm.size)
    try:
        return compare(comm, {})
    finally:
        os.sched_getaffinity = before


@pytest.mark.parametrize("cores", [1, 2])
def test_gradients_are_those_of_plain_ddp_on_few_and_on_many_cores(pair, cores):
    a, b = pair.run(compare_beside_idle_cores, cores)
    assert torch.equal(a, b)


def two_models(comm):
    """Their buckets come in one backward, and the last one of each lets all leave that wait."""
    models = [torch.nn.parallel.DistributedDataParallel(copy.deepcopy(MODEL), bucket_cap_mb=CAP) for _ in range(2)]
    for model in models:
        model.register_comm_hook(comm, ddp_hook)
    for t in range(3):
        sum(loss_of(model, comm, t) for model in models).backward()
    return [torch.cat([p.grad.reshape(-1) for p in model.parameters()]) for model in models]


def test_two_models_in_one_backward(pair):
    (a, b), (c, d) = pair.run(two_models)
    assert torch.equal(a, b)
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert a.abs().max() > 0


def registered_directly(comm):
    """DDP looks at the hook's annotations; ours must pass without a wrapper."""
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(MODEL))
    model.register_comm_hook(comm, ddp_hook)
    loss_of(model, comm, 0).backward()
    return model.module[0].weight.grad.clone()


def test_the_hook_itself_can_be_registered(pair):
    a, b = pair.run(registered_directly)
    assert torch.equal(a, b)


def failed(work):
    """The text of the error that `work` raises."""
    with pytest.raises((RuntimeError, TypeError)) as caught:
        work()
    return str(caught.value)


def wrapped(comm, model=None, **options):
    ddp = torch.nn.parallel.DistributedDataParallel(model or torch.nn.Linear(2, 2), **options)
    ddp.register_comm_hook(comm, ddp_hook)
    return ddp


def logged(comm):
    model = wrapped(comm)
    model(torch.ones(1, 2)).sum().backward()
    return model._get_ddp_logging_data()["comm_hook"]


def test_ddp_logs_the_name_of_the_hook(pair):
    assert pair.run(logged) == ["ddp_hook"] * 2


class Broken(Communicator):
    """A communicator whose all-reduce fails on its way; it is its own Pending."""

    queued = False  # on no GPU's stream
    shares_memory, size = False, 1000

    def __init__(self, shares_memory=False):
        self.shares_memory = shares_memory

    def all_reduce_async(self, x, op, *, label):
        return self

    def all_reduce(self, x, op, *, label):
        return self.wait()

    def wait(self):
        raise RuntimeError("rank 7 did not come")


def failing(comm, shares_memory):
    model = wrapped(Broken(shares_memory))
    return failed(lambda: model(torch.ones(1, 2)).sum().backward())


@pytest.mark.parametrize("shares_memory", [False, True])
def test_a_failed_all_reduce_ends_backward_with_its_reason(pair, shares_memory):
    for text in pair.run(failing, shares_memory):
        assert "rank 7 did not come" in text


def failing_after_joining(comm):
    """Rank 1 has no input: it only shadows the collectives of rank 0, and asks DDP's future for no value."""
    model = wrapped(Broken())

    def train():
        with Join([model]):
            for _ in range(1 - comm.rank):
                model(torch.ones(1, 2)).sum().backward()

    return failed(train)


def test_a_failed_all_reduce_ends_a_rank_that_has_joined(pair):
    for text in pair.run(failing_after_joining):
        assert "rank 7 did not come" in text


def unlike(comm):
    """Rank 1 has another operation of the same size and kind where rank 0 has a bucket."""

    def other(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future()
        state.all_reduce(bucket.buffer(), "mean")
        return future

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(comm, ddp_hook if comm.rank == 0 else other)
    return failed(lambda: model(torch.ones(1, 2)).sum().backward())


def test_a_bucket_meets_only_the_same_bucket(pair):
    for text in pair.run(unlike):
        assert "DDP bucket 0" in text


def misused(comm):
    without = wrapped(None)
    sparse = wrapped(comm, torch.nn.Embedding(4, 2, sparse=True))
    return failed(lambda: without(torch.ones(1, 2)).sum().backward()), failed(lambda: sparse(torch.tensor([1])).sum().backward())


def test_a_wrong_state_and_a_sparse_gradient_are_refused_with_a_remedy(pair):
    for without, sparse in pair.run(misused):
        assert "register_comm_hook(comm, ddp_hook), got NoneType" in without
        assert "(4, 2)" in sparse
        assert "sparse=False" in sparse


def halved(comm):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model.register_comm_hook(comm, fp16_compress_wrapper(ddp_hook))
    model(torch.full((1, 3), 1.0 + comm.rank)).sum().backward()
    return model.module.weight.grad.tolist()


def test_torchs_wrapper_compresses_what_the_hook_sends(pair):
    assert pair.run(halved) == [[[1.5] * 3]] * 2


class Branches(torch.nn.Module):
    """Every second input leaves a layer unused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(100, 100, dtype=torch.double) for _ in range(2))

    def forward(self, x, t):
        return self.first(x) if t % 2 else self.second(self.first(x))


def uneven(comm, hook, inputs, options, join):
    """Every gradient of a rank that has `inputs[comm.rank]` inputs, and its weights after the others have ended, too."""
    options = {"bucket_cap_mb": CAP, **options}
    model = torch.nn.parallel.DistributedDataParallel(Branches(), **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with Join([model], **join):
        for t in range(inputs[comm.rank]):
            x = torch.full((1, 100), 1.0 + comm.rank + t, dtype=torch.double)
            with model.no_sync() if t == 2 else contextlib.nullcontext():
                model(x, t if options.get("find_unused_parameters") else 0).sum().backward()
            seen.append(torch.cat([p.grad.reshape(-1).clone() for p in model.parameters() if p.grad is not None]))
            if t != 2:
                opt.step()
                opt.zero_grad()
    return [*seen, flat(model)]


def compare_uneven(comm, inputs, options):
    plain = uneven(comm, None, inputs, options, {})
    ours = uneven(comm, (comm, ddp_hook), inputs, options, {})
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    # no hook learns how many ranks are left, torch's own no more than ours: all divide by the size of the world
    active = {"divide_by_initial_world_size": False}
    for mine, theirs in zip(uneven(comm, (comm, ddp_hook), inputs, options, active), ours, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    theirs = uneven(comm, (None, allreduce_hook), inputs, options, active)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("inputs", [(5, 1), (0, 4)], ids=str)
def test_uneven_inputs_as_with_plain_ddp(pair, inputs, options):
    pair.run(compare_uneven, inputs, options)
