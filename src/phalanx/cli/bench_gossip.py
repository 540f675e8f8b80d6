"""`phalanx bench gossip` inside a rank: steps of training whose computation is a wait, so that only communication costs.

With computation emulated, a machine of few cores can stand for many accelerators: what remains of a step beyond the wait is what
communication could not hide. Efficiency is the wait over the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import phalanx
from phalanx.cli.bench_config import GossipBench
from phalanx.cli.bench_record import Company, Record, first_record
from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip import Gossip

WARM = 6  # steps: connections, buffers, and the measurements of the first ones
LAYERS = 8
PATIENT = 60.0  # seconds: what is compared are whole exchanges, none is given up

CONTENDERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "all-reduce": {},
    "gossip": {"sync": Gossip(patience=PATIENT)},
    "gossip coherent": {"sync": Gossip(overlap=False, patience=PATIENT)},
    "gossip gradients": {"sync": Gossip(exchange="gradients", patience=PATIENT)},
    "gossip bfloat16": {"sync": Gossip(patience=PATIENT), "wire": torch.bfloat16},
}


@dataclass(slots=True)
class Contender:
    """A replica with its optimizer, whose gradients are there when the wait is over."""

    name: str
    params: list[torch.nn.Parameter]
    opt: Any
    gradients: list[torch.Tensor]

    def step(self, compute: float) -> None:
        time.sleep(compute)
        for p, gradient in zip(self.params, self.gradients):
            p.grad = gradient
        self.opt.step()


def measure(bench: GossipBench, launcher: str) -> Iterator[Record]:
    """The records of the benchmark; all ranks yield the same."""
    torch.set_num_threads(1)
    with phalanx.create_communicator() as comm:
        company = Company()
        yield first_record(bench, comm, launcher)
        contenders = [_enter(name, options, bench.size, comm) for name, options in CONTENDERS.items()]
        times = _race(comm, contenders, bench)
        alone = statistics.median(times[0])
        for contender, own in zip(contenders, times):
            median = statistics.median(own)
            record = getattr(contender.opt, "last_record", None)
            yield {
                "contender": contender.name,
                "step_ms": median * 1e3,
                "over_none_ms": (median - alone) * 1e3,
                "efficiency": bench.compute / 1e3 / median,
                "bytes": record.bytes if record and contender.name.startswith("gossip") else None,
                "spread": contender.opt.spread() if contender.name.startswith("gossip") else None,
                "times_ms": [round(seconds * 1e3, 3) for seconds in own],
            }
        yield company.last_record(comm)


def _enter(name: str, options: dict[str, Any] | None, size: int, comm: Communicator) -> Contender:
    count = max(1, size // 4 // LAYERS)
    params = [torch.nn.Parameter(torch.ones(count)) for _ in range(LAYERS)]
    draw = torch.Generator().manual_seed(comm.rank)
    gradients = [1e-3 * torch.randn(count, generator=draw) for _ in params]
    opt: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if options is not None:
        opt = phalanx.create_multi_node_optimizer(opt, comm, **options)
    return Contender(name, params, opt, gradients)


def _race(comm: Communicator, contenders: list[Contender], bench: GossipBench) -> list[list[float]]:
    """Seconds per step of every contender, in `repeat` blocks that take turns; the slowest rank counts."""
    for contender in contenders:
        for _ in range(WARM):
            contender.step(0.0)
    mine = [[_block(comm, contender, bench) for contender in contenders] for _ in range(bench.repeat)]
    told = comm.allgather_obj(mine)
    return [[max(own[k][i] for own in told) for k in range(bench.repeat)] for i in range(len(contenders))]


def _block(comm: Communicator, contender: Contender, bench: GossipBench) -> float:
    """Seconds per step of some steps in one piece: an exchange that leaves in one is paid for in the next."""
    comm.barrier()
    begun = time.perf_counter()
    for _ in range(bench.steps):
        contender.step(bench.compute / 1e3)
    return (time.perf_counter() - begun) / bench.steps
