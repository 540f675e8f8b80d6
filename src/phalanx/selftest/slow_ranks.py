"""Find slow ranks by work that each does alone, because a collective takes the same time on all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.selftest.result import Result, failed, passed
from phalanx.selftest.runner import Trial, wait_for

SLOW = 2  # times the median rank
GAP = 0.001  # seconds; the least difference that is not chance
TIMES = 3  # how often a rank must be slow


def look_for_slow_ranks(trial: Trial) -> Result:
    """Check for slow ranks. A rank must be slow every time, because other work may slow it down once."""
    seen = set()
    for _ in range(TIMES):
        every = trial.comm.allgather_obj({"a matrix product": _compute(trial), "the start of an all-reduce": _start(trial)})
        slow, figures = find_slow(every)
        seen.add(slow)
        if slow is None or len(seen) > 1:
            return passed("no rank takes twice as long as the median rank every time", **figures)
    ((rank, what),) = filter(None, seen)
    own, usual = figures[what]["slowest_s"], figures[what]["median_s"]
    return failed(
        f"slow rank {rank}: {what} takes {own * 1e3:.1f} ms there, {usual * 1e3:.2f} ms on the median rank",
        f"look at what else runs on the host of rank {rank}, its clock rate and its temperature",
        **figures,
    )


def find_slow(every: Sequence[Mapping[str, float]]) -> tuple[tuple[int, str] | None, dict[str, Any]]:
    """The slowest rank and what is slow there, if it takes SLOW times as long as the median rank; and the figures."""
    found, figures = None, {}
    for what in every[0]:
        times = [own[what] for own in every]
        usual, worst = statistics.median_low(times), max(range(len(times)), key=times.__getitem__)
        figures[what] = {"median_s": usual, "slowest_s": times[worst], "slowest_rank": worst}
        if times[worst] > SLOW * usual and times[worst] - usual > GAP:
            found = worst, what
    return found, figures


def _compute(trial: Trial) -> float:
    """Seconds of a matrix product, the fastest of a few, because other processes disturb only some of them."""
    width = 4096 if trial.device.type == "cuda" else 384
    x = torch.ones(width, width, device=trial.device)
    times = []
    for _ in range(12):
        wait_for(trial.device)
        begun = time.perf_counter()
        x @ x
        wait_for(trial.device)
        times.append(time.perf_counter() - begun)
    return min(times)


def _start(trial: Trial) -> float:
    """Seconds until `all_reduce_async` returns: the first quartile."""
    x = torch.zeros(1000, device=trial.device)
    times = []
    for _ in range(12):
        trial.comm.barrier()
        begun = time.perf_counter()
        pending = trial.comm.all_reduce_async(x)
        times.append(time.perf_counter() - begun)
        pending.wait()
    return statistics.quantiles(times, n=4)[0]
