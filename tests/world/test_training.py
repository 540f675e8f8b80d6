"""Training in processes: the same oracle, replicas, remedies and surprises as among threads, on real transports."""

import copy
import os
from pathlib import Path

import numpy
import pytest
import torch
from tests.long import only_long
from tests.optim.oracle import (
    MODEL,
    SMALL,
    AllReduce,
    ReplicaError,
    alone,
    close,
    create_multi_node_optimizer,
    flat,
    loss_of,
    no_sync,
    plain_step,
    sgd,
)
from tests.world.conftest import ONLY

from phalanx import bcast_parameters, seed_everything
from phalanx.native import core


@pytest.fixture(params=[ONLY] if ONLY else [2, 3, 5], ids=lambda n: f"{n}-ranks")
def world(request, pools):
    """Some sizes: tests/optim has all of them, as threads."""
    return pools.of(request.param)


def train(comm, options, steps):
    own = copy.deepcopy(MODEL)
    opt, history = create_multi_node_optimizer(sgd(own), comm, **options), []
    for t in range(steps):
        plain_step(own, opt, comm, t)
        history.append(flat(own))
    told = comm.allgather(torch.stack(history))
    assert all(torch.equal(other, told[0]) for other in told)
    return history


OPTIONS = {
    "default": {},
    "many groups": {"bucket_bytes": 3000, "sync": AllReduce(overlap=True)},
    "double buffering": {"double_buffering": True},
    "bfloat16": {"wire": torch.bfloat16},
}


@pytest.mark.parametrize("name", ["default", "many groups"])
def test_ranks_equal_one_process(world, name):
    close(world.run(train, OPTIONS[name], 4)[0], alone(plain_step, model=MODEL))


@pytest.mark.parametrize("name", ["double buffering", "bfloat16"])
def test_options(pair, name):
    history = pair.run(train, OPTIONS[name], 4)[0]
    wanted = alone(plain_step, model=MODEL)
    if name == "double buffering":
        assert torch.equal(history[0], flat(MODEL))
        torch.testing.assert_close(history[1], wanted[0], rtol=1e-9, atol=1e-10)
    else:
        close(history, wanted, rtol=2e-2, atol=2e-2)


def surprises(comm):
    """In turn: a second backward; a batch thrown away; accumulation; a rank without backward; one without, others with two."""
    own = copy.deepcopy(SMALL)
    opt = create_multi_node_optimizer(torch.optim.SGD(own.named_parameters(), lr=0.1), comm, **OPTIONS["many groups"])
    for t in range(8):
        opt.zero_grad()
        if t == 3:
            loss_of(own, comm, 0).backward()
            opt.zero_grad()
        if t == 4:
            with no_sync(opt):
                loss_of(own, comm, 0).backward()
        if t == 2 or (t == 6 and comm.rank != comm.size - 1):
            loss_of(own, comm, 0).backward()
        if t not in (5, 6) or comm.rank != comm.size - 1:
            loss_of(own, comm, t).backward()
        opt.step()
    return flat(own)


def watched_surprises(comm):
    if comm.rank != comm.size - 1:
        return surprises(comm)
    with pytest.warns(UserWarning, match="no gradient for 6 parameter"):
        return surprises(comm)


def test_surprises(world):
    results = world.run(watched_surprises)
    assert all(torch.equal(other, results[0]) for other in results)


# ---- equal replicas at the start --------------------------------------------------------------------------------------------


def build():
    return torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)).double()


def start_different(comm, remedy, root):
    torch.manual_seed(os.getpid())  # every process has its own
    if remedy == "seed_everything":
        seed_everything(11)
    own = build()
    if remedy == "bcast_parameters":
        own[1].running_mean.fill_(comm.rank)
        own[1].num_batches_tracked.fill_(comm.rank)
        before = flat(own)
        bcast_parameters(own, comm, root)
        assert own[1].running_mean.tolist() == [float(root)] * 16
        assert own[1].num_batches_tracked == root
        assert torch.equal(flat(own), before) == (comm.rank == root)
    opt = create_multi_node_optimizer(sgd(own), comm)
    if remedy is None and comm.size > 1:
        with pytest.raises(
            ReplicaError, match=r"from rank 0, in 0\.weight, 0\.bias, 2\.weight, 2\.bias\. .*seed_everything"
        ) as caught:
            plain_step(own, opt, comm, 0)
        others = ", ".join(map(str, range(1, comm.size)))
        assert f"{'rank' if comm.size == 2 else 'ranks'} {others} from rank 0" in str(caught.value)
    else:
        plain_step(own, opt, comm, 0)
    comm.barrier()  # nobody is left hanging
    return flat(own)


@pytest.mark.parametrize("remedy", [None, "seed_everything", "bcast_parameters"])
def test_replicas_that_start_different_and_the_remedies(world, remedy):
    results = world.run(start_different, remedy, world.size - 1)
    same = all(torch.equal(other, results[0]) for other in results)
    assert same == (remedy is not None or world.size == 1)


def test_seed_everything_seeds_three_generators():
    import random

    def draw():
        return random.random(), numpy.random.rand(), float(torch.rand(()))

    seed_everything(5)
    first = draw()
    assert draw() != first
    seed_everything(numpy.int64(5))
    assert draw() == first
    for wrong in (-1, 2**32, 1.5, "5", None):
        with pytest.raises(ValueError, match="seed="):
            seed_everything(wrong)


# ---- optimizers made and dropped ---------------------------------------------------------------------------------------------


def mapped():
    """Bytes of memory that this process shares with others."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "phalanx" in line and ("memfd" in line or "/dev/shm" in line):
            begin, end = line.split(" ")[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def one_after_the_other(comm, sync):
    """Each rank drops its optimizers when it likes: rank 0 at once, the others with some delay."""
    net, kept, sizes = torch.nn.Linear(600, 600), [], []
    bcast_parameters(net, comm)
    for _ in range(16):
        opt = create_multi_node_optimizer(torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9), comm, sync=sync)
        for _ in range(3):
            opt.zero_grad()
            net(torch.ones(2, 600)).sum().backward()
            opt.step()
        kept = [*kept, opt][-1 - comm.rank :] if comm.rank else []
        del opt
        sizes.append(mapped())
    assert max(sizes[8:]) <= max(sizes[:8])  # no growth once the slowest has dropped its first
    return sizes


@pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE)
@pytest.mark.parametrize("fused", [False, True])
def test_dropped_optimizers_leave_nothing(pools, fused):
    for sizes in pools.of(3).run(one_after_the_other, AllReduce(fused=fused, overlap=False)):
        assert sizes[-1] > 600 * 600 * 4  # something is shared at all


# ---- overlap ------------------------------------------------------------------------------------------------------------------


def bytes_sent_during_backward(comm, cores_of_rank_0):
    """Per step, with 24 MB of gradients and `overlap=None`, if rank 0 may use this many cores and the others all they want."""
    allowed = os.sched_getaffinity
    os.sched_getaffinity = lambda pid: set(range(cores_of_rank_0 if comm.rank == 0 else 64))
    try:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(6)))
        options = {"sync": AllReduce(record=True), "bucket_bytes": 4 << 20}
        opt = create_multi_node_optimizer(torch.optim.SGD(net.parameters(), lr=1e-3), comm, **options)
        for _ in range(4):
            opt.zero_grad()
            net(torch.full((1, 1000), 1.0 + comm.rank)).sum().backward()
            opt.step()
        return [step.early_bytes for step in opt.report()]
    finally:
        os.sched_getaffinity = allowed


@pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE)
@pytest.mark.parametrize("cores", [4, 3])
def test_groups_stay_until_the_end_of_backward_where_no_core_is_idle(pair, cores):
    """Two ranks with a thread each need four cores: two that compute and two that sum. All ranks follow the one with fewest."""
    for sent in pair.run(bytes_sent_during_backward, cores):
        assert sent[0] == 0, "the first backward is only watched"
        assert all(sent[1:]) == (cores == 4), sent


# ---- torch.compile ----------------------------------------------------------------------------------------------------------


def compiled(comm):
    own = copy.deepcopy(SMALL)
    fast = torch.compile(own, backend="aot_eager")
    opt, history = create_multi_node_optimizer(sgd(own), comm, **OPTIONS["many groups"]), []
    for t in range(3):
        opt.zero_grad()
        loss_of(fast, comm, t).backward()
        opt.step()
        history.append(flat(own))
    return history


@only_long
def test_torch_compile(pair):
    a, b = pair.run(compiled, deadline=60)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    close(a, alone(plain_step, steps=3))
