"""How long is an elastic job held up when a rank dies? `kill -9` at random moments, with replacements.

    python benchmarks/elastic_kills.py [--kills 50] [--ranks 4] [--seed 0] [--json FILE]

One job of `phalanx run --ranks 4 --replace 1000` trains a small network. Again and again a rank is killed at a random moment: any
rank, rank 0 as often as the others, in whatever it is doing. A row says how long it took until the survivors had finished a step
without the dead one, and until its replacement took part. At the end, every sample of every epoch must have been trained exactly
once, all ranks must have the same weights, and one process that makes the same steps must get the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from elastic_training import N, replay, rows, steps_of

PROGRAM = Path(__file__).parent / "elastic_training.py"
RECENT = 2000  # rows in which the end of a step is looked for
DEADLINE = 150.0  # seconds until the next step, or the next rank, must be there


class Follow:
    """The records of a running job, as they are written."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._read = directory, dict[Path, int]()
        self.rows: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        for path in self._directory.glob("member*.jsonl"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            new = [json.loads(line) for line in whole.splitlines()]
            self.rows += new
            self.starts += [row for row in new if row["kind"] == "start"]
        return self.rows

    def wait(self, found: Any, what: str) -> Any:
        until = time.monotonic() + DEADLINE
        while (answer := found(self.look())) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"{what} did not happen within {DEADLINE:g} s")
            time.sleep(0.01)  # longer would be seen in the result, less would be seen on the machine
        return answer


def print_stacks(processes: Iterable[int]) -> None:
    """Let these ranks and agents, which handle SIGUSR1, print what their threads do."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1)


def pids(records: list[dict[str, Any]], dead: set[int]) -> dict[int, int]:
    """The processes of the members that take part."""
    return {row["member"]: row["pid"] for row in records if row["kind"] == "start" and row["member"] not in dead}


@contextlib.contextmanager
def started(ranks: int, directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "phalanx", "run", "--ranks", str(ranks), "--replace", "100000", str(PROGRAM), str(directory)]
    job = subprocess.Popen([*command, *options], env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(40)
        if job.poll() is None:
            job.kill()
            job.wait()


def kill_one(follow: Follow, dead: set[int], generator: random.Random, ranks: int) -> dict[str, Any]:
    """Kill a rank when all are there, and wait until a step was made without it, by all that are left."""
    follow.wait(lambda records: True if len(pids(follow.starts, dead)) == ranks else None, "a full world")
    taking_part = set(pids(follow.starts, dead))
    follow.wait(lambda records: _step_by(records, taking_part), "a step of all ranks")
    time.sleep(generator.uniform(0, 0.3))
    victim = generator.choice(sorted(taking_part))
    before = follow.look()[-1]
    last = next(row for row in reversed(follow.rows) if row["member"] == victim)["kind"]
    at = time.time()
    os.kill(pids(follow.starts, dead)[victim], signal.SIGKILL)
    dead.add(victim)
    survivors = taking_part - {victim}
    done = follow.wait(lambda records: _step_by(records, survivors, after=at, without=victim), "a step of the survivors")
    joined = follow.wait(lambda records: next((row for row in follow.starts if row["at"] > at), None), "a replacement")
    again = survivors | {joined["member"]}
    full = follow.wait(lambda records: _step_by(records, again, after=at), "all ranks again")
    return {
        "kind": "kill",
        "victim": victim,
        "last_record_of_victim": last,
        "step": before.get("step"),
        "seconds_to_next_step": round(done - at, 3),
        "seconds_to_full_world": round(full - at, 3),
        "seconds_from_import_to_full_world": round(full - joined["imported"], 3),
    }


def _step_by(records: list[dict[str, Any]], members: set[int], *, after: float = 0.0, without: int | None = None) -> float | None:
    """When all of these members had finished a step that they alone made, or with whoever else came but not `without`."""
    times: dict[int, dict[int, float]] = {}
    for row in records[-RECENT:]:
        if row["kind"] != "step" or row["at"] < after:
            continue
        who = set(row["contributors"])
        if who == members if without is None else members <= who and without not in who:
            times.setdefault(row["step"], {})[row["member"]] = row["at"]
    complete = [max(own.values()) for own in times.values() if own.keys() >= members]
    return min(complete) if complete else None


def check(directory: Path, *, exact: bool) -> dict[str, Any]:
    """What the records say about samples and weights."""
    records = rows(directory)
    steps = steps_of(records)
    used = Counter(i for _, took, _ in steps for ids in took.values() for i in ids)
    ends = {row["weights"] for row in records if row["kind"] == "end"}
    torch.set_num_threads(1)
    return {
        "kind": "check",
        "steps": len(steps),
        "samples_exact": len(used) == N and len(set(used.values())) == 1,
        "times_each": sorted(set(used.values())),
        "weights_equal": len(ends) == 1,
        "equal_to_one_process": replay(steps) in ends if exact else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    generator = random.Random(args.seed)
    header = {
        "kind": "header",
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        **{name: value for name, value in vars(args).items() if name != "json"},
    }
    table: list[dict[str, Any]] = [header]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        with started(args.ranks, directory, "epochs=100000", f"stop_file={directory / 'stop'}", "pause=0.02") as job:
            follow, dead = Follow(directory), set[int]()
            for number in range(args.kills):
                row = kill_one(follow, dead, generator, args.ranks)
                table.append(row)
                print(f"{number:3}", *row.values(), flush=True)
            (directory / "stop").touch()
            code = job.wait(DEADLINE)
        table.append(check(directory, exact=True) | {"exit_code": code})
    seconds = [row["seconds_to_next_step"] for row in table if row["kind"] == "kill"]
    table.append({"kind": "summary", "kills": len(seconds), "median": statistics.median(seconds), "worst": max(seconds)})
    for row in table[-2:]:
        print(row)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in table))


if __name__ == "__main__":
    main()
