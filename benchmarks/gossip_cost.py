"""Messages and bytes per rank and step of GossipGraD, counted on the interface, for p = 2, 4, 8, 16; beside them our all-reduce.

    python benchmarks/gossip_cost.py [--ranks 2 4 8 16] [--kib 4096] [--json FILE]

All ranks run on this machine over gloo, without shared memory, in a network namespace of their own where that is allowed (root),
so that the loopback counter sees nothing else. A step exchanges parameters and momentum of one layer of `--kib` together. Bytes
are those of the device, with the headers of TCP and IP, divided by ranks and steps; messages those that the optimizer started.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bytes_on_the_wire import in_own_namespace, loopback_bytes
from local_ranks import finish, started

import phalanx

STEPS = 12  # whole periods for 2, 4, 8 and 16 ranks
DEADLINE = 150  # seconds for all ranks of one size


def measure(kib: int) -> list[dict[str, Any]]:
    """One row per contender; runs on every rank, and rank 0 reads the counter."""
    rows = []
    with phalanx.create_communicator(timeout=60) as comm:
        sent = 0
        post = comm.exchange_async

        def counted(x: torch.Tensor, *args: Any, **options: Any) -> Any:
            nonlocal sent
            sent += x.numel() > 0
            return post(x, *args, **options)

        comm.exchange_async = counted  # type: ignore[method-assign]
        for name, sync in (
            ("gossip", phalanx.Gossip(patience=30.0)),
            ("gossip, hypercube", phalanx.Gossip(topology="hypercube", patience=30.0)),
            ("gossip, gradients", phalanx.Gossip(exchange="gradients", patience=30.0)),
            ("all-reduce", phalanx.AllReduce(overlap=False)),
        ):
            p = torch.nn.Parameter(torch.zeros(kib * 1024 // 8))
            opt = phalanx.create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9), comm, sync=sync)

            def step(p: torch.nn.Parameter = p, opt: Any = opt) -> None:
                p.grad = torch.ones_like(p)
                opt.step()

            for _ in range(5):  # connections, buffers and measurements of the first steps are over
                step()
            comm.barrier()
            time.sleep(0.2)
            before, started = loopback_bytes(), sent
            comm.barrier()
            for _ in range(STEPS):
                step()
            if sync.__class__.__name__ == "Gossip":
                opt.communication.state_dict()  # waits for what is under way
            comm.barrier()
            time.sleep(0.2)
            counted_bytes = (loopback_bytes() - before) / STEPS / comm.size
            exchanged = p.nbytes * (2 if name in ("gossip", "gossip, hypercube") else 1)
            rows.append(
                {
                    "contender": name,
                    "ranks": comm.size,
                    "exchanged": exchanged,
                    "messages": (sent - started) / STEPS if name != "all-reduce" else None,
                    "bytes": counted_bytes,
                    "ratio": counted_bytes / exchanged,
                }
            )
            del opt
    return rows


def run(n: int, kib: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--rank", "--kib", str(kib)]
    with started(command, n, {"PHALANX_NATIVE": "0"}) as ranks:
        return [json.loads(line) for line in finish(ranks, deadline=DEADLINE)[0].splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| contender | ranks | messages | bytes | bytes / exchanged |", "|---|---|---|---|---|"]
    for row in rows:
        messages = "" if row["messages"] is None else f"{row['messages']:g}"
        lines.append(f"| {row['contender']} | {row['ranks']} | {messages} | {row['bytes']:.0f} | {row['ratio']:.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--kib", type=int, default=4096, help="parameters and momentum together")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank:
        for row in measure(args.kib):
            if os.environ["RANK"] == "0":
                print(json.dumps(row), flush=True)
        return
    private = in_own_namespace()
    header = {
        "what": "cost of gossip",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "steps": STEPS,
        "counter": f"lo tx_bytes, {'own network namespace' if private else 'shared loopback'}",
    }
    rows = sorted((row for n in args.ranks for row in run(n, args.kib)), key=lambda row: (row["contender"], row["ranks"]))
    print(f"# {json.dumps(header)}\n{table(rows)}")
    if args.json:
        args.json.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")


if __name__ == "__main__":
    main()
