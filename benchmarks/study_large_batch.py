"""Test accuracy against batch size at a fixed number of epochs, as techniques for large batches are added one after the other.

    python benchmarks/study_large_batch.py --data fashion-mnist:DIR [cifar10:DIR] [--out FILE] [--quick | --table | --docs]

Every run is a recipe with settings, trained by the trainer of `phalanx train` on 2 processes, and one row of FILE: `phalanx train
RECIPE --ranks 2 --set SETTING ...` does it again. Runs that are there already are left out, so the study can be interrupted and
continued. Seed 0 of everything comes first.

Rates are found with the same budget for every method, on a seed that counts for nothing else: three at the smallest batch for
each optimizer, four at the largest for each method, and one more where the best was at the edge. Plain SGD and warm-up then
follow the linear rule from the smallest batch on; for the others (and for SGD once more, "own rate") rates grow by equal factors
between the two that were found. There is no third part of the data to choose by, so all rates are chosen by test accuracy, which
flatters all methods alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from local_ranks import finish, started
from study_large_batch_runs import DATA, METHODS, RANKS, Run, grid, searches, untried_rate
from study_large_batch_table import table, write_docs

from phalanx.train.rows import read_rows

SEEDS = (0, 1, 2)
PATIENT = 3600.0  # seconds: accuracy must not depend on how busy the machine is
RESULTS = Path(__file__).parent / "results" / "study_large_batch.jsonl"


def train_here(runs: list[Run], sources: dict[str, str]) -> None:
    """Be one rank: train one run after the other; rank 0 prints a row for each."""
    import torch

    import phalanx
    from phalanx.cli.train import resolve
    from phalanx.train.trainer import train

    torch.set_num_threads(1)
    with phalanx.create_communicator(timeout=PATIENT) as comm:
        for run in runs:
            data = DATA[run.data]
            settings = data.settings(METHODS[run.method], run.batch, run.rate, run.epochs)
            config = resolve(data.recipe, [f"data.source={sources[run.data]}", f"seed={run.seed}", *settings])
            result = train(config, comm, show=False)
            row = vars(run) | {
                "accuracy": result.top1,
                "loss": result.loss if math.isfinite(result.loss) else None,
                "updates": result.steps,
                "seconds": round(result.seconds, 1),
                "ranks": comm.size,
                "recipe": data.recipe,
                "settings": settings,
                "date": datetime.date.today().isoformat(),
            }
            if comm.rank == 0:
                print(json.dumps(row), flush=True)


class Study:
    """The rows that are there, and how others get there."""

    def __init__(self, out: Path, sources: dict[str, str]) -> None:
        self.out, self.sources = out, sources
        self.rows = read_rows(out)
        if not self.rows:
            self.append(
                {
                    "what": "study of large batches",
                    "date": datetime.date.today().isoformat(),
                    "python": platform.python_version(),
                    "torch": version("torch"),
                    "cores": os.cpu_count(),
                }
            )

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def do(self, wanted: Iterable[Run]) -> None:
        """Those that are missing, in one world: most of the time of a small run would be the start of its processes."""
        missing = [run for run in wanted if run.found_in(self.rows) is None]
        if not missing:
            return
        tasks = json.dumps([vars(run) for run in missing])
        command = [sys.executable, __file__, "--data", *self.sources.values(), "--rank", tasks]
        with started(command, RANKS) as ranks:
            assert ranks[0].stdout is not None  # `started` makes pipes
            for line in ranks[0].stdout:
                row = json.loads(line)
                self.append(row)
                what = f"{row['purpose']}, {row['data']}: {row['method']}, batch {row['batch']}, rate {row['rate']:g}"
                print(f"# {what}, seed {row['seed']}: {row['accuracy']:.2%} in {row['seconds']:.0f} s", flush=True)
            finish(ranks, deadline=60)

    def everything(self) -> None:
        """Fashion-MNIST's seed 0, then CIFAR-10's, then the other seeds of both."""
        chosen = [DATA[name] for name in self.sources]
        for seed in SEEDS:
            for data in chosen:
                if seed == SEEDS[0]:
                    self.do(searches(data))
                self.do(grid(data, seed, self.rows))

    def quick(self) -> None:
        """Few epochs of every method at both ends, at a rate that nobody searched: whether it runs, not what is true."""
        runs = []
        for name in self.sources:
            data = DATA[name]
            for end in (0, -1):
                for method in (METHODS[method] for method in data.methods):
                    if data.has(method, data.batches[end]):
                        rate = untried_rate(data, method, end)
                        runs.append(Run(name, "quick", method.name, data.batches[end], rate, SEEDS[0], data.quick_epochs))
        self.do(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["fashion-mnist:data/fashion-mnist", "cifar10:data/cifar-10-batches-bin"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a few minutes: whether it runs, not what is true")
    parser.add_argument("--table", action="store_true", help="only print the table of the rows that are there")
    parser.add_argument(
        "--docs", action="store_true", help="put the rows that are there into docs/large-batch.md and its picture"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sources = {source.partition(":")[0]: source for source in args.data}
    if unknown := sources.keys() - DATA.keys():
        raise SystemExit(f"--data {', '.join(unknown)}: there are {', '.join(DATA)}")
    if args.rank:
        train_here([Run(**task) for task in json.loads(args.rank)], sources)
        return
    study = Study(args.out, sources)
    if args.quick:
        study.quick()
    elif not (args.table or args.docs):
        study.everything()
    if args.docs:
        write_docs(study.rows)
    print(table(study.rows, "quick" if args.quick else "grid"))


if __name__ == "__main__":
    main()
