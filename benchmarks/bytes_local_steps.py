"""Bytes that leave each emulated host while a model trains: all-reduce in every step, and local steps, counted and predicted.

    python benchmarks/bytes_local_steps.py [--json FILE]          4 hosts x 2 ranks; needs root (docs/lab.md)

What joining and leaving cost is counted by a run without steps, and subtracted. The interface also counts headers and
acknowledgements: "counted" has them, "payload", which is compared with the prediction, has not.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab import HEADERS, Bridge, Lab

import phalanx
from phalanx.bench.record import Record
from phalanx.schedule import sent, torus

HOSTS, PER_HOST, RATE = 4, 2, "1gbit"
SIDE, LAYERS = 512, 4  # parameters: 4 MiB
EVERY, STEPS = 50, 100

CONTENDERS: dict[str, Any] = {
    "all-reduce": phalanx.AllReduce(overlap=True),
    "LocalSGD, H=50": phalanx.LocalSGD(every=EVERY),
    "DiLoCo, H=50": phalanx.DiLoCo(every=EVERY),
    "DiLoCo, H=50, 4 parts, overlapped": phalanx.DiLoCo(every=EVERY, fragments=4, overlap=True),
    "DiLoCo, H=50, bfloat16": phalanx.DiLoCo(every=EVERY, wire=torch.bfloat16),
}


def play(name: str, steps: int) -> None:
    """One rank: so many steps."""
    torch.set_num_threads(1)
    phalanx.seed_everything(0)
    with phalanx.create_communicator(torus(HOSTS, PER_HOST)) as comm:
        model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
        opt = phalanx.create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), lr=1e-4), comm, sync=CONTENDERS[name], **bucket(name)
        )
        x = torch.randn(2, SIDE, generator=torch.Generator().manual_seed(comm.rank))
        comm.all_reduce(torch.ones(comm.size * 1024))  # the connections are made by the first messages
        for _ in range(steps):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        comm.barrier()


def bucket(name: str) -> dict[str, int]:
    return {"bucket_bytes": 1 << 20} if name == "all-reduce" else {}  # as it is, without measuring first


def predicted(name: str) -> list[float]:
    """Bytes that leave each host per step."""
    by_rank = sent(torus(HOSTS, PER_HOST), lambda source, target: source // PER_HOST != target // PER_HOST)
    size = 4 * SIDE * SIDE * LAYERS / (1 if name == "all-reduce" else EVERY) / (2 if "bfloat16" in name else 1)
    return [float(sum(by_rank[host * PER_HOST : (host + 1) * PER_HOST])) * size for host in range(HOSTS)]


def count(name: str) -> Record:
    totals = []
    with Lab(HOSTS, PER_HOST, RATE).up(Bridge) as net:
        for steps in (0, STEPS):
            before = [*net.bytes_sent(), *net.frames_sent()]
            net.run([sys.executable, __file__, "--play", name, "--steps", str(steps)], deadline=300)
            totals.append([after - start for start, after in zip(before, [*net.bytes_sent(), *net.frames_sent()])])
    both = [(full - empty) / STEPS for empty, full in zip(*totals)]
    counted, frames = both[:HOSTS], both[HOSTS:]
    payload = [nbytes - HEADERS * sent for nbytes, sent in zip(counted, frames)]
    wanted = predicted(name)
    return {
        "contender": name,
        "counted": counted,
        "payload": payload,
        "predicted": wanted,
        "ratio": [own / want for own, want in zip(payload, wanted)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records there")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="only these")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        play(args.play, args.steps)
        return 0
    rows: list[Record] = [
        {
            "what": "bytes leaving each host per training step",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"torch": torch.__version__, "kernel": platform.release()},
            "lab": {"hosts": HOSTS, "per_host": PER_HOST, "rate": RATE, "wire": "bridge"},
            "parameter_bytes": 4 * SIDE * SIDE * LAYERS,
            "steps": STEPS,
        }
    ]
    whole = None
    for name in args.only or CONTENDERS:
        rows.append(count(name))
        most = max(rows[-1]["counted"])
        whole = most if name == "all-reduce" else whole
        share = f"1/{whole / most:.1f} of all-reduce" if whole else ""
        ratios = " ".join(f"{ratio:.4f}" for ratio in rows[-1]["ratio"])
        print(f"{name:36} {most / 2**10:10.1f} KiB per step   payload / predicted {ratios}   {share}", flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
