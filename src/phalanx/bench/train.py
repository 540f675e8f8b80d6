"""`phalanx bench train` inside a rank: one replica per contender, steps in turns, one row per contender.

A step is zero_grad, forward, backward and update of SGD with momentum. Every rank has other images, so ranks agree on their
parameters only if they communicated; the benchmark counts those that differ at the end. With GPUs, each rank trains on its own,
and a step is over when the GPU has finished it.
"""

from __future__ import annotations

import importlib.util
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.bench.config import TrainBench
from phalanx.bench.library import library_hooks
from phalanx.bench.record import Company, Record, first_record
from phalanx.bench.stopwatch import Stopwatch
from phalanx.comm.communicator import Communicator
from phalanx.comm.envelope import bytes_of
from phalanx.train.trainer import device_of_this_rank

RATE = 1e-6  # training must make no progress, so that late steps cost as much as early ones
LOW_RANK = 4  # of PowerSGD
EVERY = 10  # steps of LocalSGD and DiLoCo: one block is measured, with its exchange
WARM = 3  # steps before the timed ones: DDP rebuilds its buckets in the second
TRYING = 12  # WARM for Phalanx, which tries overlap on and off in its first 9 steps
# contenders whose replicas differ, for --only: each needs memory and, in blocks of EVERY steps, time
APART = ("phalanx local-sgd", "phalanx diloco", "phalanx diloco streamed", "phalanx gossip", "phalanx gossip exact")
VOCABULARY = 96  # of gpt, as in the recipe gpt-tiny
MODELS: dict[str, Callable[[TrainBench], nn.Module]] = {
    "resnet50": lambda bench: phalanx.models.resnet50(),
    "resnet18": lambda bench: phalanx.models.resnet18(),
    "resnet_cifar20": lambda bench: phalanx.models.resnet_cifar(20),
    "gpt": lambda bench: phalanx.models.gpt(VOCABULARY, context=bench.pixels),
}


@dataclass(frozen=True, slots=True)
class TrainingContender:
    """A name and one step of training; `averages` if the parameters are equal on all ranks after it.

    Of `block` steps in a row the mean counts, where some of them communicate and others do not.
    """

    name: str
    params: list[nn.Parameter]
    step: Callable[[], None]
    averages: bool = True
    warm: int = WARM
    block: int = 1


def measure(bench: TrainBench, launcher: str) -> Iterator[Record]:
    """Yield the records of the benchmark, the same on all ranks."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # vanishing gradients would slow some contenders more than others
    with phalanx.create_communicator() as comm:
        company = Company()
        yield first_record(bench, comm, launcher)
        contenders = list(enter(bench, comm))
        # in blocks, not in turns: Phalanx times its own first steps to choose between overlap and none
        for contender in contenders:
            for _ in range(contender.warm):
                contender.step()
        mine = [[seconds_of(comm, contender) for contender in contenders] for _ in range(bench.repeat)]
        ranks = comm.allgather_obj(mine)
        times = [[max(own[k][i] for own in ranks) * 1e3 for k in range(bench.repeat)] for i in range(len(contenders))]
        medians = {contender.name: statistics.median(own) for contender, own in zip(contenders, times)}
        for contender, own in zip(contenders, times):
            yield {
                "contender": contender.name,
                "step_ms": medians[contender.name],
                "spread_ms": _spread(own),
                "over_none_ms": medians[contender.name] - medians["none"] if contender.name != "none" else None,
                "times_ddp": medians["DDP"] / medians[contender.name],
                "wrong": count_differing(comm, contender) if contender.averages else None,
                "times_ms": [round(ms, 3) for ms in own],
            }
        if bench.everybody:
            present = {contender.name for contender in contenders}
            yield from ({"contender": name, "note": "not installed"} for name in OTHERS if name not in present)
        yield company.last_record(comm)


def seconds_of(comm: Communicator, contender: TrainingContender) -> float:
    """Seconds of one step on this rank. All ranks start together."""
    comm.barrier()
    watch = Stopwatch(contender.params[0].device)
    for _ in range(contender.block):
        contender.step()
    return watch.seconds() / contender.block


def _spread(values: list[float]) -> float:
    """The distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def count_differing(comm: Communicator, contender: TrainingContender) -> int:
    """Count the ranks whose parameters differ in any bit from those of rank 0."""
    print_ = 0
    for p in contender.params:
        print_ = zlib.crc32(bytes_of(p.detach().contiguous()).cpu().numpy().data, print_)
    found = comm.allgather_obj(print_)
    return sum(own != found[0] for own in found)


# ---- the contenders ----------------------------------------------------------------------------------------------------------


def enter(bench: TrainBench, comm: Communicator) -> Iterator[TrainingContender]:
    """The contenders, each with its own replica."""
    own, device = torch.Generator().manual_seed(1 + comm.rank), device_of_this_rank()
    x, y = (part.to(device) for part in random_batch(bench, own))

    def replica() -> nn.Module:
        phalanx.seed_everything(0)
        return MODELS[bench.model](bench).to(device)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return _optimizer(bench.optimizer, model.parameters())

    def contender(
        name: str, model: nn.Module, opt: Any, *, averages: bool = True, warm: int = WARM, block: int = 1
    ) -> TrainingContender:
        def step() -> None:
            opt.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            opt.step()

        return TrainingContender(name, [p for p in model.parameters() if p.requires_grad], step, averages, warm, block)

    def ddp(**options: Any) -> nn.Module:
        return DistributedDataParallel(replica(), static_graph=True, gradient_as_bucket_view=True, **options)

    def ours(**options: Any) -> Callable[[str], TrainingContender]:
        def make(name: str) -> TrainingContender:
            model = replica()
            return contender(name, model, phalanx.create_multi_node_optimizer(optimizer(model), comm, **options), warm=TRYING)

        return make

    def apart(block: int, sync: Any) -> Callable[[str], TrainingContender]:
        """Replicas that differ between exchanges."""

        def make(name: str) -> TrainingContender:
            model = replica()
            opt: Any = phalanx.create_multi_node_optimizer(optimizer(model), comm, sync=sync)
            return contender(name, model, opt, averages=False, warm=max(WARM, block), block=block)

        return make

    def plain(name: str) -> TrainingContender:
        model = replica()
        return contender(name, model, optimizer(model), averages=False)

    def hooked(name: str) -> TrainingContender:
        # torch's PowerSGD calls all-reduces from callbacks: with several buckets their order varies, and gloo aborts the process
        model = ddp(bucket_cap_mb=1 << 14) if name == "DDP PowerSGD" else ddp()
        model.register_comm_hook(*library_hooks(LOW_RANK)[name.removeprefix("DDP ")])  # type: ignore[operator]
        return contender(name, model, optimizer(model))

    def of_ddp(name: str) -> TrainingContender:
        model = ddp()
        return contender(name, model, optimizer(model))

    field: dict[str, Callable[[str], TrainingContender]] = {
        "none": plain,
        "DDP": of_ddp,
        "DDP fp16": hooked,
        "DDP bf16": hooked,
        "DDP PowerSGD": hooked,
        "phalanx": ours(),
        "phalanx inline": ours(sync=phalanx.AllReduce(overlap=False)),
        "phalanx fused": ours(sync=phalanx.AllReduce(fused=True)),
        "phalanx float16": ours(wire=torch.float16),
        "phalanx bfloat16": ours(wire=torch.bfloat16),
        "phalanx int8": ours(wire=phalanx.Int8()),
        "phalanx PowerSGD": ours(wire=phalanx.PowerSGD(rank=LOW_RANK)),
        "phalanx local-sgd": apart(EVERY, phalanx.LocalSGD(every=EVERY)),
        "phalanx diloco": apart(EVERY, phalanx.DiLoCo(every=EVERY)),
        "phalanx diloco streamed": apart(EVERY, phalanx.DiLoCo(every=EVERY, fragments=2, overlap=True)),
        "phalanx gossip": apart(1, phalanx.Gossip()),
        "phalanx gossip exact": apart(1, phalanx.Gossip(topology="exact")),
    }
    if device.type == "cpu":  # torch's hook only supports NCCL
        del field["DDP bf16"]
    if comm.inter_size == 1:  # nothing is encoded within a host
        del field["phalanx int8"]
    if not comm.shares_memory or device.type != "cpu":  # one pass over memory is for ranks that share it
        del field["phalanx fused"]
    usual = (name for name in field if name not in APART)
    chosen = {"none", "DDP", *(bench.only or (*usual, *OTHERS))}
    for name, make in field.items():
        if name in chosen:
            yield make(name)
    for name, (module, make_other) in OTHERS.items():
        if name in chosen and importlib.util.find_spec(module) is not None:
            yield from make_other(replica(), comm, bench.optimizer, contender)


def random_batch(bench: TrainBench, own: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels, or texts and the characters that follow."""
    if bench.model == "gpt":
        text = torch.randint(VOCABULARY, (bench.batch, bench.pixels + 1), generator=own)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    images = torch.randn(bench.batch, 3, bench.pixels, bench.pixels, generator=own)
    return images, torch.randint(0, 10, (bench.batch,), generator=own)


def _optimizer(name: str, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of all contenders, with torch's fused step, its fastest."""
    if name == "adamw":
        return torch.optim.AdamW(params, lr=RATE, fused=True)
    return torch.optim.SGD(params, lr=RATE, momentum=0.9, fused=True)


def _horovod(
    model: nn.Module, comm: Communicator, optimizer: str, contender: Callable[..., TrainingContender]
) -> Iterator[TrainingContender]:
    import horovod.torch as hvd  # type: ignore[import-not-found,unused-ignore]

    hvd.init()
    if hvd.size() == comm.size:  # under a launcher unknown to Horovod, every rank is alone
        inner = _optimizer(optimizer, model.parameters())
        yield contender("Horovod", model, hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters()))


class _InBackward:
    """In place of an optimizer, for a model whose backward updates."""

    def zero_grad(self) -> None:
        """Do nothing: backward does it."""

    def step(self) -> None:
        """Do nothing: backward did it."""


def _decent_dp(
    model: nn.Module, comm: Communicator, optimizer: str, contender: Callable[..., TrainingContender]
) -> Iterator[TrainingContender]:
    from decent_dp.ddp import DecentralizedDataParallel  # type: ignore[import-not-found,unused-ignore]

    def make(named: list[tuple[torch.Tensor, str]]) -> torch.optim.Optimizer:
        return _optimizer(optimizer, [p for p, _ in named])

    yield contender("decent-dp", DecentralizedDataParallel(model, make, topology="complete"), _InBackward(), averages=False)


# name -> (module, what makes a contender of it)
OTHERS: dict[str, tuple[str, Callable[..., Iterator[TrainingContender]]]] = {
    "Horovod": ("horovod", _horovod),
    "decent-dp": ("decent_dp", _decent_dp),
}
