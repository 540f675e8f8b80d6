"""Bytes that a schedule predicts against bytes that the interface counts, for every algorithm, 4 ranks on gloo.

    python benchmarks/bytes_on_the_wire.py [--ranks 4] [--mib 16] [--json FILE]

The ranks run in a network namespace of their own where that is allowed (root), so that the loopback counter sees nothing else;
otherwise on the machine's loopback, and the table says so. Each algorithm runs in both forms: as Moves, which is what Phalanx
does on gloo, and as the library's Collectives, whose bytes belong to gloo and not to the schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from local_ranks import finish, started

import phalanx
from phalanx.schedule import Collective, Schedule, lower, recursive_doubling, sent

REPEAT = 5
DEADLINE = 120  # seconds for all ranks of one form


def algorithms(n: int) -> list[Schedule]:
    grids = [(rows, n // rows) for rows in range(2, n) if n % rows == 0]
    return [
        phalanx.ring(n),
        *(phalanx.torus(*grid) for grid in grids),
        *(phalanx.hierarchical(*grid) for grid in grids),
        phalanx.halving_doubling(n),
        phalanx.tree(n),
        recursive_doubling(n),
    ]


def loopback_bytes() -> int:
    """What the loopback device of this namespace has sent since it came up."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("no loopback device")


def measure(n: int, size: int) -> Iterator[dict[str, Any]]:
    """One row per algorithm; runs on every rank, and rank 0 reads the counter."""
    form = os.environ["PHALANX_FORM"]
    for algorithm in algorithms(n):
        if form == "collectives" and not any(isinstance(op, Collective) for op in algorithm.ops()):
            continue
        with phalanx.create_communicator(algorithm, timeout=60) as comm:
            x = torch.ones(size // 4)
            comm.all_reduce(x)  # connections and buffers exist now
            comm.barrier()
            before = loopback_bytes()
            comm.barrier()
            started = time.perf_counter()
            for _ in range(REPEAT):
                comm.all_reduce(x, op="mean")
            comm.barrier()
            seconds = (time.perf_counter() - started) / REPEAT
            counted = (loopback_bytes() - before) / REPEAT
            assert bool((x == n).all())
            comm.barrier()
        predicted = float(sum(sent(lower(algorithm)))) * size
        yield {
            "algorithm": algorithm.name,
            "form": form,
            "ranks": n,
            "size": size,
            "predicted": predicted,
            "counted": counted,
            "ratio": counted / predicted,
            "ms": seconds * 1e3,
        }


def run_form(form: str, n: int, size: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--rank", "--ranks", str(n), "--mib", str(size >> 20)]
    with started(command, n, {"PHALANX_FORM": form}) as ranks:
        return [json.loads(line) for line in finish(ranks, deadline=DEADLINE)[0].splitlines()]


def in_own_namespace() -> bool:
    """Whether this process could move to a fresh network namespace with its loopback up."""
    try:
        os.unshare(os.CLONE_NEWNET)  # type: ignore[attr-defined]  # Python 3.12
    except AttributeError:
        if os.environ.get("PHALANX_BENCH_NAMESPACE"):
            return True
        allowed = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
        if allowed:
            inside = os.environ | {"PHALANX_BENCH_NAMESPACE": "1"}
            bring_up = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
            os.execvpe("unshare", ["unshare", "--net", *bring_up, sys.executable, *sys.argv], inside)
        return False
    except OSError:
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| algorithm | form | predicted, x S | counted, x S | counted / predicted |", "|---|---|---|---|---|"]
    for row in rows:
        predicted, counted = row["predicted"] / row["size"], row["counted"] / row["size"]
        lines.append(f"| {row['algorithm']} | {row['form']} | {predicted:.2f} | {counted:.2f} | {row['ratio']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=16, help="size S of the all-reduced buffer")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = args.mib << 20
    if args.rank:
        for row in measure(args.ranks, size):
            if os.environ["RANK"] == "0":
                print(json.dumps(row), flush=True)
        return
    private = in_own_namespace()
    rows = [row for form in ("moves", "collectives") for row in run_form(form, args.ranks, size)]
    where = "own network namespace" if private else "shared loopback"
    header = {
        "what": "bytes on the wire",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "ranks": args.ranks,
        "size": size,
        "repeat": REPEAT,
        "counter": f"lo tx_bytes, {where}",
    }
    print(f"# {json.dumps(header)}\n{table(rows)}")
    if args.json:
        args.json.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")


if __name__ == "__main__":
    main()
