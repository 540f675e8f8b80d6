"""Does a run that is killed and resumed end as if nothing had happened? `kill -9` at random moments, then `--resume`.

    python benchmarks/kill_and_resume.py [--runs 10] [--kills 3] [--first 0] [--json FILE] [--work DIR]

Each run of `phalanx train digits` on 2 ranks, with a checkpoint every 4 steps and after every epoch, is killed several times:
one rank, all ranks, or the launcher and all ranks, either some random time after the first step or, every other time, while a
checkpoint is being written. Each time it is resumed, and after the last time it ends by itself. Its weights and momentum must
equal the undisturbed run's bit for bit. Rows say what was killed when, where the next start went on, and what came out.

With `--work` the runs are kept there, and a study that was cut short goes on after the rows that FILE has of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from phalanx.train.checkpoint.places import find_places
from phalanx.train.checkpoint.read import read
from phalanx.train.rows import read_rows

RANKS, DEADLINE = 2, 120.0
SETTINGS = ["epochs=6", "checkpoint_every_steps=4"]
WITHIN = 0.8  # seconds of training in which a kill comes
NOBODY = "nobody: it had ended"


@contextlib.contextmanager
def started(out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run, or its next start: the command line is the same. Nothing of it is left behind, whatever happens here.

    What it says of errors is in a file beside its directory.
    """
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "phalanx", "train", "digits", "--ranks", str(RANKS), "--out", str(out), "--resume", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with errors_of(out).open("wb") as errors:
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        yield process
    finally:
        kill(process.pid, *ranks_of(process.pid))
        process.wait(DEADLINE)


def errors_of(out: Path) -> Path:
    return out.with_suffix(".stderr")


def ranks_of(launcher: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    except OSError:
        return []


def kill(*pids: int) -> None:
    """`kill -9`."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)


def starts(out: Path) -> list[int]:
    """The steps at which the starts of the run began."""
    return [row["step"] for row in read_rows(out / "metrics.jsonl") if row["kind"] == "start"]


def being_written(out: Path) -> bool:
    return any(".tmp-" in path.name for path in (out / "checkpoints").glob("step*"))


def kill_once(out: Path, generator: random.Random, *, amid_checkpoint: bool) -> dict[str, Any]:
    """Start the run, or resume it, and kill it."""
    before = len(starts(out))
    deadline = time.monotonic() + DEADLINE
    with started(out) as process:
        while len(starts(out)) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        moment = generator.uniform(0, WITHIN)
        time.sleep(moment)
        while amid_checkpoint and not being_written(out) and process.poll() is None and time.monotonic() < deadline:
            pass  # a checkpoint of this size takes milliseconds
        whom, one = generator.choice(["one rank", "all ranks", "launcher and ranks"]), generator.randrange(RANKS)
        ranks, caught = ranks_of(process.pid), being_written(out)
        kill(*{"one rank": ranks[one : one + 1], "all ranks": ranks, "launcher and ranks": [process.pid, *ranks]}[whom])
        process.wait(DEADLINE)
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {
        "killed": whom if process.returncode else NOBODY,
        "seconds_after_start": round(moment, 3),
        "last_row_of_step": max((row["step"] for row in read_rows(out / "metrics.jsonl") if "step" in row), default=0),
        "while_writing": caught,
        "exit_code": process.returncode,
    }


def final_state(out: Path) -> dict[str, Any]:
    directory = out / "checkpoints"
    return {name: saved.value for name, saved in read(directory, find_places(directory)[0], ["model", "optimizer"]).saved.items()}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return bool(a == b)


def finish(out: Path) -> int:
    """Let the run come to its end."""
    with started(out) as process:
        return process.wait(DEADLINE)


def study(first: int, runs: int, kills: int, directory: Path, past: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per kill, one per run, and a summary; without the rows that `past` has."""
    undisturbed = directory / "undisturbed"
    if not any(row["kind"] == "end" for row in read_rows(undisturbed / "metrics.jsonl")) and finish(undisturbed) != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{errors_of(undisturbed).read_text()}")
    wanted, rows = final_state(undisturbed), list(past)
    for run in range(first, first + runs):
        out = directory / str(run)
        for number in range(kills):
            if not some(rows, "kill", run=run, number=number):
                row = kill_once(out, random.Random(1000 * run + number), amid_checkpoint=(run + number) % 2 == 1)
                rows.append({"kind": "kill", "run": run, "number": number, **row})
                yield rows[-1]
        if not some(rows, "run", run=run):
            code = finish(out)
            same = code == 0 and equal(final_state(out), wanted)
            said = {} if same else {"stderr": errors_of(out).read_text()}
            real = sum(row["killed"] != NOBODY for row in some(rows, "kill", run=run))
            rows.append({"kind": "run", "run": run, "kills": real, "continued_at_steps": starts(out), "equal": same, **said})
            yield rows[-1]
    ended = some(rows, "run")
    equals = sum(row["kills"] for row in ended if row["equal"])
    yield {"kind": "summary", "kills": sum(row["kills"] for row in ended), "resumed_and_equal": equals}


def some(rows: list[dict[str, Any]], kind: str, **values: int) -> list[dict[str, Any]]:
    """The rows of a kind that have certain values."""
    return [row for row in rows if row["kind"] == kind and all(row[name] == value for name, value in values.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first run: the moments depend on it")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=3, help="of each run")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--work", type=Path, help="keep the runs in this directory, and go on with those that are there")
    args = parser.parse_args()
    if args.work and not args.json:
        parser.error("--work goes on after the rows of --json: name both")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of `finally`
    header = {
        "kind": "header",
        "program": "kill_and_resume",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ranks": RANKS,
        "settings": SETTINGS,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    past = read_rows(args.json) if args.work else []
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.work or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for row in chain([header], study(args.first, args.runs, args.kills, directory, past)):
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 0 if row["kills"] == row["resumed_and_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
