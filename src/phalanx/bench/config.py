"""The benchmarks as values. They are sent to the ranks as JSON and appear in the first record of the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.schedule.names import InputError, find_all_reduce

OPTIMIZERS = ("sgd", "adamw")
MODELS = ("resnet50", "resnet18", "resnet_cifar20", "gpt")
TRAINED = (
    "none", "DDP", "DDP fp16", "DDP bf16", "DDP PowerSGD", "phalanx", "phalanx inline", "phalanx fused", "phalanx float16",
    "phalanx bfloat16", "phalanx int8", "phalanx PowerSGD", "phalanx local-sgd", "phalanx diloco", "phalanx diloco streamed",
    "phalanx gossip", "phalanx gossip exact", "Horovod", "decent-dp",
)  # fmt: skip
GOSSIPING = (
    "none", "DDP", "all-reduce", "gossip", "gossip exact", "gossip coherent", "gossip gradients", "gossip bfloat16",
    "local-sgd", "diloco", "decent-dp",
)  # fmt: skip
FACTOR = 4  # between one size and the next


@dataclass(frozen=True, slots=True)
class AllReduceBench:
    """All-reduces of `smallest`, four times that, ... `largest` bytes, each in `repeat` rounds of all contenders."""

    verb: ClassVar[str] = "allreduce"
    smallest: int
    largest: int
    repeat: int
    algorithms: tuple[str, ...] = ()
    pin: bool = False  # every rank on its own core

    def __post_init__(self) -> None:
        if not 4 <= self.smallest <= self.largest:
            raise InputError(f"--min {self.smallest} --max {self.largest}: give at least 4 bytes (one float), the smaller first")
        if self.smallest % 4 or self.largest % 4:
            raise InputError(f"--min {self.smallest} --max {self.largest}: give multiples of 4, the bytes of a float")

    def sizes(self) -> Iterator[int]:
        size = self.smallest
        while size < self.largest:
            yield size
            size *= FACTOR
        yield self.largest

    def check(self, ranks: int) -> None:
        """Raise unless every algorithm is an all-reduce of `ranks` ranks."""
        for text in self.algorithms:
            find_all_reduce(text, ranks, f"--algorithm {text}")


@dataclass(frozen=True, slots=True)
class TrainBench:
    """`repeat` steps of every contender, in turns, on `batch` random images of `pixels` x `pixels` per rank.

    For gpt a sample is a text of `pixels` random characters.
    """

    verb: ClassVar[str] = "train"
    model: str
    pixels: int
    batch: int
    repeat: int
    everybody: bool = False  # also list contenders that are not installed
    pin: bool = False
    only: tuple[str, ...] = ()  # contenders besides "none" and "DDP", the baselines; empty for all
    optimizer: str = "sgd"  # of all contenders: "sgd" with momentum, or "adamw"

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in TRAINED:
                raise InputError(f"--only {name!r}: the contenders are {', '.join(TRAINED)}")

    def check(self, ranks: int) -> None:
        """Accept any number of ranks."""


@dataclass(frozen=True, slots=True)
class GossipBench:
    """Blocks of `steps` steps of every contender, in turns: `compute` milliseconds of waiting, `size` bytes of parameters."""

    verb: ClassVar[str] = "gossip"
    size: int
    compute: int
    steps: int
    repeat: int
    pin: bool = False
    only: tuple[str, ...] = ()  # contenders besides "none", the baseline; empty for all

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in GOSSIPING:
                raise InputError(f"--only {name!r}: the contenders are {', '.join(GOSSIPING)}")

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only

    def check(self, ranks: int) -> None:
        """Accept any number of ranks."""


Bench = AllReduceBench | TrainBench | GossipBench


def from_record(record: dict[str, Any]) -> Bench:
    """Rebuild a bench from its record: `dataclasses.asdict` plus its verb."""
    fields = {key: value for key, value in record.items() if key != "verb"}
    if record["verb"] == TrainBench.verb:
        return TrainBench(**fields | {"only": tuple(record["only"])})
    if record["verb"] == GossipBench.verb:
        return GossipBench(**fields | {"only": tuple(record["only"])})
    return AllReduceBench(**fields | {"algorithms": tuple(record["algorithms"])})
