"""Bytes that leave each emulated host in one step of ResNet-50, by wire, counted by its network interface, beside the prediction.

    python benchmarks/bytes_of_wires.py [--json FILE]          4 hosts x 2 ranks; needs root (docs/lab.md)

The gradients are made of nothing, at no cost, so only their shapes are ResNet-50's. The prediction is what the schedules say of
the messages of a step. The interface counts headers once per frame of up to 64 KiB, and acknowledgements, besides: "counted" has
them, "payload", which is compared with the prediction, has not. What gloo writes before each message is part of both.
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
from phalanx.comm.choose import choose
from phalanx.comm.hosts import Hosts
from phalanx.grad.groups import even
from phalanx.grad.wires.carrier import rows_of
from phalanx.grad.wires.low_rank import matrix_of
from phalanx.schedule import Schedule, quantised, sent

HOSTS, PER_HOST, RATE = 4, 2, "1gbit"
STEPS, BUCKET, RANK = 4, 8 << 20, 4
ALIGN = 16  # elements, as the arena pads tensors
WIRES: dict[str, Any] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "int8": phalanx.Int8(),
    "powersgd": phalanx.PowerSGD(rank=RANK),
}


def shapes() -> list[torch.Tensor]:
    """The parameters of ResNet-50 without memory, last first, as their gradients come."""
    with torch.device("meta"):
        return list(reversed(list(phalanx.models.resnet50().parameters())))


def play(name: str, steps: int) -> None:
    """One rank: `steps` exchanges after the one that makes the groups."""
    torch.set_num_threads(1)
    with phalanx.create_communicator() as comm:
        params = [torch.nn.Parameter(torch.zeros(p.shape)) for p in reversed(shapes())]
        opt = phalanx.create_multi_node_optimizer(
            torch.optim.SGD(params, lr=0.0), comm, wire=WIRES[name], bucket_bytes=BUCKET, sync=phalanx.AllReduce(check_every=0)
        )
        for step in range(1 + steps):
            opt.zero_grad()
            for i, p in enumerate(reversed(params)):
                p.grad = torch.full_like(p, float(i % 7) + comm.rank + step)
            opt.synchronize()
            opt.step()
        comm.barrier()


def between(schedule: Schedule, code: Any = 1) -> float:
    """How many of its buffers leave the busiest host in one run of a schedule."""
    by_rank = sent(schedule, lambda source, target: source // PER_HOST != target // PER_HOST, code=code)
    return max(float(sum(by_rank[host * PER_HOST : (host + 1) * PER_HOST])) for host in range(HOSTS))


def predicted(name: str) -> float:
    """Bytes that leave a host in one step."""
    ranks = range(HOSTS * PER_HOST)
    chosen = choose(Hosts(tuple(tuple(ranks[h * PER_HOST : (h + 1) * PER_HOST]) for h in range(HOSTS))), shared=True)

    def all_reduce(nbytes: int) -> float:
        schedule = next((s for limit, s in chosen.smaller if nbytes <= limit), chosen.schedule)
        return between(schedule) * nbytes

    tensors = shapes()
    total = all_reduce(4) if name in ("int8", "powersgd") else 0.0  # the flags
    for run in even([p.numel() * 4 for p in tensors], BUCKET):
        group = [tensors[i] for i in run]
        length = sum(-(-p.numel() // ALIGN) * ALIGN for p in group)
        if name == "int8":
            total += between(quantised(HOSTS, PER_HOST), phalanx.Int8().code.ratio) * 4 * length
        elif name == "powersgd":
            matrices = [matrix_of(range(p.numel()), rows_of(p), RANK) for p in group]
            p_side = sum(m.rows * m.rank if m else p.numel() for m, p in zip(matrices, group))
            q_side = sum(m.columns * m.rank for m in matrices if m)
            total += all_reduce(4 * p_side) + all_reduce(4 * q_side)
        else:
            total += all_reduce((2 if name == "bfloat16" else 4) * length)
    return total


def count(name: str) -> Record:
    totals = []
    with Lab(HOSTS, PER_HOST, RATE).up(Bridge) as net:
        for steps in (0, STEPS):
            before = [*net.bytes_sent(), *net.frames_sent()]
            net.run([sys.executable, __file__, "--play", name, "--steps", str(steps)], deadline=120)
            totals.append([after - start for start, after in zip(before, [*net.bytes_sent(), *net.frames_sent()])])
    both = [(full - empty) / STEPS for empty, full in zip(*totals)]
    counted, frames = both[:HOSTS], both[HOSTS:]
    payload = [nbytes - HEADERS * sent for nbytes, sent in zip(counted, frames)]
    wanted = predicted(name)
    return {
        "wire": name,
        "counted": counted,
        "payload": payload,
        "predicted": wanted,
        "ratio": max(payload) / wanted,
        "ratio_with_headers": max(counted) / wanted,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records there")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        play(args.play, args.steps)
        return 0
    rows: list[Record] = [
        {
            "what": "bytes leaving each host in one step of ResNet-50",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"torch": torch.__version__, "kernel": platform.release()},
            "lab": {"hosts": HOSTS, "per_host": PER_HOST, "rate": RATE, "wire": "bridge"},
            "steps": STEPS,
            "bucket_bytes": BUCKET,
        }
    ]
    for name in WIRES:
        rows.append(count(name))
        rows[-1]["of_float32"] = max(rows[-1]["counted"]) / max(rows[1]["counted"])
        most = f"{max(rows[-1]['counted']) / 2**20:9.3f} MiB of {rows[-1]['predicted'] / 2**20:9.3f}"
        print(
            f"{name:10} {most}   {rows[-1]['ratio']:.4f} of what is predicted, {rows[-1]['ratio_with_headers']:.4f} with headers,"
            f" {rows[-1]['of_float32']:.4f} of float32",
            flush=True,
        )
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
