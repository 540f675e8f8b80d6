"""Scripts of Lightning, accelerate and transformers: how long a step takes with gloo, and with what Phalanx offers instead.

    python -m benchmarks.frameworks [lightning accelerate transformers] [--ranks 2] [--turns 7] [--length 5] ... [--json FILE]

gloo       the script as it was
phalanx    one word changed: the backend
hook       DistributedDataParallel with phalanx.ddp_hook
optimizer  the multi-node optimizer, without DistributedDataParallel

The jobs of one framework live at the same time and take turns of `length` steps; those that wait sleep. A row has the median over
the turns of rank 0's milliseconds per step, without the first turn, and what gloo's turns took in relation to it, turn by turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from benchmarks.frameworks_rank import CONTENDERS, SCRIPTS, Turns
from benchmarks.local_ranks import finish, started

SECONDS = 240  # for one framework


def rank(args: argparse.Namespace) -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"  # Lightning looks for it
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    framework, contender = args.rank.split("/")
    turns = Turns(args.directory, args.length, args.turns)
    SCRIPTS[framework](contender, turns, args.batch)
    turns.tell()
    sys.stdout.flush()
    os._exit(0)  # the frameworks' own endings take seconds, and nothing is left to do


def measure(framework: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    results: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as jobs, tempfile.TemporaryDirectory() as root:
        running = {}
        for contender in CONTENDERS[framework]:
            own = Path(root, contender)
            own.mkdir()
            options = ["--turns", args.turns, "--length", args.length, "--batch", args.batch, "--directory", own]
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.frameworks", "--rank", f"{framework}/{contender}"]
            env = {"RES_OPTIONS": "timeout:1 attempts:1"}  # torch's store asks for names: a DNS that does not answer takes 5 s
            running[contender] = jobs.enter_context(started([*command, *map(str, options)], args.ranks, env))
        deadline = time.monotonic() + SECONDS
        for turn in range(args.turns):
            for contender, ranks in running.items():
                own = Path(root, contender)
                (own / f"go.{turn}").touch()
                while len(list(own.glob(f"done.{turn}.*"))) < args.ranks:
                    if time.monotonic() > deadline or any(each.poll() for each in ranks):
                        raise SystemExit(f"{framework} with {contender}: turn {turn} did not end")
                    time.sleep(0.002)
        for contender, ranks in running.items():
            said = finish(ranks, deadline=60)[0]
            results[contender] = json.loads(said.strip().splitlines()[-1])
    return [row(framework, contender, results) for contender in results]


def row(framework: str, contender: str, results: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    mine, gloo = (results[each]["seconds"][1:] for each in (contender, "gloo"))
    ratios = [theirs / ours for theirs, ours in zip(gloo, mine)]
    losses, theirs = results[contender]["losses"], results["gloo"]["losses"]
    return {
        "framework": framework,
        "contender": contender,
        "ms": round(1e3 * statistics.median(mine), 1),
        "times_as_fast": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "loss_differs_by": max(abs(a - b) for a, b in zip(losses, theirs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", default=list(SCRIPTS), help="lightning, accelerate, transformers")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--length", type=int, default=5, help="steps in a turn")
    parser.add_argument("--batch", type=int, default=2, help="per rank")
    parser.add_argument("--json", type=Path, help="append the records to this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args)
        return
    unknown = [name for name in args.frameworks if name not in SCRIPTS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(SCRIPTS)}")
    missing = [name for name in args.frameworks if importlib.util.find_spec(name) is None]
    if missing:
        print(f"left out, not installed: {', '.join(missing)}. `make frameworks` installs them")
    named = [name for name in args.frameworks if name not in missing]
    run = {
        "kind": "run",
        "ranks": args.ranks,
        "batch": args.batch,
        "turns": args.turns,
        "length": args.length,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
    } | {name: importlib.import_module(name).__version__ for name in named}
    records = [run]
    print("  ".join(f"{key} {value}" for key, value in run.items()))
    for name in named:
        for record in measure(name, args):
            print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
            records.append(record)
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
