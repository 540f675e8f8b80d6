"""`phalanx bench gossip` inside a rank: steps of training whose computation is a wait, so that only communication costs.

With computation emulated, a machine of few cores can stand for many accelerators: what remains of a step beyond the wait is what
communication could not hide. Efficiency is the wait over the step. The wait lies inside forward and backward, layer by layer, and
gradients appear when the wait of their layer is over: whoever communicates during backward may.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.cli.bench_config import GossipBench
from phalanx.cli.bench_record import Company, Record, first_record
from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip import Gossip
from phalanx.optim.gossip_step import GossipOptimizer

WARM = 4  # steps: connections and buffers, and DDP rebuilds its buckets in the second
TRYING = 12  # the same where Phalanx tries overlap on and off in its first 9 steps
LAYERS = 8
FORWARD = 1 / 3  # of the computation; backward computes two products for each of forward's
BUCKETS = 4  # of those who average gradients: what is there early can leave early
QUEUED = 5e-3  # seconds by which a host may notice late that a layer is done: it has queued the next ones, and nothing stops
PATIENT = 60.0  # seconds: what is compared are whole exchanges, none is given up
RATE = 1e-3


class Device:
    """An accelerator beside its host: a layer begins when the one before it is done, not when the host has noticed that."""

    def __init__(self) -> None:
        self._free = 0.0  # when it has done what it was given

    def compute(self, seconds: float) -> None:
        """Return when the next `seconds` of computation are over."""
        now = time.perf_counter()
        begins = self._free if now - self._free < QUEUED else now
        self._free = begins + seconds
        time.sleep(max(0.0, self._free - now))


class Emulated(nn.Module):
    """A network that waits instead of computing; its gradients are the same in every step, and others on every rank."""

    def __init__(self, nbytes: int, seconds: float, seed: int) -> None:
        super().__init__()
        count = max(1, nbytes // 4 // LAYERS)
        draw = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(count)) for _ in range(LAYERS)])
        self.gradients = [1e-3 * torch.randn(count, generator=draw) for _ in range(LAYERS)]
        self.forward_seconds, self.backward_seconds = FORWARD * seconds / LAYERS, (1 - FORWARD) * seconds / LAYERS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = Device()  # of this step: what the step before it did must be over
        for weight, gradient in zip(self.weights, self.gradients):
            x = _Wait.apply(x, weight, gradient, device, self.forward_seconds, self.backward_seconds)
        return x


class _Wait(torch.autograd.Function):
    """A layer: waits in forward, and in backward until the gradient of its weight is there."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, device: Device, forward: float, backward: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.device, ctx.seconds = gradient, device, backward
        device.compute(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[Any, ...]:
        ctx.device.compute(ctx.seconds)
        return outputs[0], ctx.gradient, None, None, None, None


@dataclass(slots=True)
class Contender:
    """A replica and how it is updated. `warm` steps come before the timed ones."""

    name: str
    model: nn.Module
    opt: Any  # None where backward updates
    warm: int = WARM
    exchanges: list[float] = field(default_factory=list)  # seconds that each was under way

    def step(self) -> None:
        if self.opt is not None:
            self.opt.zero_grad()
        self.model(torch.ones((), requires_grad=True)).backward()
        if self.opt is not None:
            self.opt.step()
        if isinstance(self.opt, GossipOptimizer):
            self.exchanges += [way.ended - way.left for way in self.opt.last_journeys]


def measure(bench: GossipBench, launcher: str) -> Iterator[Record]:
    """The records of the benchmark; all ranks yield the same."""
    torch.set_num_threads(1)
    with phalanx.create_communicator() as comm:
        company = Company()
        yield first_record(bench, comm, launcher)
        contenders = list(enter(bench, comm))
        times = _race(comm, contenders, bench)
        alone = statistics.median(times[0])
        for contender, own in zip(contenders, times):
            median = statistics.median(own)
            yield {
                "contender": contender.name,
                "step_ms": median * 1e3,
                "over_none_ms": (median - alone) * 1e3 if contender.name != "none" else None,
                "efficiency": bench.compute / 1e3 / median,
                **_what_was_exchanged(contender, comm),
                "times_ms": [round(seconds * 1e3, 3) for seconds in own],
            }
        present = {contender.name for contender in contenders}
        for name, (module, why) in ELSEWHERE.items():
            if bench.wants(name) and name not in present:
                absent = importlib.util.find_spec(module) is None
                yield {"contender": name, "note": "not installed" if absent else why}
        yield company.last_record(comm)


def _race(comm: Communicator, contenders: list[Contender], bench: GossipBench) -> list[list[float]]:
    """Seconds per step of every contender, in `repeat` blocks that take turns; the slowest rank counts."""
    for contender in contenders:
        for _ in range(contender.warm):
            contender.step()
        contender.exchanges.clear()
    mine = [[_block(comm, contender, bench.steps) for contender in contenders] for _ in range(bench.repeat)]
    told = comm.allgather_obj(mine)
    return [[max(own[k][i] for own in told) for k in range(bench.repeat)] for i in range(len(contenders))]


def _block(comm: Communicator, contender: Contender, steps: int) -> float:
    """Seconds per step of some steps in one piece: an exchange that leaves in one is paid for in the next."""
    comm.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        contender.step()
    return (time.perf_counter() - begun) / steps


def _what_was_exchanged(contender: Contender, comm: Communicator) -> Record:
    """Of gossip: bytes of a message, the median time that one is under way, and how far the replicas are apart."""
    if not isinstance(contender.opt, GossipOptimizer):
        return {"bytes": None, "exchange_ms": None, "spread": None}
    record = contender.opt.last_record
    medians = comm.allgather_obj(statistics.median(contender.exchanges) if contender.exchanges else 0.0)
    return {
        "bytes": record.bytes if record else 0,
        "exchange_ms": statistics.median(medians) * 1e3,
        "spread": contender.opt.spread(),
    }


# ---- the contenders ----------------------------------------------------------------------------------------------------------


def enter(bench: GossipBench, comm: Communicator) -> Iterator[Contender]:
    """Each with a replica of its own; "none" is always there, because the others are compared with it."""

    def replica() -> Emulated:
        return Emulated(bench.size, bench.compute / 1e3, seed=comm.rank)

    def ours(*, warm: int = WARM, **options: Any) -> Callable[[str], Contender]:
        def make(name: str) -> Contender:
            model = replica()
            return Contender(name, model, phalanx.create_multi_node_optimizer(_sgd(model), comm, **options), warm)

        return make

    def plain(name: str) -> Contender:
        model = replica()
        return Contender(name, model, _sgd(model))

    def ddp(name: str) -> Contender:
        model = DistributedDataParallel(
            replica(), static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=bench.size / BUCKETS / 2**20
        )
        return Contender(name, model, _sgd(model))

    field_: dict[str, Callable[[str], Contender]] = {
        "none": plain,
        "DDP": ddp,
        "all-reduce": ours(warm=TRYING, bucket_bytes=max(1 << 10, bench.size // BUCKETS)),
        "gossip": ours(sync=Gossip(patience=PATIENT)),
        "gossip coherent": ours(sync=Gossip(overlap=False, patience=PATIENT)),
        "gossip gradients": ours(sync=Gossip(exchange="gradients", patience=PATIENT)),
        "gossip bfloat16": ours(sync=Gossip(patience=PATIENT), wire=torch.bfloat16),
    }
    for name, make in field_.items():
        if name == "none" or bench.wants(name):
            yield make(name)
    if bench.wants("decent-dp") and comm.size & (comm.size - 1) == 0 and importlib.util.find_spec("decent_dp") is not None:
        yield _decent_dp(replica())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def _decent_dp(model: nn.Module) -> Contender:
    """Its one partner per step, 2**k further in step k, is what is nearest to GossipGraD. Weights travel, momentum does not."""
    from decent_dp.ddp import DecentralizedDataParallel  # type: ignore[import-not-found,unused-ignore]
    from loguru import logger  # type: ignore[import-not-found,unused-ignore]

    def sgd(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=RATE, momentum=0.9)

    logger.disable("decent_dp")  # it tells its configuration
    return Contender("decent-dp", DecentralizedDataParallel(model, sgd, topology="one-peer-exp", _local_world_size=1), None)


# name -> (module, why it may be absent though that is installed)
ELSEWHERE = {"decent-dp": ("decent_dp", "takes powers of two only")}
