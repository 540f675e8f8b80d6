"""A synthesised all-reduce against those written by hand, on a lab network whose hosts are unequal. Needs root.

    python benchmarks/synth_lab.py [--json benchmarks/results/synth_lab.jsonl] [--repeat 3]

Eight hosts of one rank. All receive at 400 Mbit/s; six send at 400 Mbit/s, and two at 100 Mbit/s, by a token bucket in their
namespaces. The schedules take turns on the same buffers; a time is that of the slowest rank, and the ratio is one of medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lab import NETNS, Lab

import phalanx
from phalanx.cli.synth import by_hand
from phalanx.cluster.fabric import parse_fabric
from phalanx.cluster.synth import busiest_link, synthesise
from phalanx.schedule import from_text, to_text

HOSTS, SLOW, MBIT, SLOW_MBIT = 8, (2, 5), 400, 100
COUNT = 1 << 23  # float32, 32 MiB


def fabric_text() -> str:
    lines = ['fabric "unequal hosts of the lab"']
    for host in range(HOSTS):
        lines += [f"{host} -> s : {(SLOW_MBIT if host in SLOW else MBIT) / 8000}", f"s -> {host} : {MBIT / 8000}"]
    return "\n".join(lines)


def measure(directory: Path, repeat: int) -> None:
    """What every rank runs: all schedules in turn, and the first turn does not count."""
    import torch

    schedules = {path.stem: from_text(path.read_text()) for path in sorted(directory.glob("*.txt"))}
    comm = phalanx.create_communicator(timeout=60)
    times: dict[str, list[float]] = {name: [] for name in schedules}
    for turn in range(repeat + 1):
        for name, s in schedules.items():
            x = torch.full((COUNT,), float(comm.rank))
            comm.barrier()
            start = time.perf_counter()
            comm.run(s, x)
            mine = time.perf_counter() - start
            assert x[0].item() == x[-1].item() == sum(range(comm.size)), name
            slowest = max(comm.allgather_obj(mine))
            if turn:
                times[name].append(slowest)
    if comm.rank == 0:
        print(json.dumps(times))
    comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        measure(args.rank, args.repeat)
        return
    fabric = parse_fabric(fabric_text())
    found = synthesise(fabric, trees=8, pipeline=8)
    best = sorted(by_hand(HOSTS), key=lambda s: busiest_link(s, fabric))[:4]  # of the others the busiest link is busier still
    candidates = {"synth": found.schedule, **{s.name: s for s in best}}
    with tempfile.TemporaryDirectory() as name, Lab(hosts=HOSTS, ranks_per_host=1, rate=f"{MBIT}mbit").up() as net:
        for number, s in enumerate(candidates.values()):
            (Path(name) / f"{number:02}.txt").write_text(to_text(s))
        for host in SLOW:
            bucket = f"tc qdisc replace dev eth0 root tbf rate {SLOW_MBIT}mbit burst 128kb latency 2s"
            subprocess.run(["nsenter", f"--net={NETNS / net.spaces[host]}", "--", *bucket.split()], check=True, timeout=10)
        command = [sys.executable, __file__, "--rank", name, "--repeat", str(args.repeat)]
        times = json.loads(net.run(command, deadline=220)[0])
    rows = []
    for (label, s), seconds in zip(candidates.items(), (times[key] for key in sorted(times)), strict=True):
        rows.append(
            {
                "benchmark": "synth_lab", "schedule": label, "hosts": HOSTS, "bytes": 4 * COUNT, "repeat": args.repeat,
                "median_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds),
                "busiest_link_s": busiest_link(s, fabric) * 4 * COUNT, "bound_s": found.bound * 4 * COUNT,
                "python": platform.python_version(), "date": "2026-11-17",
            }
        )  # fmt: skip
    rows.sort(key=lambda row: row["median_s"])
    for row in rows:
        print(f"{row['schedule']:24} {row['median_s'] * 1e3:8.0f} ms   busiest link {row['busiest_link_s'] * 1e3:6.0f} ms")
    by_hand_s = min(row["median_s"] for row in rows if row["schedule"] != "synth")
    mine = next(row["median_s"] for row in rows if row["schedule"] == "synth")
    print(f"best by hand / synth: {by_hand_s / mine:.2f}")
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | {"best_by_hand_over_this": by_hand_s / row["median_s"]}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
