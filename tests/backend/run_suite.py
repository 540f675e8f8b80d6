"""Run PyTorch's tests of a backend in slices, and keep one row per test: `python -m tests.backend.run_suite --help`.

A test that has a row in the file of results is not run again, so an interrupted run continues where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path


def parse() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "phalanx"], default="phalanx")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--slice", default="0/1", help="I/N: every N-th test, beginning with the I-th")
    parser.add_argument("--out", type=Path, default=Path("out/suite.jsonl"), help="results are appended here")
    parser.add_argument("--table", action="store_true", help="print how many tests of the file had which outcome, and run none")
    parser.add_argument("--only", nargs="*", help="names of tests; they run again, and leave no row")
    return parser.parse_args()


def done(path: Path, backend: str, world: int) -> set[str]:
    """The tests that have a row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["test"] for row in rows if (row["backend"], row["world"]) == (backend, world)}


def main() -> int:
    """0 if no test failed."""
    args = parse()
    if args.table:
        for (backend, world), counts in sorted(summary(args.out).items()):
            print(f"{backend:8} {world} ranks  " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
        return 0
    with tempfile.TemporaryDirectory(prefix="phalanx-suite-") as folder:
        os.environ.update(WORLD_SIZE=str(args.world), PHALANX_SUITE_BACKEND=args.backend, TEMP_DIR=folder)
        return run(args)


def run(args: argparse.Namespace) -> int:
    from tests.backend import pytorch_suite  # reads the environment
    from tests.backend.skipped import SKIPPED

    index, count = (int(number) for number in args.slice.split("/"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = done(args.out, args.backend, args.world)
    wanted = args.only or [name for name in pytorch_suite.names()[index::count] if name not in known]
    bad = 0
    for name in wanted:
        begin = time.perf_counter()
        if args.backend == "phalanx" and name in SKIPPED and not args.only:
            outcome, reason = "skipped", f"listed: {SKIPPED[name]}"
        else:
            outcome, reason = pytorch_suite.run(name)
            if outcome == "failed" and not args.only:  # as all tests in CI: once more, and then it counts
                print(f"failed, once more: {name}: {reason[-500:]}", flush=True)
                outcome, reason = pytorch_suite.run(name)
        seconds = time.perf_counter() - begin
        print(f"{outcome:8} {seconds:6.1f} s  {name}", flush=True)
        bad += outcome == "failed"
        if args.only:
            print(reason)
            continue
        row = {"backend": args.backend, "world": args.world, "test": name, "outcome": outcome}
        with args.out.open("a") as file:
            file.write(json.dumps(row | {"seconds": round(seconds, 2), "reason": reason[-4000:]}) + "\n")
    return int(bad > 0)


def summary(path: Path) -> dict[tuple[str, int], dict[str, int]]:
    """How many tests had which outcome, by backend and world."""
    found: dict[tuple[str, int], dict[str, int]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        counts = found.setdefault((row["backend"], row["world"]), {})
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
    return found


if __name__ == "__main__":
    raise SystemExit(main())
