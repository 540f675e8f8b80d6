"""`phalanx bench gossip` inside a rank: training steps that wait instead of computing, so that only communication costs.

A machine with few cores can then emulate many accelerators. The time of a step beyond the wait is what communication could not
hide, and efficiency is the wait divided by the step. The wait happens inside forward and backward, layer by layer. A gradient
appears when the wait of its layer is over, so a contender may communicate during backward.
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
from phalanx.bench.config import GossipBench
from phalanx.bench.record import Company, Record, first_record
from phalanx.bench.stopwatch import Stopwatch
from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip import Gossip
from phalanx.grad.local import DiLoCo, LocalSGD
from phalanx.optim.gossip_step import GossipOptimizer
from phalanx.optim.local_step import LocalOptimizer

WARM = 4  # steps to set up connections and buffers; DDP rebuilds its buckets in the second
TRYING = 12  # like WARM, for all-reduce: Phalanx tries overlap on and off in its first 9 steps
LAYERS = 8
FORWARD = 1 / 3  # of the computation: backward computes two products for each of forward's
BUCKETS = 4  # of contenders that average gradients, so that early buckets can be sent early
QUEUED = 5e-3  # seconds that a host may be late to see a layer finish: it has queued the next layers, so nothing stalls
PATIENT = 60.0  # seconds: let every exchange complete
RATE = 1e-3


class Device:
    """An emulated accelerator: a layer begins when the previous one is done, not when the host has noticed."""

    def __init__(self) -> None:
        self._free = 0.0  # when its queue is empty

    def compute(self, seconds: float) -> None:
        """Return when the next `seconds` of computation are over."""
        now = time.perf_counter()
        begins = self._free if now - self._free < QUEUED else now
        self._free = begins + seconds
        time.sleep(max(0.0, self._free - now))


class Emulated(nn.Module):
    """A network that waits instead of computing. Its gradients are the same in every step and differ between ranks."""

    def __init__(self, nbytes: int, seconds: float, seed: int) -> None:
        super().__init__()
        count = max(1, nbytes // 4 // LAYERS)
        draw = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(count)) for _ in range(LAYERS)])
        self.gradients = [1e-3 * torch.randn(count, generator=draw) for _ in range(LAYERS)]
        self.forward_seconds, self.backward_seconds = FORWARD * seconds / LAYERS, (1 - FORWARD) * seconds / LAYERS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = Device()  # a new one per step: the previous step must be over
        for weight, gradient in zip(self.weights, self.gradients):
            x = _Wait.apply(x, weight, gradient, device, self.forward_seconds, self.backward_seconds)
        return x


class _Wait(torch.autograd.Function):
    """A layer that waits in forward, and in backward until the gradient of its weight is due."""

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
class GossipContender:
    """A replica and how it is updated. `warm` steps come before the timed ones."""

    name: str
    model: nn.Module
    opt: Any  # None if backward updates
    warm: int = WARM
    exchanges: list[float] = field(default_factory=list)  # seconds that each took

    def step(self) -> None:
        if self.opt is not None:
            self.opt.zero_grad()
        self.model(torch.ones((), requires_grad=True)).backward()
        if self.opt is not None:
            self.opt.step()
        if isinstance(self.opt, GossipOptimizer | LocalOptimizer):
            self.exchanges += [way.ended - way.left for way in self.opt.last_transfers]


def measure(bench: GossipBench, launcher: str) -> Iterator[Record]:
    """Yield the records of the benchmark, the same on all ranks."""
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
                **_describe_exchange(contender, comm),
                "times_ms": [round(seconds * 1e3, 3) for seconds in own],
            }
        present = {contender.name for contender in contenders}
        for name, (module, why) in ELSEWHERE.items():
            if bench.wants(name) and name not in present:
                absent = importlib.util.find_spec(module) is None
                yield {"contender": name, "note": "not installed" if absent else why}
        yield company.last_record(comm)


def _race(comm: Communicator, contenders: list[GossipContender], bench: GossipBench) -> list[list[float]]:
    """Seconds per step of every contender, in `repeat` blocks that take turns; the slowest rank counts."""
    for contender in contenders:
        for _ in range(contender.warm):
            contender.step()
        contender.exchanges.clear()
    mine = [[_block(comm, contender, bench.steps) for contender in contenders] for _ in range(bench.repeat)]
    times = comm.allgather_obj(mine)
    return [[max(own[k][i] for own in times) for k in range(bench.repeat)] for i in range(len(contenders))]


def _block(comm: Communicator, contender: GossipContender, steps: int) -> float:
    """Seconds per step over `steps` steps in a row: an exchange that starts in one step may cost time in the next."""
    comm.barrier()
    watch = Stopwatch(next(contender.model.parameters()).device)
    for _ in range(steps):
        contender.step()
    return watch.seconds() / steps


def _describe_exchange(contender: GossipContender, comm: Communicator) -> Record:
    """For gossip: bytes and median duration of a message, and the distance between replicas."""
    if not isinstance(contender.opt, GossipOptimizer | LocalOptimizer):
        return {"bytes": None, "exchange_ms": None, "spread": None}
    record = contender.opt.last_record
    medians = comm.allgather_obj(statistics.median(contender.exchanges) if contender.exchanges else 0.0)
    return {
        "bytes": record.bytes if record else 0,
        "exchange_ms": statistics.median(medians) * 1e3,
        "spread": contender.opt.spread(),
    }


# ---- the contenders ----------------------------------------------------------------------------------------------------------


def enter(bench: GossipBench, comm: Communicator) -> Iterator[GossipContender]:
    """Yield the contenders, each with its own replica. "none" is always included as the baseline."""

    def replica() -> Emulated:
        return Emulated(bench.size, bench.compute / 1e3, seed=comm.rank)

    def ours(*, warm: int = WARM, **options: Any) -> Callable[[str], GossipContender]:
        def make(name: str) -> GossipContender:
            model = replica()
            return GossipContender(name, model, phalanx.create_multi_node_optimizer(_sgd(model), comm, **options), warm)

        return make

    def plain(name: str) -> GossipContender:
        model = replica()
        return GossipContender(name, model, _sgd(model))

    def ddp(name: str) -> GossipContender:
        model = DistributedDataParallel(
            replica(), static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=bench.size / BUCKETS / 2**20
        )
        return GossipContender(name, model, _sgd(model))

    field_: dict[str, Callable[[str], GossipContender]] = {
        "none": plain,
        "DDP": ddp,
        "all-reduce": ours(warm=TRYING, bucket_bytes=max(1 << 10, bench.size // BUCKETS)),
        "gossip": ours(sync=Gossip(patience=PATIENT)),
        "gossip exact": ours(sync=Gossip(topology="exact", patience=PATIENT)),
        "gossip coherent": ours(sync=Gossip(overlap=False, patience=PATIENT)),
        "gossip gradients": ours(sync=Gossip(exchange="gradients", patience=PATIENT)),
        "gossip bfloat16": ours(sync=Gossip(patience=PATIENT), wire=torch.bfloat16),
        # one outer step per block, so that every measurement includes its cost
        "local-sgd": ours(sync=LocalSGD(every=bench.steps)),
        "diloco": ours(sync=DiLoCo(every=bench.steps, overlap=True)),
    }
    for name, make in field_.items():
        if name == "none" or bench.wants(name):
            yield make(name)
    if bench.wants("decent-dp") and comm.size & (comm.size - 1) == 0 and importlib.util.find_spec("decent_dp") is not None:
        yield _decent_dp(replica())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def _decent_dp(model: nn.Module) -> GossipContender:
    """The nearest to GossipGraD: one partner per step, at distance 2**k in step k. It sends weights, not momentum."""
    from decent_dp.ddp import DecentralizedDataParallel  # type: ignore[import-not-found,unused-ignore]
    from loguru import logger  # type: ignore[import-not-found,unused-ignore]

    def sgd(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=RATE, momentum=0.9)

    logger.disable("decent_dp")  # it prints its configuration
    return GossipContender("decent-dp", DecentralizedDataParallel(model, sgd, topology="one-peer-exp", _local_world_size=1), None)


# name -> (module, why the contender may be absent although the module is installed)
ELSEWHERE = {"decent-dp": ("decent_dp", "takes powers of two only")}
