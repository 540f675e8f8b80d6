"""The simulator against SimGrid's SMPI, an independent one: the same messages on the same clusters, two clocks.

    python benchmarks/plan_simgrid.py [--json FILE]          needs smpicc and smpirun (Debian: libsimgrid-dev)

SMPI's corrections for TCP and MPI are set to 1, its software overheads to 0: what is compared is who waits for whom at which
port. Two differences remain. A sender there is done when its message has arrived, here when it has left. Messages that share a
port get equal parts of it there, and take turns here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.cluster import Cluster, Link, simulate
from phalanx.schedule import Move, Schedule, halving_doubling, hierarchical, lower, recursive_doubling, ring, torus, tree

PROGRAM = Path(__file__).with_name("plan_simgrid.c")
LATENCY, BANDWIDTH = 20e-6, 1.25e9  # 10 Gbit/s
INSIDE = Link(2e-6, 20e9)
PLAIN = (
    "network/model:SMPI",
    "smpi/bw-factor:0:1",
    "smpi/lat-factor:0:1",
    "smpi/os:0:0:0",
    "smpi/or:0:0:0",
    "smpi/ois:0:0:0",
    "smpi/async-small-thresh:0",
    "smpi/send-is-detached-thresh:0",
    "smpi/simulate-computation:no",
    "network/TCP-gamma:0",
    "network/crosstraffic:no",
    "network/weight-S:0",
)


def cases() -> Iterator[tuple[Schedule, Cluster, int]]:
    """Schedules on clusters, with bytes."""
    for size in (1 << 20, 51 << 20):
        for hosts in (4, 8, 16):
            flat = Cluster(f"{hosts}x1", hosts, 1, INSIDE, Link(LATENCY, BANDWIDTH))
            for schedule in (ring(hosts), halving_doubling(hosts), recursive_doubling(hosts), torus(hosts // 2, 2), tree(hosts)):
                yield schedule, flat, size
        for hosts, per_host in ((4, 2), (8, 4)):
            deep = Cluster(f"{hosts}x{per_host}", hosts, per_host, INSIDE, Link(LATENCY, BANDWIDTH))
            for schedule in (ring(deep.ranks), torus(hosts, per_host), hierarchical(hosts, per_host)):
                yield schedule, deep, size


def platform(cluster: Cluster) -> str:
    """The cluster as SimGrid describes one: a link up and a link down for every host, a loopback inside."""
    return f"""<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="cluster" prefix="host" radical="0-{cluster.hosts - 1}" suffix="" speed="1Gf" bw="{cluster.network.bandwidth}Bps"
    lat="{cluster.network.latency / 2}s" loopback_bw="{cluster.inside.bandwidth}Bps" loopback_lat="{cluster.inside.latency}s"/>
</platform>
"""


def messages(schedule: Schedule, nbytes: int) -> str:
    """One line per message, in the order of the steps."""
    found = ((number, op) for number, step in enumerate(lower(schedule).steps) for op in step.ops if isinstance(op, Move))
    part = nbytes / schedule.chunks
    return "".join(f"{number} {move.src} {move.dst} {round(len(move.chunks) * part)}\n" for number, move in found)


def by_simgrid(program: Path, schedule: Schedule, cluster: Cluster, nbytes: int) -> float:
    """Simulated seconds."""
    room = program.parent
    (room / "platform.xml").write_text(platform(cluster))
    (room / "hosts").write_text("".join(f"host{rank // cluster.per_host}\n" for rank in range(cluster.ranks)))
    (room / "messages").write_text(messages(schedule, nbytes))
    command = ["smpirun", "-np", str(cluster.ranks), "-platform", "platform.xml", "-hostfile", "hosts"]
    command += [f"--cfg={setting}" for setting in PLAIN] + ["--log=root.thres:error", str(program), "messages"]
    done = subprocess.run(command, cwd=room, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        sys.exit(f"plan_simgrid: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if shutil.which("smpicc") is None:
        sys.exit("plan_simgrid: there is no smpicc; on Debian: apt-get install libsimgrid-dev")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as room:
        program = Path(room) / "plan_simgrid"
        subprocess.run(["smpicc", "-O2", str(PROGRAM), "-o", str(program)], check=True, timeout=60)
        for schedule, cluster, nbytes in cases():
            theirs, ours = by_simgrid(program, schedule, cluster, nbytes), simulate(schedule, cluster, nbytes).seconds
            rows.append(
                {
                    "schedule": schedule.name,
                    "cluster": cluster.name,
                    "bytes": nbytes,
                    "simgrid_s": theirs,
                    "phalanx_s": ours,
                    "difference": ours / theirs - 1,
                }
            )
            print(
                f"{schedule.name:24s} {cluster.name:6s} {nbytes >> 20:3d} MiB {theirs * 1e3:9.3f} {ours * 1e3:9.3f} ms"
                f" {ours / theirs - 1:+7.2%}"
            )
    worst = max(abs(row["difference"]) for row in rows)
    close = sum(abs(row["difference"]) <= 0.02 for row in rows)
    print(f"{len(rows)} cases, {close} within 2 %, largest difference {worst:.2%}")
    if args.json:
        version = subprocess.run(["smpirun", "-version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]
        head = {"config": {"verb": "plan_simgrid", "settings": PLAIN}, "date": time.strftime("%Y-%m-%d"), "simgrid": version}
        lines = [head, *rows, {"summary": {"cases": len(rows), "within_2_percent": close, "worst": worst}}]
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
