"""Does a run that is killed and resumed end as if nothing had happened? `kill -9` at random moments, then `--resume`.

    python benchmarks/kill_and_resume.py [--runs 10] [--kills 3] [--first 0] [--json FILE]

Each run of `phalanx train digits` on 2 ranks, with a checkpoint every 4 steps and after every epoch, is killed several times:
one rank, all ranks, or the launcher and all ranks, either some random time after the first step or, every other time, while a
checkpoint is being written. Each time it is resumed, and after the last time it ends by itself. Its weights and momentum must
equal the undisturbed run's bit for bit. Rows say what was killed when, where the next start went on, and what came out.
"""

from __future__ import annotations

import argparse
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

from phalanx.train.manifest import find_places
from phalanx.train.restore import read
from phalanx.train.rows import read_rows

RANKS, DEADLINE = 2, 120.0
SETTINGS = ["epochs=6", "checkpoint_every_steps=4"]
WITHIN = 0.8  # seconds of training in which a kill comes


def start(out: Path, *, resume: bool) -> subprocess.Popen[bytes]:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "phalanx", "train", "digits", "--ranks", str(RANKS), "--out", str(out), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *(["--resume"] if resume else [])], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def ranks_of(launcher: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    except OSError:
        return []


def starts(out: Path) -> list[int]:
    """The steps at which the starts of the run began."""
    return [row["step"] for row in read_rows(out / "metrics.jsonl") if row["kind"] == "start"]


def being_written(out: Path) -> bool:
    return any(".tmp-" in path.name for path in (out / "checkpoints").glob("step*"))


def kill_once(out: Path, generator: random.Random, number: int, before: int) -> dict[str, Any]:
    """Start the run, or resume it, and kill it; `before` is how many starts it has had."""
    process = start(out, resume=before > 0)
    deadline = time.monotonic() + DEADLINE
    while len(starts(out)) <= before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    moment = generator.uniform(0, WITHIN)
    time.sleep(moment)
    amid_checkpoint = number % 2 == 1
    while amid_checkpoint and not being_written(out) and process.poll() is None and time.monotonic() < deadline:
        pass  # a checkpoint of this size takes milliseconds
    whom = generator.choice(["one rank", "all ranks", "launcher and ranks"])
    ranks = ranks_of(process.pid)
    victims = {"one rank": ranks[:1] if generator.random() < 0.5 else ranks[1:], "all ranks": ranks}.get(
        whom, [process.pid, *ranks]
    )
    caught = being_written(out)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    killed = process.poll() is None or whom == "launcher and ranks"
    process.wait(DEADLINE)
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    rows = read_rows(out / "metrics.jsonl")
    steps = max((row["step"] for row in rows if "step" in row), default=0)
    return {
        "killed": whom if killed and victims else "nobody: it had ended",
        "seconds_after_start": round(moment, 3),
        "last_row_of_step": steps,
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


def finish(out: Path, *, resume: bool) -> int:
    process = start(out, resume=resume)
    try:
        return process.wait(DEADLINE)
    finally:
        process.kill()


def study(first: int, runs: int, kills: int, directory: Path) -> Iterator[dict[str, Any]]:
    """One row per kill, one per run, and a summary."""
    assert finish(directory / "undisturbed", resume=False) == 0
    wanted = final_state(directory / "undisturbed")
    total = right = 0
    for run in range(first, first + runs):
        out, generator = directory / str(run), random.Random(run)
        real = 0
        for number in range(kills):
            row = kill_once(out, generator, run + number, len(starts(out)))
            real += row["killed"] != "nobody: it had ended"
            yield {"kind": "kill", "run": run, "number": number, **row}
        code = finish(out, resume=True)
        same = code == 0 and equal(final_state(out), wanted)
        total, right = total + real, right + real * same
        yield {"kind": "run", "run": run, "kills": real, "continued_at_steps": starts(out), "exit_code": code, "equal": same}
    yield {"kind": "summary", "kills": total, "resumed_and_equal": right}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first run: the moments depend on it")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=3, help="of each run")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    args = parser.parse_args()
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
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for row in chain([header], study(args.first, args.runs, args.kills, Path(directory))):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 0 if rows[-1]["kills"] == rows[-1]["resumed_and_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
