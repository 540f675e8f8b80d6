"""Short programs on simulated GPUs that are right for every seed: what a mistake in the product must break.

Each is a function of a seed, and raises if anything is wrong: a value, an order, a context on another rank's GPU, a wait.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
from tests.simulated_cuda import training, verbs
from tests.simulated_cuda.launch import launch
from tests.simulated_cuda.simulated import simulated

import phalanx
from phalanx.comm.streams import Writers


def trains(name: str, seed: int) -> None:
    """As on the CPU, without a wait of the host and without a warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found, made = training.on_gpus(2, training.MODES[name], seed)
    assert [str(warning.message) for warning in warned] == []
    assert training.differences(found, _cpu_training(name)) == []
    assert [sync for one in found for sync in one.waits if sync.what not in training.MODES[name].waits] == []
    assert [own.contexts for own in made.processes[1:]] == [{0}, {1}]


@functools.cache
def _cpu_training(name: str) -> Any:
    return training.on_cpu(2, training.MODES[name])


def answers(name: str, seed: int) -> None:
    """The verbs answer as on the CPU."""
    with simulated(seed=seed):
        found = launch(2, lambda comm: verbs.play(comm, verbs.VERBS[name], "cuda"))
    assert [values for values, _ in found] == [values for values, _ in _cpu_verbs(name)]
    assert [contexts for _, contexts in found] == [[0], [1]]


@functools.cache
def _cpu_verbs(name: str) -> Any:
    return phalanx.run_local(2, lambda comm: verbs.play(comm, verbs.VERBS[name], "cpu"))


def drops_tensors(seed: int) -> None:
    """Tensors die while their communication is queued, and memory is wanted for others."""

    def run(comm: Any) -> list[Any]:
        pending, seen = [], []
        for i in range(4):
            pending.append(comm.all_reduce_async(torch.full((64,), float(i), device="cuda")))
            torch.full((64,), -1.0, device="cuda")
            comm.all_reduce_async(torch.full((64,), 5.0, device="cuda"))  # and nobody waits for it
            torch.full((64,), -1.0, device="cuda")
            parts = comm.allgather(torch.full((64,), float(i), device="cuda"))
            seen.append(parts[0] + parts[1])
            del parts
        return [x.wait().sum().item() for x in pending] + [x.sum().item() for x in seen]

    with simulated(seed=seed):
        assert launch(2, run) == [[128.0 * i for i in range(4)] * 2] * 2


def settles(seed: int) -> None:
    """An exchange that may fail, and does not."""

    def run(comm: Any) -> list[float]:
        out = torch.zeros(64, device="cuda")
        mine = torch.full((64,), 1.0 + comm.rank, device="cuda")
        assert comm.exchange_async(mine, 1 - comm.rank, out, 1 - comm.rank, 3, may_fail=True).settle(10.0) is None
        return (out * 2).tolist()[:1]

    with simulated(seed=seed):
        assert launch(2, run) == [[4.0], [2.0]]


def writes_on_streams(seed: int) -> None:
    """The parts of a group are written on several streams."""

    def run(comm: Any) -> float:
        flat, group, writers = torch.zeros(3, 64, device="cuda"), object(), Writers()
        for part in flat:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                part.add_(1.0)
                writers.note(part, group)
        writers.wait(group)
        return float(comm.all_reduce(flat).sum())

    with simulated(seed=seed):
        assert launch(2, run) == [384.0] * 2


def _small_run(comm: Any, steps: int, spoil: Any, **options: Any) -> None:
    model = copy.deepcopy(training.MODEL).to("cuda")
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    opt = phalanx.create_multi_node_optimizer(sgd, comm, **options)
    for step in range(steps):
        if step == 4:
            torch.cuda.synchronize()
        opt.zero_grad()
        (model(torch.full((2, 6), 1.0 + comm.rank, device="cuda")).square().mean() * spoil(step)).backward()
        opt.step()


def warns_of_nan(seed: int) -> None:
    """A NaN on one rank is reported a few steps later, with the rank; and where there is none, nothing is."""
    assert _warnings(seed, spoiled=1.0) == []
    told = _warnings(seed, spoiled=float("nan"))
    assert told
    assert all("rank 1" in words for words in told)


def _warnings(seed: int, spoiled: float) -> list[str]:
    def run(comm: Any) -> None:
        _small_run(comm, 8, lambda step: spoiled if (comm.rank, step) == (1, 1) else 1.0)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with simulated(seed=seed):
            launch(2, run)
    return [str(warning.message) for warning in found if "not finite" in str(warning.message)]


def compares_replicas(seed: int) -> None:
    """Replicas that stay equal pass every comparison."""
    with simulated(seed=seed):
        launch(2, lambda comm: _small_run(comm, 5, lambda step: 1.0, sync=phalanx.AllReduce(check_every=1)))


SCENARIOS = {
    "drops tensors": drops_tensors,
    "settles": settles,
    "messages": functools.partial(answers, "messages"),
    "writes on streams": writes_on_streams,
    "compares replicas": compares_replicas,
    "overlap": functools.partial(trains, "overlap"),
    "side stream": functools.partial(trains, "side stream"),
    "double buffering": functools.partial(trains, "double buffering"),
    "gossip": functools.partial(trains, "gossip of weights, overlapped"),
    "reductions": functools.partial(answers, "reductions"),
    "objects": functools.partial(answers, "objects"),
    "warns of NaN": warns_of_nan,
    "float16 wire": functools.partial(trains, "float16 wire"),
}
