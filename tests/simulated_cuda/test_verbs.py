"""Every verb of a communicator on simulated GPUs, on one host and on two: the answers of the CPU, for every seed."""

import functools

import pytest
from tests.simulated_cuda.launch import launch
from tests.simulated_cuda.seeds import seeds
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.verbs import VERBS, numbers, play

import phalanx

SHAPES = {"2 on 1 host": (2, 1), "3 on 1 host": (3, 1), "4 on 2 hosts": (4, 2)}


@functools.cache
def on_cpu(name, shape):
    world, hosts = SHAPES[shape]
    return phalanx.run_local(world, lambda comm: play(comm, VERBS[name], "cpu"), hosts=hosts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", VERBS)
def test_verbs_answer_as_on_the_cpu(name, shape):
    world, hosts = SHAPES[shape]
    for seed in seeds(1):
        with simulated(hosts=hosts, gpus_per_host=world // hosts, seed=seed):
            found = launch(world, lambda comm: play(comm, VERBS[name], "cuda"))
        assert [values for values, _ in found] == [values for values, _ in on_cpu(name, shape)], f"seed {seed}"
        assert [contexts for _, contexts in found] == [[rank % (world // hosts)] for rank in range(world)]


@pytest.mark.parametrize(
    "algorithm",
    [phalanx.ring(4), phalanx.torus(2, 2), phalanx.halving_doubling(4), phalanx.hierarchical(2, 2), phalanx.tree(4)],
    ids=lambda a: a.name,
)
def test_schedules_sum_on_two_hosts(algorithm):
    def run(comm):
        return [comm.all_reduce(numbers(comm, "cuda", n)).tolist() for n in (1, 8, 17, 4000)]

    want = [[4 * 3 * i + 6.0 for i in range(n)] for n in (1, 8, 17, 4000)]
    for seed in seeds(1):
        with simulated(hosts=2, gpus_per_host=2, seed=seed):
            assert launch(4, run, algorithm=algorithm) == [want] * 4, f"seed {seed}"
