"""Bytes that leave each emulated host during all-reduces, counted by its network interface, beside what the schedule predicts.

    python benchmarks/bytes_between_hosts.py [--json FILE]          4 hosts x 2 ranks; needs root (docs/lab.md)

The interface counts headers once per frame of up to 64 KiB, and acknowledgements; both are what is above 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab import Bridge, Lab

import phalanx
from phalanx.bench.record import Record
from phalanx.schedule import Schedule, hierarchical, ring, sent, torus

HOSTS, PER_HOST, RATE = 4, 2, "1gbit"
SIZE, REPEAT = 16 << 20, 5
SCHEDULES = {"torus": torus(HOSTS, PER_HOST), "hierarchical": hierarchical(HOSTS, PER_HOST), "ring": ring(HOSTS * PER_HOST)}


def play(name: str, repeat: int) -> None:
    """One rank: `repeat` all-reduces; 0 for what joining and leaving cost."""
    torch.set_num_threads(1)
    with phalanx.create_communicator() as comm:
        x = comm.buffer(SIZE // 4).zero_()
        comm.run(SCHEDULES[name], x[: comm.multiple])  # the connections are made by the first messages
        for _ in range(repeat):
            comm.run(SCHEDULES[name], x)
        comm.barrier()


def predicted(schedule: Schedule) -> list[float]:
    """Bytes that leave each host in one all-reduce: those whose sender and receiver are on different hosts."""
    by_rank = sent(schedule, lambda source, target: source // PER_HOST != target // PER_HOST)
    return [float(sum(by_rank[host * PER_HOST : (host + 1) * PER_HOST])) * SIZE for host in range(HOSTS)]


def count(name: str) -> Record:
    lab = Lab(HOSTS, PER_HOST, RATE)
    totals = []
    with lab.up(Bridge) as net:
        for repeat in (0, REPEAT):
            before = net.bytes_sent()
            net.run([sys.executable, __file__, "--play", name, "--repeat", str(repeat)], deadline=120)
            totals.append([after - start for start, after in zip(before, net.bytes_sent())])
    counted = [(full - empty) / REPEAT for empty, full in zip(*totals)]
    wanted = predicted(SCHEDULES[name])
    ratios = [own / want for own, want in zip(counted, wanted)]
    return {"schedule": SCHEDULES[name].name, "counted": counted, "predicted": wanted, "ratio": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records there")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--repeat", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        play(args.play, args.repeat)
        return 0
    rows: list[Record] = [
        {
            "what": "bytes leaving each host in one all-reduce",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"torch": torch.__version__, "kernel": platform.release()},
            "lab": {"hosts": HOSTS, "per_host": PER_HOST, "rate": RATE, "wire": "bridge"},
            "bytes": SIZE,
            "repeat": REPEAT,
        }
    ]
    rows += [count(name) for name in SCHEDULES]
    for row in rows[1:]:
        ratios = " ".join(f"{ratio:.4f}" for ratio in row["ratio"])
        most = f"{max(row['counted']) / 2**20:8.3f} MiB of {max(row['predicted']) / 2**20:8.3f}"
        print(f"{row['schedule']:24} {most}   by host {ratios}")
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
