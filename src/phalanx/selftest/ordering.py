"""Calls in flight while tensors are written late, dropped at once or awaited in another order, with random delays.

Every round runs twice: one call after the other, fully synchronised, and then with everything in flight at once. The results must
be equal bit for bit. On a GPU, the stream is kept busy around the calls, so that anything not ordered by the streams reads or
writes too early. On the CPU, ranks sleep for random, seeded times instead.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import torch

from phalanx._torch_private import keep_busy
from phalanx.selftest.result import Check, Result, failed, passed
from phalanx.selftest.runner import REPORT_IT, Trial, wait_for

ROUNDS = 20  # at most
SIZES = (1, 1000, 70_000, 300_000)  # elements in flight at once: direct, short and long paths
BUSY = 2_000_000  # cycles, about a millisecond of a GPU
NAP = 0.003  # seconds that a rank sleeps at most
GARBAGE = -12345.0

Way = Callable[["_Round"], list[torch.Tensor]]


def checks() -> list[Check]:
    """One check per way in which order can be lost."""
    return [
        Check("ordering", "inputs written late", lambda trial: _compare(trial, _late)),
        Check("ordering", "several under way", lambda trial: _compare(trial, _several)),
        Check("ordering", "tensors dropped at once", lambda trial: _compare(trial, _dropped)),
        Check("ordering", "done() means done", lambda trial: _compare(trial, _polled)),
        Check("ordering", "other verbs in between", lambda trial: _compare(trial, _mixed)),
    ]


class _Round:
    """One round of one rank: its data, and its random delays. The data do not depend on when they are made."""

    def __init__(self, trial: Trial, number: int, device: torch.device) -> None:
        self.comm, self.device, self._number = trial.comm, device, number
        self.chance = random.Random(1000 * number + trial.comm.rank)
        self.values = [self._make(i).to(device) for i in range(len(SIZES))]  # a copy to the GPU waits for its stream

    def _make(self, i: int) -> torch.Tensor:
        """Integers, so that any order of additions is exact."""
        chance = torch.Generator().manual_seed(self._number * 7919 + i * 104_729 + self.comm.rank)
        return torch.randint(-1000, 1000, (SIZES[i],), generator=chance).float()

    def delay(self) -> None:
        """Delay what follows on this rank, on its stream or in its thread."""
        if self.device.type == "cuda":
            keep_busy(int(BUSY * self.chance.random()))
        elif self.chance.random() < 0.5:
            time.sleep(NAP * self.chance.random())


def _compare(trial: Trial, way: Way) -> Result:
    """Compare `way` with the synchronous run, for as many rounds as there is time."""
    rounds = compared = 0
    wrong: list[str] = []  # collected, because the other ranks wait for this one
    for number in _rounds(trial):
        rounds += 1
        for device in trial.devices:
            one = _Round(trial, number, device)
            wanted = _one_by_one(one)
            got = way(_Round(trial, number, device))
            wait_for(one.device)
            for mine, want in zip(got, wanted, strict=True):
                compared += 1
                if not torch.equal(mine, want):
                    count = f"{int((mine != want).sum()):,} of {want.numel():,} elements"
                    wrong.append(f"{count} on {device.type} differ from the synchronous run, in round {number}")
    figures = {"rounds": rounds, "results": compared, "wrong": len(wrong)}
    if wrong:
        return failed(f"{wrong[0]} ({len(wrong)} of {compared} results are wrong)", REPORT_IT, **figures)
    rounds_ = "1 round" if rounds == 1 else f"{rounds} rounds"
    return passed(f"{compared} results in {rounds_} equal the synchronous run bit by bit", **figures)


def _rounds(trial: Trial) -> Iterator[int]:
    yield 0
    for number in range(1, ROUNDS):
        if not trial.has_time():
            return
        yield number


def _one_by_one(one: _Round) -> list[torch.Tensor]:
    """The synchronous run: one call at a time."""
    results = []
    for values in one.values:
        x = values.clone()
        wait_for(one.device)
        results.append(one.comm.all_reduce(x).clone())
        wait_for(one.device)
    return results


def _late(one: _Round) -> list[torch.Tensor]:
    """Write the tensor just before the call, read it just after, then overwrite it."""
    results = []
    for values in one.values:
        x = torch.full_like(values, GARBAGE)
        one.delay()
        x.copy_(values)
        pending = one.comm.all_reduce_async(x)
        one.delay()
        results.append(pending.wait().clone())
        x.fill_(GARBAGE)
    return results


def _several(one: _Round) -> list[torch.Tensor]:
    """Start all before waiting for the first, in a different order on every rank."""
    pendings = []
    for values in one.values:
        one.delay()
        pendings.append(one.comm.all_reduce_async(values.clone()))
    order = list(range(len(pendings)))
    one.chance.shuffle(order)
    found = {}
    for i in order:
        one.delay()
        found[i] = pendings[i].wait().clone()
    return [found[i] for i in range(len(pendings))]


def _dropped(one: _Round) -> list[torch.Tensor]:
    """Only the Pending holds a tensor, while new tensors compete for its memory."""
    pendings = []
    for values in one.values:
        one.delay()
        pendings.append(one.comm.all_reduce_async(values.clone()))
        torch.full_like(values, GARBAGE)
    results = []
    while pendings:
        results.append(pendings.pop(0).wait().clone())
        torch.full_like(results[-1], GARBAGE)
    return results


def _polled(one: _Round) -> list[torch.Tensor]:
    """Read when `done()` returns true, before `wait()`."""
    results = []
    for values in one.values:
        one.delay()
        x = values.clone()
        pending = one.comm.all_reduce_async(x)
        until = time.monotonic() + one.comm.patience
        while not pending.done() and time.monotonic() < until:
            time.sleep(0.0002)
        early = x.clone()
        results.append(early if torch.equal(pending.wait(), early) else torch.full_like(x, GARBAGE))
    return results


def _mixed(one: _Round) -> list[torch.Tensor]:
    """Mix blocking verbs with asynchronous ones, and drop their results at once."""
    comm, pendings = one.comm, []
    for i, values in enumerate(one.values):
        one.delay()
        pendings.append(comm.all_reduce_async(values.clone()))
        spare = torch.full_like(values, float(comm.rank))
        if i % 2:
            comm.allgather(spare)
        else:
            comm.bcast(spare)
        del spare
        torch.full_like(values, GARBAGE)
    return [pending.wait().clone() for pending in pendings]
