"""Local steps in processes: what threads compute, processes compute, in worlds of all sizes."""

import copy

import pytest
import torch
from tests.long import often
from tests.optim.oracle import SMALL, flat, plain_step, sgd

import phalanx
from phalanx import DiLoCo, LocalSGD, create_multi_node_optimizer

SYNCS = [LocalSGD(every=3), DiLoCo(every=4, fragments=2, overlap=True), DiLoCo(every=2, partners="random", overlap=1)]


def train_all(comm):
    outcomes = []
    for sync in SYNCS:
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=sync)
        for t in range(8):
            plain_step(own, opt, comm, t)
        before = flat(own)
        opt.average_()
        outcomes.append((before, flat(own), opt.spread()))
    return outcomes


@pytest.mark.parametrize("n", [3, *often(2, 4, 5, 8)])
def test_processes_do_what_threads_do(pools, n):
    threads, processes = phalanx.run_local(n, train_all, timeout=60), pools.of(n).run(train_all)
    for thread, process in zip(threads, processes, strict=True):
        for (a, mean, apart), (b, other_mean, other_apart) in zip(thread, process, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(mean, other_mean, rtol=1e-10, atol=1e-12)
            assert max(apart, other_apart) < 1e-12
