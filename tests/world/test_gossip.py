"""Gossip in processes: the same properties as among threads, over gloo; a rank that is killed, one that is late, and digits."""

import copy
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from tests.long import often, only_long
from tests.optim.oracle import SMALL, flat, plain_step, sgd

import phalanx
from phalanx import Gossip, create_multi_node_optimizer
from phalanx.data.sources.digits import load as load_digits
from phalanx.schedule import gossip_period

PATIENT = 15.0  # seconds: on a busy machine no exchange is given up
EXACT = {"topology": "exact"}


@pytest.fixture(params=[2, 3, 8, *often(4, 5)], ids=lambda n: f"{n}-ranks")
def world(request, pools):
    return pools.of(request.param)


def exchange_only(comm, overlap):
    """Exchanges of whole numbers by an optimizer that does nothing: mean and distance from it after each."""
    start = torch.arange(1000.0, dtype=torch.float64) % 64 * (comm.rank + 1)
    mean = comm.all_reduce(start.clone(), op="mean")
    p = torch.nn.Parameter(torch.zeros_like(start))
    opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=0.0), comm, sync=Gossip(overlap=overlap, patience=PATIENT))
    p.grad = torch.zeros_like(p)
    opt.synchronize()  # replicas are compared here
    p.data.copy_(start)
    distances = []
    for _ in range(2 * gossip_period(comm.size)):
        p.grad = torch.zeros_like(p)
        opt.step()
        now = comm.all_reduce(p.detach().clone(), op="mean")
        torch.testing.assert_close(now, mean, rtol=1e-12, atol=0)
        distances.append(float(comm.all_reduce(((p.detach() - mean) ** 2).sum())))
    measured = opt.spread()
    opt.average_()
    assert opt.spread() == 0.0
    return distances, measured, p.detach()


@pytest.mark.parametrize("overlap", [True, *often(False)])
def test_the_mean_stays_the_spread_contracts_and_average_ends_it(world, overlap):
    results = world.run(exchange_only, overlap)
    assert all(torch.equal(p, results[0][2]) for _, _, p in results)
    distances, measured, _ = results[0]
    rounds = gossip_period(world.size)
    # with overlap what was exchanged in a step is applied in the next
    exact = distances[rounds:] if overlap else distances[rounds - 1 :]
    if world.size & (world.size - 1) == 0:
        assert exact == [0.0] * len(exact)
        assert measured == 0.0
    else:
        assert distances[-1] < 0.2 * distances[0]


def train_two(comm):
    """Two optimizers on one communicator, all kinds of options; what rank 0 and 1 have in the end."""
    outcomes = []
    for options in ({}, {"exchange": "gradients"}, {"average_every": 2}, {"topology": "dissemination", "rotate": False}, EXACT):
        own, other = copy.deepcopy(SMALL), copy.deepcopy(SMALL)
        first = create_multi_node_optimizer(sgd(own), comm, sync=Gossip(patience=PATIENT, **options))
        second = create_multi_node_optimizer(sgd(other), comm, sync=Gossip(patience=PATIENT, overlap=False), wire=torch.bfloat16)
        for t in range(6):
            plain_step(own, first, comm, t)
            plain_step(other, second, comm, 7 - t)
        first.average_()
        second.average_()
        outcomes.append((flat(own), flat(other)))
    return outcomes


@only_long
def test_two_optimizers_do_not_mix_their_messages(pools):
    threads = phalanx.run_local(3, train_two, timeout=30)
    for thread, process in zip(threads, pools.of(3).run(train_two), strict=True):
        for (a, b), (c, d) in zip(thread, process, strict=True):
            torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(b, d, rtol=1e-6, atol=1e-8)


# ---- accuracy ------------------------------------------------------------------------------------------------------------------


def learn_digits(comm, how, epochs):
    """Accuracy of this rank's replica on the test images; each rank sees a quarter of the training images."""
    phalanx.seed_everything(1)
    (x, y), (test_x, test_y) = digits()
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    if how != "none":
        sync = {"gossip": Gossip(patience=PATIENT), "all-reduce": phalanx.AllReduce()}[how]
        opt = create_multi_node_optimizer(opt, comm, sync=sync)
    mine = (y % 5).argsort(stable=True).tensor_split(comm.size)[comm.rank]  # classes unevenly: alone nobody can learn all
    order = torch.Generator().manual_seed(comm.rank)
    for _ in range(epochs):
        for batch in mine[torch.randperm(len(mine), generator=order)][: len(mine) // 32 * 32].split(32):
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            opt.step()
    before = float((net(test_x).argmax(1) == test_y).float().mean())
    if how == "gossip":
        opt.average_()
    return before, float((net(test_x).argmax(1) == test_y).float().mean())


def digits():
    return [(own.x.float().view(len(own.x), -1) / 16, own.y) for own in map(load_digits, ("train", "test"))]


@only_long
def test_gossip_learns_as_all_reduce_does_and_without_it_nobody_can(pools):
    found = {how: pools.of(4).run(learn_digits, how, 12) for how in ("gossip", "all-reduce", "none")}
    accuracy = {how: sum(after for _, after in ranks) / len(ranks) for how, ranks in found.items()}
    assert accuracy["all-reduce"] > 0.93
    assert accuracy["gossip"] > accuracy["all-reduce"] - 0.02
    assert accuracy["none"] < accuracy["gossip"] - 0.2


# ---- a rank that dies, or is late ----------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time, torch, phalanx
torch.set_num_threads(1)
what, victim, steps = sys.argv[1], int(sys.argv[2]), 60
comm = phalanx.create_communicator(timeout=20)
phalanx.seed_everything(1)
net = torch.nn.Linear(200, 100)
opt = phalanx.create_multi_node_optimizer(
    torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), comm,
    sync=phalanx.Gossip(topology=sys.argv[3], patience=0.5))
draw, gaps = torch.Generator().manual_seed(comm.rank), []
comm.barrier()
last = time.monotonic()
for t in range(steps):
    x = torch.randn(8, 200, generator=draw)
    opt.zero_grad()
    (net(x) - x[:, :100]).pow(2).mean().backward()
    if comm.rank == victim and t == 20:
        os.kill(os.getpid(), signal.SIGKILL) if what == "dies" else time.sleep(4)
    opt.step()
    gaps.append(time.monotonic() - last)
    last = time.monotonic()
    time.sleep(0.02)
missing = opt.missing
opt.average_()
others = opt.survivors()
equal = len(set(others.allgather_obj(net.weight.detach().double().sum().item())))
print(f"missing {missing}, then {opt.missing}; {others.size} left, {equal} version(s); worst {max(gaps):.3f}")
comm.close()
"""


def start(n, *args):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
    command = [sys.executable, "-c", PROGRAM, *map(str, args)]
    return [
        subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(n)
    ]


def finish(ranks, deadline=150.0):
    end = time.monotonic() + deadline
    try:
        return [rank.communicate(timeout=max(0.1, end - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("topology", ["dissemination", "exact"])
def test_survivors_of_a_killed_rank_go_on_and_name_it(topology):
    victim = 0  # the one that holds the job's store: who can do without it can do without any
    ranks = start(3, "dies", victim, topology)
    told = finish(ranks)
    for r, (out, err) in enumerate(told):
        if r == victim:
            assert ranks[r].returncode == -signal.SIGKILL
            continue
        assert ranks[r].returncode == 0, err
        assert f"missing ({victim},), then ({victim},); 2 left, 1 version(s)" in out, out + err
        assert f"rank {victim} cannot be reached any more" in err
        assert float(out.split()[-1]) < 10, out  # half of the timeout


@pytest.mark.usefixtures("warm_python")
@only_long
def test_a_late_rank_is_waited_for_a_while_and_finds_the_others_again():
    ranks = start(3, "sleeps", 1, "dissemination")
    for r, (out, err) in enumerate(finish(ranks)):
        assert ranks[r].returncode == 0, err
        assert "missing (), then (); 3 left, 1 version(s)" in out, out + err
        if r != 1:
            assert float(out.split()[-1]) < 3.5, out  # they do not sleep along
