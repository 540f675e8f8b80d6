"""Equal weights on all ranks: drawn from one seed by every rank, against drawn by one and broadcast.

    python benchmarks/init_time.py [--ranks 2 4 8] [--repeat 5] [--json FILE]

ResNet-50, 102 MB. A rank of a cluster has cores of its own, and these ranks share those of one machine: so ranks draw in turn,
and the slowest counts, as if they had drawn at once. The broadcast is timed with all ranks at it, from a barrier to the end of
the last rank; rank 0 draws before it, which is counted as well. "hash" is the check that replaces sending: `check_replicas`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from local_ranks import finish, started

import phalanx
from phalanx.nn.init import check_replicas
from phalanx.nn.models.initial import initialize_

DEADLINE = 170  # seconds for one world


def in_turn(comm: phalanx.Communicator, act: Callable[[], Any]) -> float:
    """Seconds of `act` on the slowest rank, each rank alone."""
    seconds = 0.0
    for rank in range(comm.size):
        comm.barrier()
        if comm.rank == rank:
            begun = time.perf_counter()
            act()
            seconds = time.perf_counter() - begun
    return max(comm.allgather_obj(seconds))


def together(comm: phalanx.Communicator, act: Callable[[], Any]) -> float:
    """Seconds of `act` from a barrier to the end of the last rank."""
    comm.barrier()
    begun = time.perf_counter()
    act()
    return max(comm.allgather_obj(time.perf_counter() - begun))


def measure(repeat: int) -> dict[str, Any]:
    """Medians, on the ranks of this world."""
    torch.set_num_threads(1)

    def by_order() -> None:
        phalanx.seed_everything(0)
        initialize_(model)

    def by_name() -> None:
        phalanx.init_parameters_(model, seed=0, initialize=initialize_)

    with phalanx.create_communicator() as comm:
        model = phalanx.models.resnet50()
        found: dict[str, list[float]] = {"by order": [], "by name": [], "broadcast": [], "hash": []}
        for _ in range(repeat + 1):
            found["by order"].append(in_turn(comm, by_order))
            found["by name"].append(in_turn(comm, by_name))
            found["broadcast"].append(together(comm, lambda: phalanx.bcast_parameters(model, comm)))
            found["hash"].append(in_turn(comm, lambda: phalanx.nn.init.digest(model)))
            check_replicas(model, comm)
        medians = {name: statistics.median(values[1:]) for name, values in found.items()}  # the first one touches new memory
        return {"ranks": comm.size, "repeat": repeat} | {name: round(1000 * value, 1) for name, value in medians.items()}


def run(ranks: int, repeat: int) -> dict[str, Any]:
    """The row of a world of so many processes on this host."""
    with started([sys.executable, __file__, "--rank", "--repeat", str(repeat)], ranks) as world:
        row: dict[str, Any] = json.loads(finish(world, deadline=DEADLINE)[0])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | drawn in order, ms | drawn by name | drawn, then broadcast | of which broadcast | hash |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        both = row["by order"] + row["broadcast"]
        cells = [row["by order"], row["by name"], both, row["broadcast"], row["hash"]]
        lines.append(f"| {row['ranks']} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        row = measure(args.repeat)
        if os.environ["RANK"] == "0":
            print(json.dumps(row), flush=True)
        return
    first = {
        "what": "initialisation of ResNet-50 on all ranks, ms",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "cores": os.cpu_count(),
    }
    rows = [run(ranks, args.repeat) for ranks in args.ranks]
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in (first, *rows)), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
