"""Measure speed: all-reduces of three sizes as in nccl-tests, a training step beside DDP, and slow ranks.

These checks fail only for absurd values. The numbers are in the file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.library import library_all_reduce
from phalanx.comm.communicator import Communicator
from phalanx.comm.create import create_communicator
from phalanx.comm.hosts import Hosts
from phalanx.comm.transports.torch import already_initialized
from phalanx.optim.create import create_multi_node_optimizer
from phalanx.schedule import Schedule, relabel, ring, torus
from phalanx.selftest.result import Check, Result, failed, passed, skipped
from phalanx.selftest.runner import Trial, wait_for
from phalanx.selftest.slow_ranks import look_for_slow_ranks

MEGABYTES = {1: 0.1, 25: 0.5, 100: 2.0}  # size -> least seconds to measure it
BLOCK = 0.005  # seconds of one timed block: a single short call cannot be timed
ROUNDS = 15  # at most
ABSURD = 5  # times DDP's step
WARM, TRYING = 3, 12  # warm-up steps: DDP rebuilds its buckets; Phalanx tries overlap on and off
BETTER = 1.15  # speed-up over the automatic choice that is worth a recommendation
EXPOSED = 0.25  # fraction of a step; more is worth a recommendation

Call = Callable[[torch.Tensor], object]


def checks() -> list[Check]:
    """The checks; the last one reads what the others found."""
    found: dict[str, Any] = {}
    contenders = Contenders()
    sizes = [
        Check("speed", f"all-reduce of {size} MB", partial(_all_reduce, size, contenders, found), needs=needs)
        for size, needs in MEGABYTES.items()
    ]
    return [
        Check("speed", "slow ranks", look_for_slow_ranks),
        *sizes,
        Check("speed", "training step", partial(_step, found), needs=0.5),
        Check("speed", "recommendation", partial(_recommend, contenders, found), needs=None),
    ]


# ---- all-reduce --------------------------------------------------------------------------------------------------------------


def _all_reduce(megabytes: int, contenders: Contenders, found: dict[str, Any], trial: Trial) -> Result:
    comm, size = trial.comm, megabytes * 1_000_000
    if comm.size == 1:
        return skipped("one rank has nothing to add up")
    x = comm.buffer(size // 4, torch.float32, trial.device).zero_()
    calls = contenders.calls(comm, trial.device)
    seconds = _time(trial, {name: partial(call, x) for name, call in calls.items()})
    rows = {
        name: {"time_us": own * 1e6, "algbw": size / own / 1e9, "busbw": size / own / 1e9 * 2 * (comm.size - 1) / comm.size}
        for name, own in seconds.items()
    }
    found[f"{megabytes} MB"] = rows
    found["automatic"] = contenders.automatic
    words = ", ".join(f"{name} {row['busbw']:.2f}" for name, row in rows.items())
    return passed(f"busbw in GB/s: {words}", **rows)


class Contenders:
    """The automatic choice, one call of all ranks, the torus of these hosts if they have one, and torch's own all-reduce."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self.automatic = ""  # the contender that equals the automatic choice
        self._opened = ExitStack()

    def calls(self, comm: Communicator, device: torch.device) -> dict[str, Call]:
        """Create the contenders at the first call. Collective."""
        if not self._calls:
            self._calls["automatic"] = comm.all_reduce
            chosen = {"one call": ring(comm.size), "torus": _torus_of(comm)}
            for name, schedule in chosen.items():
                if schedule is None:
                    continue
                if schedule == comm.schedule and not comm.shares_memory:
                    self.automatic = name
                if device.type == "cuda":  # a communicator prepares the NCCL groups of its schedule
                    self._calls[name] = self._opened.enter_context(create_communicator(schedule)).all_reduce
                else:
                    self._calls[name] = partial(comm.run, schedule)
            if already_initialized():
                self._calls["torch"] = library_all_reduce
        return self._calls

    def close(self) -> None:
        """Close the communicators. All ranks call it."""
        self._opened.close()


def _torus_of(comm: Communicator) -> Schedule | None:
    hosts = Hosts.of([str(host) for host in comm.allgather_obj(comm.inter_rank)])
    if hosts.grid is None or min(hosts.grid) == 1:
        return None
    return relabel(torus(*hosts.grid), [rank for ranks in hosts.ranks for rank in ranks])


def _time(trial: Trial, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of one call of each contender on the slowest rank: the median over interleaved rounds."""
    comm = trial.comm
    first = {name: _seconds(trial, call, 1) for name, call in calls.items()}  # the first call sets up connections
    again = comm.allgather_obj([_seconds(trial, call, 1) for call in calls.values()])
    slowest = {name: max(own[i] for own in again) for i, name in enumerate(first)}
    counts = {name: max(1, min(50, int(BLOCK / seconds))) for name, seconds in slowest.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        if number >= 2 and not trial.has_time():
            break
        for name, call in calls.items():
            samples[name].append(_seconds(trial, call, counts[name]))
    everywhere = comm.allgather_obj([samples[name] for name in calls])
    return {
        name: statistics.median(max(own[i][k] for own in everywhere) for k in range(len(samples[name])))
        for i, name in enumerate(calls)
    }


def _seconds(trial: Trial, call: Callable[[], object], count: int) -> float:
    """Seconds of one call on this rank. All ranks start together."""
    trial.comm.barrier()
    wait_for(trial.device)
    begun = time.perf_counter()
    for _ in range(count):
        call()
    wait_for(trial.device)
    return (time.perf_counter() - begun) / count


# ---- a training step -----------------------------------------------------------------------------------------------------------


def _step(found: dict[str, Any], trial: Trial) -> Result:
    """Compare a step without communication, with Phalanx and with DDP."""
    if trial.comm.size == 1:
        return skipped("one rank has nothing to communicate")
    steps = _steps(trial)
    for name, step in steps.items():
        for _ in range(TRYING if name == "phalanx" else WARM):
            step()
    seconds = _time(trial, steps)
    found["step"] = seconds
    exposed = {name: max(0.0, own - seconds["alone"]) for name, own in seconds.items() if name != "alone"}
    words = [f"alone {seconds['alone'] * 1e3:.1f} ms"]
    words += [f"{name} {seconds[name] * 1e3:.1f} ms (exposed {own * 1e3:.1f})" for name, own in exposed.items()]
    figures = {"seconds": seconds, "exposed": exposed}
    if "DDP" in seconds and seconds["phalanx"] > ABSURD * seconds["DDP"]:
        return failed(f"{', '.join(words)}: far slower than DDP", "see docs/performance.md, and report it with --json", **figures)
    return passed(", ".join(words), **figures)


def _steps(trial: Trial) -> dict[str, Callable[[], None]]:
    """One step function per contender, each with its own replica."""
    gpu = trial.device.type == "cuda"
    width, batch = (4096, 256) if gpu else (512, 32)
    chance = torch.Generator().manual_seed(trial.comm.rank)
    x = torch.randn(batch, width, generator=chance).to(trial.device)

    def replica() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(trial.device)

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()

        return step

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    alone, ours = replica(), replica()
    steps = {"alone": step_of(alone, sgd(alone)), "phalanx": step_of(ours, create_multi_node_optimizer(sgd(ours), trial.comm))}
    if already_initialized():
        ddp = DistributedDataParallel(replica(), device_ids=[trial.device.index] if gpu else None)
        steps["DDP"] = step_of(ddp, sgd(ddp))
    return steps


# ---- what to do ----------------------------------------------------------------------------------------------------------------


def _recommend(contenders: Contenders, found: dict[str, Any], trial: Trial) -> Result:
    contenders.close()
    advice = recommend(found)
    if advice is None:
        return skipped("nothing was measured")
    return passed(advice)


def recommend(found: Mapping[str, Any]) -> str | None:
    """Recommend options from these figures; None if there are none."""
    sizes = [size for size in (f"{megabytes} MB" for megabytes in MEGABYTES) if size in found]
    if not sizes and "step" not in found:
        return None
    words = []
    if sizes:  # the largest: gradients are sent in groups of many MB
        size, rows = sizes[-1], {name: row["busbw"] for name, row in found[sizes[-1]].items()}
        rows.pop(found.get("automatic", ""), None)  # the same schedule: any difference is chance
        best = max(rows, key=rows.__getitem__)
        if rows[best] > BETTER * rows["automatic"]:
            words.append(
                f"{best} is {rows[best] / rows['automatic']:.1f} times as fast as the automatic choice at {size}: {HOW[best]}"
            )
    if "step" in found:
        whole = found["step"]["phalanx"]
        exposed = max(0.0, whole - found["step"]["alone"]) / whole
        if exposed > EXPOSED:
            words.append(
                f"{exposed:.0%} of a small step is communication: larger batches, wire=torch.bfloat16 or Gossip() hide it"
            )
    return "; ".join(words) or "keep the defaults"


HOW = {
    "one call": "pass phalanx.ring(size) to create_communicator",
    "torus": "pass phalanx.torus(hosts, ranks per host) to create_communicator",
    "torch": "that should not be, report it with the file that --json writes",
}
