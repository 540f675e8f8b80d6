"""Measures in the first steps how large a group should be, and whether to send groups during backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.cores import has_idle_core
from phalanx.grad.allreduce import AllReduce

LATENCY_SHARE = 0.05  # of a group's time that its latency may take, when a measurement decides its size
SMALL = 20 << 20  # bytes of all gradients: 5 M parameters
SMALLEST, LARGEST = 1 << 20, 32 << 20  # bytes of a group whose size was measured
ENCODED, LARGEST_ENCODED = 4, 64 << 20  # times as many bytes in a group whose wire encodes them, and the most
# multiplies the latency that gloo has on idle cores, if cores compute: every hop waits for its turn (6 MB groups in a lab of
# 4 x 2 ranks at 1 Gbit/s: a step of 2.37 s, groups of 25 MB: 2.04)
BUSY = 8
TRIALS = 3  # steps with overlap, and then without, before the faster way is kept


@dataclass(slots=True)
class Overlap:
    """Whether groups are sent during backward: `told` by an option, or found by trying both."""

    told: bool | None
    times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    now: bool = True
    last_end: float | None = None  # of the previous exchange

    def __post_init__(self) -> None:
        self.now = True if self.told is None else self.told

    def exchange_ended(self, now: float, comm: Communicator) -> None:
        """Note the end of an exchange. Until the choice is made, the time from one end to the next is a trial."""
        if self.told is None:
            if self.last_end is not None:
                self._tried(now - self.last_end, comm)
            elif comm.shares_memory and _is_without_idle_cores(comm):
                self.told = self.now = False
        self.last_end = time.perf_counter()

    def _tried(self, seconds: float, comm: Communicator) -> None:
        """Record the time of a step. After enough trials, all ranks choose the way that is faster for the slowest rank."""
        self.times[self.now].append(seconds)
        if len(self.times[self.now]) <= TRIALS:  # one more than TRIALS, because the first after a switch does not count
            return
        if self.now:
            self.now = False
            return
        medians = torch.tensor([median(self.times[way][1:]) for way in (True, False)], dtype=torch.float64)
        comm.all_reduce(medians, op="max")
        self.told = self.now = bool(medians[0] < medians[1])


def _is_without_idle_cores(comm: Communicator) -> bool:
    """Whether backward keeps every core of a rank busy, on any rank. All ranks call it.

    Then the thread that sums takes its time from backward, and both ranks of a sum rarely run at once. A ResNet-50 step of two
    ranks on two cores took 234 ms with overlap and 219 without. Trials get this wrong on a noisy machine.
    """
    busy = torch.tensor([not has_idle_core(comm.size)], dtype=torch.int64)
    return bool(comm.all_reduce(busy, op="max"))


def overlap_of(sync: AllReduce, params: Sequence[torch.Tensor], comm: Communicator) -> bool | None:
    """Return whether to overlap, or None if that has to be measured. On a GPU it always pays: the host only queues the groups.

    It could not be measured there either, because the host's clock does not see what the device does. Ranks that share memory sum
    a few MB in the time it takes to wake a thread, so there it never pays.
    """
    if sync.overlap is None and any(p.is_cuda for p in params):
        return True
    return False if sync.overlap is None and comm.shares_memory and is_small(params) else sync.overlap


def is_small(params: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients together still fit in a cache when backward ends."""
    return all(p.is_cpu for p in params) and sum(p.nbytes for p in params) <= SMALL


def encoded_bucket(measured: int, nbytes: int) -> int:
    """Return the size of a group whose gradients are sent as a quarter of their bytes or less, of `nbytes` in all.

    It has about as many bytes on the wire as a group of the measured size. There are two groups at least, so that one is sent
    during backward. (`Int8` on ResNet-50, a lab of 4 x 2 ranks at 1 Gbit/s: 6 groups 1,104 ms, 2 groups 849, one 942.)
    """
    return max(measured, min(ENCODED * measured, LARGEST_ENCODED, -(-nbytes // 2)))


def measure_bucket(comm: Communicator, device: torch.device) -> int:
    """Return the size at which latency is a small share of a group's time. Medians, because one noisy sample would mislead."""
    if comm.size == 1:
        return LARGEST
    times = []
    for count in (SMALLEST // 4, 4 * SMALLEST // 4):
        x = comm.buffer(count, torch.float32, device).zero_()
        samples = []
        for _ in range(4):
            begun = time.perf_counter()
            comm.all_reduce(x)
            if x.is_cuda:
                torch.cuda.synchronize(device)
            samples.append(time.perf_counter() - begun)
        times.append(median(samples[1:]))
    per_byte = max((times[1] - times[0]) / (3 * SMALLEST), 1e-12)
    latency = max(times[0] - per_byte * SMALLEST, 0.0) * (BUSY if device.type == "cpu" and comm.inter_size > 1 else 1)
    return int(min(LARGEST, max(SMALLEST, latency / per_byte / LATENCY_SHARE)))
