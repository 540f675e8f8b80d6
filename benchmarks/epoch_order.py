"""epoch_order against torch.randperm: indices per second and memory, for an epoch of ImageNet.

    python benchmarks/epoch_order.py [--n 1281167] [--batch 8192] [--repeat 15] [--json FILE]

`blocks` reads the order in runs of --batch, as a loader does, and keeps nothing; `whole` makes all of it at once; `randperm` is
what torch's samplers do: all at once, on every rank. `batch of 32` is what one small micro-batch costs. Contenders take turns.
Memory is the peak beyond what was there before: traced for numpy; for torch, which nobody traces, the size of its result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.bench.record import processor
from phalanx.data import epoch_order


def blocks(n: int, batch: int, epoch: int) -> None:
    order = epoch_order(0, epoch, n)
    for start in range(0, n, batch):
        order[start : start + batch]


def whole(n: int, batch: int, epoch: int) -> None:
    epoch_order(0, epoch, n)[:]


def batch_of_32(n: int, batch: int, epoch: int) -> None:
    epoch_order(0, epoch, n)[:32]


def randperm(n: int, batch: int, epoch: int) -> None:
    torch.randperm(n, generator=torch.Generator().manual_seed(epoch))


def peak(contender: Callable[[int, int, int], None], n: int, batch: int) -> int:
    if contender is randperm:
        return 8 * n
    tracemalloc.start()
    contender(n, batch, 0)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def measure(n: int, batch: int, repeat: int) -> list[dict[str, Any]]:
    contenders = {"blocks": blocks, "whole": whole, "batch of 32": batch_of_32, "randperm": randperm}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for epoch in range(repeat):
        for name, contender in contenders.items():
            begun = time.perf_counter()
            contender(n, batch, epoch)
            seconds[name].append(time.perf_counter() - begun)
    rows = []
    for name, contender in contenders.items():
        median, indices = statistics.median(seconds[name]), 32 if contender is batch_of_32 else n
        rows.append(
            {
                "contender": name,
                "indices": indices,
                "median_ms": median * 1e3,
                "best_ms": min(seconds[name]) * 1e3,
                "indices_per_s": indices / median,
                "peak_bytes": peak(contender, n, batch),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| contender | median, ms | M indices/s | peak, KiB |", "|---|---|---|---|"]
    lines += [
        f"| {row['contender']} | {row['median_ms']:.3f} | {row['indices_per_s'] / 1e6:.2f} | {row['peak_bytes'] / 1024:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_281_167)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the records there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    header = {
        "what": "epoch_order",
        "config": {"n": args.n, "batch": args.batch, "repeat": args.repeat},
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "kernel": platform.release(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }
    rows = measure(args.n, args.batch, args.repeat)
    print(table(rows))
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in [header, *rows]))


if __name__ == "__main__":
    main()
