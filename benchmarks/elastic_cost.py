"""What does elastic=True cost while no rank dies? ResNet-50 at 64 pixels, 2 images per rank, 4 ranks, with and without, in turns.

    python benchmarks/elastic_cost.py [--blocks 12] [--steps 4] [--json FILE]

Two jobs of 4 ranks are alive: one of `phalanx run` with elastic=True, one of torchrun without. They take turns: while one makes a
few steps, the other one sleeps. A row has the median seconds of a step of one turn; the last row has the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import phalanx

DEADLINE = 200.0


def rank(directory: Path, kind: str, blocks: int, steps: int) -> None:
    warnings.simplefilter("ignore")
    comm = phalanx.create_communicator(elastic=kind == "elastic", timeout=DEADLINE)
    torch.manual_seed(0)
    model = phalanx.models.resnet50()
    opt = phalanx.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), comm, bucket_bytes=8 << 20
    )
    if kind == "elastic":
        opt.share(model=model)
    x, y = torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))
    for block in range(-1, blocks):  # the first one warms up
        until = time.monotonic() + DEADLINE
        while not (directory / f"{kind}{block}").exists():
            time.sleep(0.005)
            assert time.monotonic() < until
        comm.barrier()
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            opt.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            times.append(time.perf_counter() - begun)
        if comm.rank == 0:
            fresh = directory / f"fresh{kind}{block}"
            fresh.write_text(json.dumps(times))
            fresh.rename(directory / f"{kind}{block}.done")
    comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rank:
        return rank(Path(args.rank[0]), args.rank[1], args.blocks, args.steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job ends with this program
    rows: list[dict[str, Any]] = [
        {
            "kind": "config",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "ranks": 4,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
    ]
    with tempfile.TemporaryDirectory() as place:
        directory, me = Path(place), str(Path(__file__).absolute())
        options = ["--blocks", str(args.blocks), "--steps", str(args.steps), "--rank", place]
        starts = {
            "elastic": ["-m", "phalanx", "run", "--ranks", "4", me, *options, "elastic"],
            "plain": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", me, *options, "plain"],
        }
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        jobs = [subprocess.Popen([sys.executable, *words], env=env, stderr=subprocess.DEVNULL) for words in starts.values()]
        try:
            for block in range(-1, args.blocks):
                order = sorted(starts) if block % 2 else sorted(starts, reverse=True)
                for kind in order:
                    (directory / f"{kind}{block}").touch()
                    until = time.monotonic() + DEADLINE
                    while not (done := directory / f"{kind}{block}.done").exists():
                        time.sleep(0.01)
                        assert time.monotonic() < until, f"{kind} does not come"
                    times = json.loads(done.read_text())
                    rows.append({"kind": "turn", "job": kind, "block": block, "seconds": times})
            for job in jobs:
                job.wait(60)
        finally:
            for job in jobs:
                if job.poll() is None:
                    job.terminate()
                    job.wait(60)
    every = {kind: [s for r in rows if r.get("job") == kind and r["block"] >= 0 for s in r["seconds"]] for kind in starts}
    medians = {kind: statistics.median(values) for kind, values in every.items()}
    rows.append(
        {"kind": "ratio", "elastic_to_plain": medians["elastic"] / medians["plain"], "steps": len(every["plain"])} | medians
    )
    print(json.dumps(rows[-1]))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return None


if __name__ == "__main__":
    main()
