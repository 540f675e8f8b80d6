"""A rank dies, or its kernel hangs: the other ranks raise an error that names it, in time, and their GPUs are free again."""

import pytest
import torch
from tests.simulated_cuda.launch import die, hang, launch, run_ranks
from tests.simulated_cuda.seeds import seeds
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process

import phalanx
from phalanx import CommunicationError

TIMEOUT = 20.0  # seconds on the simulated clock, which costs nothing


def survive(comm, disturb, steps=6):
    """Train until the error comes; returns it, and when it came."""
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()  # NCCL is warm
    clock = process().simulation.conductor
    begun = clock.now
    try:
        for step in range(steps):
            if step == 2 and comm.rank == comm.size - 1:
                disturb()
                begun = clock.now
            comm.all_reduce(x, label=f"step {step}")
            x.mul_(0.5)
            if step >= 2:
                torch.cuda.synchronize()  # a loss that is printed, say
    except CommunicationError as error:
        torch.cuda.synchronize()  # returns: the kernels that waited for the dead rank were aborted
        return error, clock.now - begun
    return None, 0.0


@pytest.mark.parametrize("seed", seeds(2))
def test_a_killed_rank_is_named_in_time(seed):
    with simulated(gpus_per_host=3, seed=seed):
        found = launch(3, lambda comm: survive(comm, die), timeout=TIMEOUT)
    assert found[2] is None
    for error, seconds in found[:2]:
        assert error.missing == (2,) or error.missing == [2], error
        assert seconds < TIMEOUT + 5


@pytest.mark.parametrize("seed", seeds(2))
def test_a_kernel_that_hangs_is_found(seed):
    with simulated(gpus_per_host=2, seed=seed):
        found = launch(2, lambda comm: survive(comm, lambda: hang("all_reduce")), timeout=TIMEOUT)
    for error, seconds in found:
        assert isinstance(error, CommunicationError)
        assert "all_reduce" in str(error)
        assert seconds < 2 * TIMEOUT + 10


def test_a_kernel_that_hangs_in_the_warm_up_is_found():
    def run(rank):
        if rank == 1:
            hang("all_reduce #1 ")
        with phalanx.create_communicator(timeout=TIMEOUT) as comm:
            x = comm.all_reduce(torch.ones(2, device="cuda"))
            torch.cuda.synchronize()
            return x.tolist()

    with pytest.raises(CommunicationError), simulated(gpus_per_host=2):
        run_ranks(2, run)


def test_nothing_is_raised_where_nothing_happens():
    with simulated(gpus_per_host=2):
        assert launch(2, lambda comm: survive(comm, lambda: None), timeout=TIMEOUT) == [(None, 0.0)] * 2
