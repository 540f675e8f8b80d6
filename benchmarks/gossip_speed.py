"""Step time and efficiency of GossipGraD beside all-reduce, DDP and decent-dp on 2, 4, 8 and 16 emulated hosts. Needs root.

    python benchmarks/gossip_speed.py [--hosts 2 4 8 16] [--rate 10mbit] [--size 512K] [--compute 1300] [--json FILE]

For every number of hosts, one rank each, `phalanx bench gossip` runs in a lab (lab.py): communication is real, computation is a
wait. The network is as slow as the messages are small, so that 2 cores suffice for 16 ranks: 10 Mbit/s and half a megabyte take
the time of 1 Gbit/s and 50 MB. What TCP may buffer is made smaller with it: its usual 4 MB would be seconds of this network, and
acknowledgements may wait behind them. decent-dp takes part if it can be imported (PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab import UNITS, Lab, quantity

BUFFERED = 0.05  # seconds of the network that a connection may buffer
DEADLINE = 230  # seconds for one number of hosts
CONTENDERS = ("DDP", "all-reduce", "gossip", "decent-dp")
# /proc/sys/net is that of the namespace in which it is opened
WITH_BUFFER = 'echo "4096 $0 $0" > /proc/sys/net/ipv4/tcp_wmem && exec "$@"'


def measure(hosts: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of one run of the benchmark."""
    buffered = int(quantity(args.rate, UNITS) / 8 * BUFFERED)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as rows, Lab(hosts, 1, args.rate, args.delay).up() as net:
        bench = [sys.executable, "-m", "phalanx", "bench", "gossip", "--size", args.size, "--compute", str(args.compute)]
        bench += ["--steps", str(args.steps), "--repeat", str(args.repeat), "--json", rows.name]
        bench += [f"--only={name}" for name in args.only]
        print(net.run(["sh", "-c", WITH_BUFFER, str(buffered), *bench], deadline=DEADLINE)[0], flush=True)
        records = [json.loads(line) for line in rows.read().splitlines()]
    records[0]["network"] = {"rate": args.rate, "delay": args.delay, "tcp_wmem": buffered}
    return records


def table(records: list[dict[str, Any]]) -> str:
    """A line per contender, a column per number of hosts."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    ranks = 0
    for record in records:
        ranks = record["config"]["ranks"] if "config" in record else ranks
        if "step_ms" in record:
            found.setdefault(record["contender"], {})[ranks] = record
    worlds = sorted({n for own in found.values() for n in own})
    lines = [f"| | {' | '.join(f'p = {n}' for n in worlds)} |", "|---" * (len(worlds) + 1) + "|"]
    for name, own in found.items():
        cells = [f"{own[n]['step_ms']:.0f} ms, {own[n]['efficiency']:.1%}" if n in own else "" for n in worlds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rate", default="10mbit", help="of each host's port, each way")
    parser.add_argument("--delay", default="1ms", help="one way, between any two hosts")
    parser.add_argument("--size", default="512K", help="of the parameters, in bytes; momentum is as large")
    parser.add_argument("--compute", type=int, default=1300, help="milliseconds of a step, longer than an exchange")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="write the records there")
    args = parser.parse_args()
    records = [record for hosts in args.hosts for record in measure(hosts, args)]
    print(table(records))
    if args.json:
        args.json.write_text("\n".join(json.dumps(record) for record in records) + "\n")


if __name__ == "__main__":
    main()
