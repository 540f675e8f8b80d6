"""The part of the selftest that is for GPUs, on the simulated CUDA: it passes, and it notices when an order is missing.

The simulated clock hardly moves, so checks get no time here: they do the least that they can.
"""

import contextlib

import pytest
import torch
from tests.simulated_cuda.launch import launch
from tests.simulated_cuda.simulated import simulated

from phalanx.comm.streams import StreamOrder
from phalanx.selftest import correctness, ordering, reference, training
from phalanx.selftest.result import Status, together
from phalanx.selftest.runner import Trial

VERBS = ("all_reduce_async", "bcast", "alltoall", "split")  # tests/simulated_cuda has all of them
SEEDS = 20  # a missing order must show within so many


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """The simulation has no DDP."""
    monkeypatch.setattr(reference, "already_initialized", lambda: False)


def run(checks, world, hosts=1, seed=0):
    """The results of all ranks together, by the names of the checks."""

    def play(comm):
        device = torch.device("cuda", torch.cuda.current_device())
        return {check.name: check.run(Trial(comm, device, 0.0, 0.0)) for check in checks}

    with simulated(hosts=hosts, gpus_per_host=world // hosts, seed=seed):
        found = launch(world, play)
    return {name: together([own[name] for own in found]) for name in found[0]}


@pytest.mark.parametrize(("group", "world", "hosts", "seed"), [(correctness, 4, 2, 0), (ordering, 3, 1, 1)])
def test_all_is_well(group, world, hosts, seed):
    checks = [check for check in group.checks() if group is ordering or check.name in VERBS]
    found = run(checks, world, hosts, seed)
    assert {name: result for name, result in found.items() if result.status is not Status.PASS} == {}


@pytest.mark.parametrize("mode", ["float32", "GradScaler", "gossip"])
def test_training(mode):
    (check,) = (check for check in training.checks() if check.name == mode)
    assert run([check], 2)[mode].status is Status.PASS


# ---- what must be noticed ------------------------------------------------------------------------------------------------------


def without_waiting_before(order):
    """The communication stream does not wait for the caller's."""
    if order.device is not None:
        order._context = torch.cuda.stream(order._stream)
        order._context.__enter__()


def without_waiting_after(order, result=None):
    """The caller's stream does not wait for the communication."""


@pytest.mark.parametrize(
    ("name", "fault", "line"),
    [
        ("__enter__", without_waiting_before, "inputs written late"),
        ("join", without_waiting_after, "inputs written late"),
        ("join", without_waiting_after, "several under way"),
    ],
)
def test_missing_order(monkeypatch, name, fault, line):
    """The values are wrong with some seed, whatever else the simulation itself complains about."""
    (check,) = (check for check in ordering.checks() if check.name == line)
    seen = []
    watched = type(check)(check.group, check.name, lambda trial: seen.append(check.run(trial)) or seen[-1])
    monkeypatch.setattr(StreamOrder, name, fault)
    for seed in range(SEEDS):
        with contextlib.suppress(Exception):
            run([watched], 2, seed=seed)
        if any(result.status is Status.FAIL for result in seen):
            assert "differ from the synchronous run" in next(own for own in seen if own.status is Status.FAIL).reason
            return
    pytest.fail(f"{len(seen)} results, all of them passed")
