"""What the trainer costs beside the step itself: `Trainer.train_epoch` against a bare loop, on one rank and one thread.

    python benchmarks/trainer_overhead.py [--repeat 15] [--steps 5] [--json FILE]

Both train a CIFAR ResNet-20 with batches of 128 images, each from a `Loader` of its own over the same random images, with torch's
SGD with momentum. The bare loop has nothing else; the trainer has the multi-node optimizer, the learning rate of every step, the
times and metrics, rows of `metrics.jsonl` and the ear for SIGTERM. They take turns of some steps each, and begin alternately.
The overhead is the median over the turns of trainer minus bare loop, as a share of the bare loop's median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.data import Loader
from phalanx.train.config import RunConfig
from phalanx.train.log import Log
from phalanx.train.model import ModelConfig
from phalanx.train.samples import DataConfig
from phalanx.train.sigterm import StopRequest
from phalanx.train.trainer import Trainer, assemble
from phalanx.train.update import OptimizerConfig, RateConfig

BATCH, BAR = 128, 0.02


def configure(steps: int) -> RunConfig:
    mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
    return RunConfig(
        name="overhead",
        epochs=1000,
        batch=BATCH,
        model=ModelConfig(name="resnet_cifar", depth=20),
        data=DataConfig(source=f"synthetic:3x32x32,classes=10,n={steps * BATCH}", mean=mean, std=std, pad=4, flip=True),
        optimizer=OptimizerConfig(weight_decay=5e-4, decay_all=True),
        rate=RateConfig(peak=0.1, decay="constant"),
    )


def bare(trainer: Trainer) -> tuple[Callable[[], None], Loader]:
    """One epoch of what a person would write; with a network, an optimizer and a loader of its own."""
    config = trainer.config
    model = config.model.build(in_channels=3, classes=10, seed=0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    source, test = config.data.open("train"), config.data.open("test")
    loader, unused = config.data.loaders(
        source, test, trainer.comm, plan=config.plan, micro_batch=None, seed=0, channels_last=False
    )
    unused.close()

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return epoch, loader


def measure(repeat: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each turn."""
    config = configure(steps)
    times: dict[str, list[float]] = {"bare loop": [], "trainer": []}
    with (
        tempfile.TemporaryDirectory() as out,
        phalanx.create_communicator() as comm,
        Log(config, comm, Path(out), resume=False, show=False) as log,
        StopRequest(comm) as stop,
    ):
        trainer = assemble(config, comm, log)
        epoch, loader = bare(trainer)
        log.begin(0, 0.0)
        contenders: dict[str, Callable[[], Any]] = {
            "bare loop": epoch,
            "trainer": lambda: trainer.train_epoch(stop, lambda: None),
        }
        with trainer.loader, trainer.test, loader:
            for turn in range(repeat + 1):
                for name in sorted(contenders, reverse=turn % 2 == 1):
                    begun = time.perf_counter()
                    contenders[name]()
                    if turn:  # the first one warms up
                        times[name].append((time.perf_counter() - begun) / steps)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, help="turns")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--json", type=Path, help="append the row to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(args.repeat, args.steps)
    bare_step = statistics.median(times["bare loop"])
    overhead = statistics.median(b - a for a, b in zip(times["bare loop"], times["trainer"])) / bare_step
    row = {
        "program": "trainer_overhead",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": "resnet_cifar(20)",
        "batch": BATCH,
        "repeat": args.repeat,
        "steps": args.steps,
        "seconds_per_step": {name: round(statistics.median(own), 5) for name, own in times.items()},
        "quartiles": {name: [round(q, 5) for q in statistics.quantiles(own, n=4)[::2]] for name, own in times.items()},
        "overhead": round(overhead, 5),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    print(json.dumps(row, indent=2))
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 0 if overhead <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
