"""What AsyncShuffle adds to a training step: 4 emulated hosts, a network of twice the bandwidth that the step needs.

    sudo python benchmarks/async_shuffle.py [--blocks 11] [--json benchmarks/results/async_shuffle.jsonl]

Every rank is a host of its own (lab.py). A step waits instead of computing, as a rank does whose accelerator computes: a third
forward, then backward with all-reduces of the gradients under way, where there are gradients; the shuffle and the all-reduces
share the network. `need` is what a host sends in a step, samples and gradients, in the time that the step takes by itself. Blocks
of steps with the shuffle and without it (the same batches read from the same memory) take turns; the slowest rank counts, and the
block ends when all its samples have arrived. The overhead is the median over pairs of neighbouring blocks.

    alone     an exchange that nothing hides: the batch is sent, and waited for
    hidden    the part of it that costs no time: 1 - (with - without) / alone
    cpu       processor time of a rank for one exchange: copies, gloo's threads, the kernel's sockets

The last setting, half the bandwidth that is needed, is the control: there the exchange cannot be hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import phalanx
from phalanx.data import AsyncShuffle
from phalanx.data.share import Layout

sys.path.insert(0, str(Path(__file__).parent))
from lab import Lab

HOSTS = 4
PAYLOAD = 0.956  # of the rate that TCP can use: docs/lab.md
DEADLINE = 110.0  # seconds for one setting
EPOCH = 12  # steps: small enough that the ends of epochs are in every block


@dataclass(frozen=True)
class Setting:
    """What is trained, and `bandwidth` times the need."""

    name: str
    shape: tuple[int, ...]
    batch: int
    step: float  # seconds
    gradients: int  # float32s in each of GROUPS all-reduces
    bandwidth: float
    plan: str = "ring"

    @property
    def sample_bytes(self) -> int:
        """That a host sends for the shuffle in a step."""
        x, y = torch.empty(0, *self.shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
        return Layout.of(x, y).nbytes(self.batch)

    @property
    def gradient_bytes(self) -> int:
        """That a host sends for the all-reduces in a step."""
        return round(GROUPS * 2 * (HOSTS - 1) / HOSTS * 4 * self.gradients)

    @property
    def rate(self) -> float:
        """Bits per second of a host's port."""
        return self.bandwidth * 8 * (self.sample_bytes + self.gradient_bytes) / self.step / PAYLOAD


GROUPS = 3
CIFAR, IMAGENET = (3, 32, 32), (3, 224, 224)
SETTINGS = (
    Setting("CIFAR, batch 128", CIFAR, 128, 0.05, 0, 2.0),
    Setting("CIFAR, batch 128, random plan", CIFAR, 128, 0.05, 0, 2.0, "random"),
    Setting("CIFAR, batch 128, gradients of ResNet-20", CIFAR, 128, 0.05, 270_000 // GROUPS, 2.0),
    Setting("ImageNet 224, batch 32", IMAGENET, 32, 0.2, 0, 2.0),
    Setting("CIFAR, batch 128: half of the need", CIFAR, 128, 0.05, 0, 0.5),
)


# ---- in a rank ---------------------------------------------------------------------------------------------------------------


class Noise:
    """A source that exists only where it is read."""

    def __init__(self, n: int, shape: tuple[int, ...]) -> None:
        self.n, self.shape = n, shape

    def __len__(self) -> int:
        return self.n

    def take(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 256, (len(indices), *self.shape), dtype=torch.uint8), torch.from_numpy(indices)


def measure(setting: Setting, blocks: int, steps: int) -> dict[str, Any]:
    """Runs on every rank; the row is the same on all."""
    comm = phalanx.create_communicator(timeout=60)
    shuffle = AsyncShuffle(Noise(HOSTS * setting.batch * EPOCH, setting.shape), comm, batch=setting.batch, plan=setting.plan)  # type: ignore[arg-type]
    gradients = [torch.zeros(setting.gradients) for _ in range(GROUPS if setting.gradients else 0)]
    mine, labels = Noise(setting.batch * EPOCH, setting.shape).take(np.arange(setting.batch * EPOCH))

    def train() -> None:
        time.sleep(setting.step / 3)
        pending = []
        for gradient in gradients or [None]:
            time.sleep(setting.step * 2 / 3 / max(1, len(gradients)))
            if gradient is not None:
                pending.append(comm.all_reduce_async(gradient))
        for p in pending:
            p.wait()

    def batches() -> Any:
        while True:
            yield from shuffle

    travelling = batches()

    def with_shuffle() -> None:
        next(travelling)
        train()

    def without() -> None:
        places = torch.randint(0, len(mine), (setting.batch,))
        mine.index_select(0, places), labels.index_select(0, places)
        train()

    def alone() -> None:
        next(travelling)
        shuffle.close()

    def block(step: Callable[[], None]) -> tuple[float, float]:
        comm.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        shuffle.close()  # what travels must arrive within the block
        took, spent = time.perf_counter() - begun, time.process_time() - cpu
        slowest = comm.all_reduce(torch.tensor([took], dtype=torch.float64), "max").item()
        return 1e3 * slowest / steps, 1e3 * comm.all_reduce(torch.tensor([spent], dtype=torch.float64), "mean").item() / steps

    contenders = {"with": with_shuffle, "without": without, "alone": alone}
    for step in contenders.values():
        block(step)  # connections, memory, TCP's windows
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(blocks):
        for name in list(contenders)[:: -1 if number % 2 else 1]:  # who comes first changes: no contender is always after another
            found[name].append(block(contenders[name]))
    assert sorted(i for part in comm.allgather(torch.from_numpy(shuffle.held())) for i in part.tolist()) == list(
        range(shuffle.plan.n)
    ), "a sample was lost"
    comm.close()
    times = {name: [took for took, _ in rows] for name, rows in found.items()}
    cpus = {name: statistics.median(cpu for _, cpu in rows) for name, rows in found.items()}
    return {"times_ms": times, "cpu_ms": cpus}


# ---- outside -----------------------------------------------------------------------------------------------------------------


def run(setting: Setting, blocks: int) -> dict[str, Any]:
    """One row: the setting in a lab of its own."""
    steps = max(4, round(0.6 / setting.step))
    lab = Lab(HOSTS, 1, rate=f"{setting.rate / 1e6:.1f}mbit")
    command = [sys.executable, __file__, "--rank", json.dumps([asdict(setting), blocks, steps])]
    with lab.up() as net:
        found = json.loads(net.run(command, deadline=DEADLINE)[0])
    times = found["times_ms"]
    middle = {name: statistics.median(times[name]) for name in times}
    pairs = [(a - b, a / b - 1) for a, b in zip(times["with"], times["without"])]
    added = statistics.median(difference for difference, _ in pairs)
    return {
        **asdict(setting),
        "rate_mbit": setting.rate / 1e6,
        "message_kib": setting.sample_bytes / 1024,
        "without_ms": middle["without"],
        "with_ms": middle["with"],
        "added_ms": added,
        "overhead_percent": 100 * statistics.median(ratio for _, ratio in pairs),
        "alone_ms": middle["alone"],
        "hidden_percent": 100 * (1 - added / middle["alone"]),
        "cpu_ms": found["cpu_ms"]["with"] - found["cpu_ms"]["without"],
        "blocks": blocks,
        "steps_per_block": steps,
        "blocks_ms": {name: [round(took, 3) for took in rows] for name, rows in times.items()},
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| setting | network | of the need | without | with | overhead | alone | hidden | cpu |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['rate_mbit']:.0f} Mbit/s | {row['bandwidth']:g} | {row['without_ms']:.2f} ms "
        f"| {row['with_ms']:.2f} ms | {row['overhead_percent']:+.1f} % | {row['alone_ms']:.1f} ms "
        f"| {row['hidden_percent']:.0f} % | {row['cpu_ms']:.2f} ms |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=11, help="of each contender")
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        setting, blocks, steps = json.loads(args.rank)
        setting["shape"] = tuple(setting["shape"])
        torch.set_num_threads(1)
        print(json.dumps(measure(Setting(**setting), blocks, steps)))
        return
    rows = [run(setting, args.blocks) for setting in SETTINGS if not args.only or args.only in setting.name]
    header = {
        "what": "AsyncShuffle: time added to a training step",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "hosts": HOSTS,
        "ranks_per_host": 1,
    }
    print(f"# {json.dumps(header)}\n{table(rows)}")
    if args.json:
        args.json.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")


if __name__ == "__main__":
    main()
