"""A rank that is slower than the others: is it named, and does rebalancing bring the speed back?

    python benchmarks/slow_ranks.py [--runs 20] [--clean 2000] [--json FILE]

Jobs of `phalanx run --ranks 4`. A rank takes 5 ms for every sample of its share, from the end of a step to backward, and one rank
15 ms: with equal shares the ranks take 50, 50, 50 and 150 ms per step. Most of it is slept, because the machine has fewer cores
than the job has ranks. Ideal is 60 ms, with shares of 12, 12, 12 and 4. Rows of kind `named`: which rank was
named, with which cause, after how many steps. The row of kind `rebalance` has the throughput after the shares have settled, and
how far the weights are from those of one process. The row of kind `clean` counts ranks that were named although none was slow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import phalanx

BATCH, N = 40, 4000
FAST, SLOW = 0.005, 0.015  # seconds per sample


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(N, 6, generator=generator), torch.randint(3, (N,), generator=generator), torch.arange(N)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model.double(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Sleepy:
    """A data set whose samples take time to read."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._columns = seconds, data()

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self._seconds)
        return tuple(column[i] for column in self._columns)


def rank(directory: Path, options: dict[str, str]) -> None:
    """One rank of a job."""
    warnings.simplefilter("ignore")
    slow, begins, steps = int(options["slow"]), int(options["begins"]), int(options["steps"])
    cause, per_sample = options["cause"], float(options.get("per_sample", FAST))
    comm = phalanx.create_communicator(elastic=True, timeout=30)
    model, inner = build()
    opt = phalanx.create_multi_node_optimizer(inner, comm, sync=phalanx.AllReduce(on_slow=options["policy"]))
    source: Any = Sleepy(SLOW if comm.member == slow and cause == "input" else 0.0) if cause == "input" else data()
    loader = phalanx.data.Loader(source, comm, batch=BATCH, last="keep", workers=0)
    opt.share(model=model, loader=loader)
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    while opt.steps < steps:
        for x, y, ids in loader:
            is_slow = comm.member == slow and opt.steps >= begins and cause == "compute"
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.double()), y, reduction="sum" if not len(y) else "mean")
            time.sleep(max(0.0, begun + len(ids) * (SLOW if is_slow else per_sample) - time.perf_counter()))
            loss.backward()
            opt.step()
            begun, before = time.perf_counter(), begun
            rows.append({"step": opt.steps, "ids": ids.tolist(), "seconds": begun - before, "ranks": comm.size})
            if opt.steps == steps:
                break
    weights = [p.detach().reshape(-1).tolist() for p in model.parameters()]
    found = [{"step": s.step, "rank": s.rank, "cause": s.cause, "factor": s.factor} for s in opt.slow_ranks]
    (directory / f"member{comm.member}.json").write_text(json.dumps({"rows": rows, "slow": found, "weights": weights}))
    comm.close()


def job(policy: str, *, slow: int, begins: int, steps: int, cause: str = "compute", per_sample: float = FAST) -> dict[int, Any]:
    """Run a job, and what its members wrote."""
    with tempfile.TemporaryDirectory() as directory:
        words = {"policy": policy, "slow": slow, "begins": begins, "steps": steps, "cause": cause, "per_sample": per_sample}
        command = [sys.executable, "-m", "phalanx", "run", "--ranks", "4", str(Path(__file__).absolute()), "--rank", directory]
        subprocess.run(
            [*command, *(f"{name}={value}" for name, value in words.items())],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            timeout=300,
            stderr=subprocess.DEVNULL,
        )
        return {int(path.stem[6:]): json.loads(path.read_text()) for path in Path(directory).glob("member*.json")}


def named(seed: int) -> dict[str, Any]:
    chosen = random.Random(seed)
    slow, begins, cause = chosen.randrange(4), chosen.randrange(11, 20), chosen.choice(["compute", "input"])
    begins = 0 if cause == "input" else begins
    found = job("warn", slow=slow, begins=begins, steps=begins + 24, cause=cause, per_sample=0.001)[0]["slow"]
    right = bool(found) and (found[0]["rank"], found[0]["cause"]) == (slow, cause)
    after = found[0]["step"] - begins if found else None
    return {"kind": "named", "seed": seed, "slow": slow, "cause": cause, "begins": begins, "right": right, "after_steps": after}


def rebalanced(steps: int = 160) -> dict[str, Any]:
    members = job("rebalance", slow=3, begins=0, steps=steps)
    settled = [row["seconds"] for row in members[0]["rows"][steps // 2 :]]
    shares = [len(members[m]["rows"][-1]["ids"]) for m in sorted(members)]
    ideal = BATCH / (3 / FAST + 1 / SLOW)
    used = Counter(i for own in members.values() for row in own["rows"] for i in row["ids"])
    x, y, _ = data()
    model, opt = build()
    for number in range(steps):
        ids = torch.tensor([i for m in sorted(members) for i in members[m]["rows"][number]["ids"]])
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x[ids].double()), y[ids]).backward()
        opt.step()
    own = torch.cat([torch.tensor(w, dtype=torch.float64) for w in members[0]["weights"]])
    oracle = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "kind": "rebalance",
        "steps": steps,
        "shares": shares,
        "ideal_ms": 1e3 * ideal,
        "median_ms": 1e3 * statistics.median(settled),
        "of_ideal": ideal / statistics.mean(settled),
        "samples_once": set(used.values()) == {1} or {1, 2} >= set(used.values()),
        "error": float((own - oracle).abs().max()),
        "weights_equal": len({json.dumps(m["weights"]) for m in members.values()}) == 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--clean", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rank:
        return rank(Path(args.rank[0]), dict(word.split("=", 1) for word in args.rank[1:]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job ends with this program
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    write(args.json, {"kind": "config", "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "ranks": 4} | versions)
    write(args.json, rebalanced())
    for seed in range(args.runs):
        write(args.json, named(seed))
    if args.clean:
        found = job("warn", slow=-1, begins=0, steps=args.clean, per_sample=0.001)[0]["slow"]
        write(args.json, {"kind": "clean", "steps": args.clean, "named": len(found)})
    return None


def write(path: Path | None, row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
