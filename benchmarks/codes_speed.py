"""8-bit codes on one core: encode with error feedback, add the codes of three other hosts, decode.

    python benchmarks/codes_speed.py [--json FILE] [--mib 64] [--repeat 15]

For a buffer of so many MiB of float32, as one of 4 hosts with one rank does it: it encodes 3/4 of its own, adds three codes to a
quarter, encodes that, and decodes all. GB/s are those of the buffer, for all of it together.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from phalanx.bench.record import Record
from phalanx.comm.block_code import BlockCode, Coder
from phalanx.native import core

HOSTS = 4


def measure(code: BlockCode, nbytes: int, repeat: int) -> Record:
    chunk = nbytes // 4 // HOSTS
    own = torch.Generator().manual_seed(0)
    x, error = torch.randn(HOSTS * chunk, generator=own), torch.zeros(HOSTS * chunk)
    coder = Coder(code, error, factor=1 / HOSTS)
    codes = [torch.empty(code.nbytes(chunk), dtype=torch.uint8) for _ in range(HOSTS)]
    others = [code_.clone() for code_ in codes[1:]]
    for other in others:
        coder.encode(torch.randn(chunk, generator=own), other, 0)
    parts = x.split(chunk)
    steps = {
        "encode": lambda: [coder.encode(parts[i], codes[i], i * chunk) for i in range(HOSTS)],
        "add": lambda: coder.add(others, parts[0]),
        "decode": lambda: [coder.decode(codes[i], parts[i]) for i in range(HOSTS)],
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(own) for name, own in times.items()}
    whole = sum(medians.values())
    return {
        "block": code.block,
        "rounding": "stochastic" if code.stochastic else "nearest",
        "ms": {name: round(1e3 * seconds, 3) for name, seconds in medians.items()},
        "gb_per_s": nbytes / whole / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records there")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Record] = [
        {
            "what": "8-bit codes on one core",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "kernels": core._native.kernels() if core.is_native() else "torch",
            "mib": args.mib,
            "repeat": args.repeat,
            "hosts": HOSTS,
        }
    ]
    for code in (BlockCode(64), BlockCode(256), BlockCode(1024), BlockCode(256, stochastic=True)):
        rows.append(measure(code, args.mib << 20, args.repeat))
        print(rows[-1])
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
