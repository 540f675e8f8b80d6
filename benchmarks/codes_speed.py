"""8-bit codes on one core: encode with error feedback, add the codes of three other hosts, decode.

    python benchmarks/codes_speed.py [--json FILE] [--mib 64] [--repeat 15] [--hivemind PYTHON]

For a buffer of so many MiB of float32, as one of 4 hosts with one rank does it: it encodes 3/4 of its own, adds three codes to a
quarter, encodes that, and decodes all. GB/s are those of the buffer, for all of it together. `rms` is the error of one encoding
of normal numbers, in their own unit.

`--hivemind` is the Python of an environment with hivemind, bitsandbytes and numpy<2, which does the same with its three 8-bit
codes. They keep no error. It runs after ours, and not in turns, because the two need different versions.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

HOSTS = 4
PEERS = ("Uniform8BitQuantization", "Quantile8BitQuantization", "BlockwiseQuantization")
DEADLINE = 600  # seconds for hivemind
Record = dict[str, Any]


def ours(nbytes: int, repeat: int) -> list[Record]:
    from phalanx.comm.block_code import BlockCode
    from phalanx.native import core

    kernels = core._native.kernels() if core.is_native() else "torch"
    codes = (BlockCode(64), BlockCode(256), BlockCode(1024), BlockCode(256, stochastic=True))
    return [{"kernels": kernels} | _ours(code, nbytes, repeat) for code in codes]


def _ours(code: Any, nbytes: int, repeat: int) -> Record:
    from phalanx.comm.block_code import Coder

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
    plain, bits, back = Coder(code, None, key=1), codes[0].clone(), torch.empty(chunk)
    sample = torch.randn(chunk, generator=own)
    plain.encode(sample, bits, 0)
    plain.decode(bits, back)
    found = {"block": code.block, "rounding": "stochastic" if code.stochastic else "nearest"}
    return found | _times(steps, nbytes, repeat) | {"rms": float((back - sample).square().mean().sqrt())}


def hivemind(nbytes: int, repeat: int) -> list[Record]:
    """The same work with hivemind's codes. A code that it receives is decoded before it is added."""
    from hivemind import compression

    chunk = nbytes // 4 // HOSTS
    own = torch.Generator().manual_seed(0)
    parts = torch.randn(HOSTS * chunk, generator=own).split(chunk)
    info = compression.CompressionInfo.from_tensor(parts[0])
    rows: list[Record] = []
    for name in PEERS:
        code = getattr(compression, name)()
        others = [code.compress(torch.randn(chunk, generator=own), info) for _ in range(HOSTS - 1)]
        codes = [code.compress(part, info) for part in parts]
        steps = {
            "encode": lambda code=code: [code.compress(part, info) for part in parts],
            "add": lambda code=code, others=others: [parts[0].add_(code.extract(other)) for other in others],
            "decode": lambda code=code, codes=codes: [code.extract(each) for each in codes],
        }
        error = float((code.extract(codes[1]) - parts[1]).square().mean().sqrt())  # nothing is added to this part
        rows.append({"code": f"hivemind {name}"} | _times(steps, nbytes, repeat) | {"rms": error})
    return rows


def _times(steps: Mapping[str, Callable[[], object]], nbytes: int, repeat: int) -> Record:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(own) for name, own in times.items()}
    whole = sum(medians.values())
    return {
        "ms": {name: round(1e3 * seconds, 3) for name, seconds in medians.items()},
        "gb_per_s": nbytes / whole / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records there")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--hivemind", metavar="PYTHON", help="the Python of an environment with hivemind")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peer:
        print(json.dumps(hivemind(args.mib << 20, args.repeat)))
        return 0
    rows: list[Record] = [
        {
            "what": "8-bit codes on one core",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "mib": args.mib,
            "repeat": args.repeat,
            "hosts": HOSTS,
        }
    ]
    rows += ours(args.mib << 20, args.repeat)
    if args.hivemind:
        command = [args.hivemind, "-W", "ignore", __file__, "--peer", "--mib", str(args.mib), "--repeat", str(args.repeat)]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE).stdout
        rows += json.loads(said.splitlines()[-1])
    for row in rows[1:]:
        print(row)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
