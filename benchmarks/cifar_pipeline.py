"""CIFAR-10 from memory, padded, cropped, mirrored and normalised: Phalanx's loader against a per-sample Dataset and DataLoader.

    python benchmarks/cifar_pipeline.py [--data DIR] [--repeat 7] [--json FILE]

`--data` holds cifar-10-batches-bin or cifar-10-batches-py; without it the images are random, of the same shape, and the record
says so. Batches of 128, one torch thread. Both loaders are measured without workers, in the thread that trains, where their time
is what a step pays, and with one worker. The other number is a training step of ResNet-20 on the same batch and core: forward,
backward and SGD. Contenders take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx.data import Arrays, Chain, Flip, Loader, Normalise, PadCrop

BATCH, BATCHES = 128, 40
PREFETCHED = 4  # batches before the clock starts: more than either loader holds ready with one worker
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class PerSample(Dataset):
    """What torchvision's CIFAR10 with RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor and Normalize does, by hand."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x.permute(0, 2, 3, 1).contiguous().numpy(), y.tolist()
        self.mean, self.std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self.x[i]), border=4)
        left, top = random.randint(0, 8), random.randint(0, 8)
        image = image.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return x.sub_(self.mean).div_(self.std), self.y[i]


def milliseconds_per_batch(batches: Iterable[Any]) -> float:
    """Of a loader in its stride; the rest of the epoch is left alone."""
    iterator = iter(batches)
    for _ in range(PREFETCHED):
        next(iterator)
    begun = time.perf_counter()
    count = sum(1 for _ in itertools.islice(iterator, BATCHES - PREFETCHED))
    return (time.perf_counter() - begun) / count * 1e3


def training_step() -> Callable[[], float]:
    """Milliseconds of one step of ResNet-20."""
    model = phalanx.models.resnet_cifar(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step() -> float:
        begun = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return (time.perf_counter() - begun) * 1e3

    step()
    return step


def measure(arrays: Any, repeat: int) -> list[dict[str, Any]]:
    samples = PerSample(arrays.x, arrays.y)
    transform = Chain(PadCrop(4), Flip(), Normalise(MEAN, STD))
    runs: dict[str, Callable[[], float]] = {"ResNet-20 step": training_step()}
    for workers in (0, 1):
        ours = Loader(arrays, batch=BATCH, transform=transform, workers=workers)
        options = {"persistent_workers": True, "timeout": 60} if workers else {}
        theirs = DataLoader(samples, BATCH, shuffle=True, drop_last=True, num_workers=workers, **options)
        runs |= {
            f"phalanx, {workers} workers": lambda ours=ours: milliseconds_per_batch(ours),
            f"per sample, {workers} workers": lambda theirs=theirs: milliseconds_per_batch(itertools.islice(theirs, BATCHES)),
        }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            times[name].append(run())
            time.sleep(0.3)  # prefetching comes to its end
    median = {name: statistics.median(values) for name, values in times.items()}
    step = median["ResNet-20 step"]
    return [
        {
            "contender": name,
            "ms_per_batch": median[name],
            "images_per_second": BATCH / median[name] * 1e3,
            "times_per_sample": median[f"per sample, {name.split(', ')[1]}"] / median[name] if ", " in name else None,
            "percent_of_step": 100 * median[name] / step,
            "fastest": min(values),
            "slowest": max(values),
            "repeat": repeat,
        }
        for name, values in times.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| contender | ms per batch of 128 | images/s | x per sample | % of the step |", "|---|---|---|---|---|"]
    for r in rows:
        ratio = f"{r['times_per_sample']:.1f}" if r["times_per_sample"] else ""
        speed = f"{r['ms_per_batch']:.2f} | {r['images_per_second']:,.0f}"
        lines.append(f"| {r['contender']} | {speed} | {ratio} | {r['percent_of_step']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where cifar-10-batches-bin or -py is")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.data:
        arrays: Any = phalanx.data.open(f"cifar10:{args.data}")
    else:
        arrays = Arrays(torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (50_000,)))
    header = {
        "what": "CIFAR-10 pipeline",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "pillow": version("pillow"),
        "cores": len(os.sched_getaffinity(0)),
        "images": "CIFAR-10" if args.data else "random, of CIFAR-10's shape",
        "batch": BATCH,
        "batches_per_turn": BATCHES - PREFETCHED,
    }
    print(f"# {json.dumps(header)}")
    rows = measure(arrays, args.repeat)
    print(table(rows))
    if args.json:
        args.json.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")


if __name__ == "__main__":
    main()
