"""Does an elastic job leak? Ranks die and join hundreds of times; memory, threads, files and processes are counted meanwhile.

    python benchmarks/elastic_leaks.py [--changes 500] [--ranks 3] [--json FILE]

One job of `phalanx run` trains a small network. Again and again a rank is killed, and its replacement joins: two changes of
membership. Rank 0 lives through all of them. Every row has what rank 0 and the supervisor use: resident memory, threads, open
descriptors, sockets; and how many processes and shared-memory files the whole job has. New processes are forked from one that has
imported torch, so that a change takes a second. The last row has the growth per change after the first fifth.
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from elastic_kills import PROGRAM, Follow, _step_by, pids, print_stacks  # noqa: E402
from tests.warm.popen import Python, warm  # noqa: E402


def used(pid: int) -> dict[str, int]:
    """What a process uses now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if _there(entry.path)]
    return {
        "rss_kb": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


def _there(path: str) -> bool:
    with contextlib.suppress(OSError):
        os.readlink(path)
        return True
    return False


def children(pid: int) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{int(entry.name)}/stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def sample(changes: int, job: subprocess.Popen[bytes], survivor: int) -> dict[str, Any]:
    shared = sum(1 for _ in os.scandir("/dev/shm"))
    processes = len(children(job.pid))
    return {
        "kind": "sample",
        "changes": changes,
        "rank": used(survivor),
        "supervisor": used(job.pid),
        "processes": processes,
        "dev_shm": shared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job ends with this program
    warm()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    rows: list[dict[str, Any]] = [
        {"kind": "config", "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "ranks": args.ranks} | versions
    ]
    generator = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        command = [sys.executable, "-m", "phalanx", "run", "--ranks", str(args.ranks), "--replace", "100000", str(PROGRAM), place]
        options = ["epochs=100000", f"stop_file={directory / 'stop'}", "pause=0.002"]
        with (directory / "log").open("wb") as log:
            job = Python([*command, *options], env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=log)
        try:
            follow, dead = Follow(directory), set[int]()
            for change in range(0, args.changes + 1, 2):
                full = lambda records: True if len(pids(records, dead)) == args.ranks else None  # noqa: E731
                follow.wait(full, "a full world")
                members = set(pids(follow.rows, dead))
                follow.wait(lambda records, m=members: _step_by(records[-400:], m), "a step of all ranks")
                if change % max(2, args.changes // 20 // 2 * 2) == 0:
                    rows.append(sample(change, job, pids(follow.rows, dead)[0]))
                    print(json.dumps(rows[-1]), flush=True)
                victim = generator.choice(sorted(members - {0}))
                os.kill(pids(follow.rows, dead)[victim], signal.SIGKILL)
                dead.add(victim)
                follow.rows = [row for row in follow.rows if row["kind"] == "start"] + follow.rows[-200:]
            (directory / "stop").touch()
            code = job.wait(60)
        except TimeoutError:
            print_stacks([job.pid, *children(job.pid)])
            print((directory / "log").read_text(errors="replace")[-30000:], file=sys.stderr)
            raise
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(60)
    samples = [row for row in rows if row["kind"] == "sample"]
    settled = samples[len(samples) // 5 :]
    span = settled[-1]["changes"] - settled[0]["changes"]
    growth = {
        f"{who}_{name}": (settled[-1][who][name] - settled[0][who][name]) / span
        for who in ("rank", "supervisor")
        for name in samples[0]["rank"]
    }
    left = [pid for pid in children(os.getpid()) if pid != job.pid]
    rows.append({"kind": "growth_per_change", "exit_code": code, "changes": span, "children_left": len(left) - 1} | growth)
    print(json.dumps(rows[-1]))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
