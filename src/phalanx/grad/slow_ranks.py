"""Finds slow ranks of an elastic job: every rank measures itself before it waits, then all compare and follow a policy."""

from __future__ import annotations

import time
import warnings
from statistics import median
from typing import Any

import torch

from phalanx.comm.elastic.communicator import ElasticCommunicator
from phalanx.comm.elastic.guard import end_behind
from phalanx.grad.pace import EVERY, Pace, SlowRank, Suspicion, suitable_speeds


class SlowRanks:
    """Watches the steps of this rank. `policy`: "warn", "rebalance", "evict" or "ignore"."""

    def __init__(self, comm: ElasticCommunicator, policy: str) -> None:
        self._comm, self._policy = comm, policy
        self.found: list[SlowRank] = []
        self._ended: float | None = None  # when the last exchange ended
        self._waited = 0.0  # seconds that the loader had waited for input by then
        self._steps: list[Pace] = []
        self._suspicion = Suspicion()
        self._epoch = -1

    def exchanged(self, begun: float, step: int, loader: Any) -> None:
        """Note the end of the exchange of `step`, which started at `begun`. All ranks call it."""
        now = time.perf_counter()
        waited = loader.world.waited if loader is not None else 0.0
        if self._epoch != self._comm.membership.epoch:  # the ranks have changed, so earlier measurements no longer apply
            self._epoch, self._steps, self._suspicion = self._comm.membership.epoch, [], Suspicion()
        elif self._ended is not None:
            own, read = begun - self._ended, waited - self._waited
            samples = float(loader.world.samples) if loader is not None else 0.0
            self._steps.append(Pace(read, max(0.0, own - read), now - begun, samples))
        self._ended, self._waited = now, waited
        if self._policy != "ignore" and self._comm.size > 1 and step % EVERY == 0:
            self._compare(step, loader)

    def _compare(self, step: int, loader: Any) -> None:
        steps, self._steps = self._steps, []
        usual = [
            median(getattr(each, name) for each in steps) if steps else -1.0 for name in ("input", "compute", "wait", "samples")
        ]
        epoch = self._comm.membership.epoch
        table = torch.zeros(self._comm.size, len(usual), dtype=torch.float64)
        table[self._comm.rank] = torch.tensor(usual, dtype=torch.float64)
        self._comm.all_reduce(table)  # not allgather: ranks that share memory do this without their communication threads
        if self._comm.membership.epoch != epoch or bool((table[:, 0] < 0).any()):
            return  # a rank died, or is new
        paces = [Pace(*own) for own in table.tolist()]
        named = self._suspicion.window(paces)
        if named is not None:
            self._name(SlowRank(step, *named, self._action(named[0])))
        if self._policy == "rebalance" and loader is not None and (speeds := suitable_speeds(paces)) is not None:
            loader.world.rebalance(speeds)
        self._ended = time.perf_counter()  # this comparison must not make any rank look slow

    def _action(self, rank: int | None) -> str:
        """Return what to do about it. A rank is evicted only if enough others are left."""
        enough = self._comm.size - 1 >= max(2, self._comm.least)
        return "warn" if rank is None or (self._policy == "evict" and not enough) else self._policy

    def _name(self, slow: SlowRank) -> None:
        self.found.append(slow)
        if self._comm.rank == 0:
            warnings.warn(str(slow), stacklevel=2)
        if slow.action == "evict" and slow.rank == self._comm.rank:
            end_behind(self._comm.member, self._comm.membership.epoch, f"was {slow.factor:.1f} times slower than the others")
