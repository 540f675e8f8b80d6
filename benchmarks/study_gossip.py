"""Final test accuracy of GossipGraD against all-reduce and against no communication: 8 ranks, 3 seeds, the same hyper-parameters.

    python benchmarks/study_gossip.py --data fashion-mnist:DIR [--out FILE] [--epochs 6] [--seeds 0 1 2] [--ranks 8] [--only NAME]

Every run appends one row to FILE; runs that are there already are not done again, so the study can be interrupted and continued.
The table at the end is made of all rows. Each rank trains on its own part of the data, reshuffled in every epoch over all ranks,
except for "none, own part", where it always sees the same part: the negative control. Replicas are averaged before evaluation,
except without communication, where the mean accuracy of all replicas counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.data.order import epoch_order

RUN_DEADLINE = 3600  # seconds
PATIENT = 60.0  # seconds: accuracy must not depend on how busy the machine is

VARIANTS: dict[str, dict[str, Any] | None] = {
    "all-reduce": {"sync": phalanx.AllReduce()},
    "gossip": {"sync": phalanx.Gossip(patience=PATIENT)},
    "gossip, no rotation": {"sync": phalanx.Gossip(rotate=False, patience=PATIENT)},
    "gossip, coherent": {"sync": phalanx.Gossip(overlap=False, patience=PATIENT)},
    "gossip, hypercube": {"sync": phalanx.Gossip(topology="hypercube", patience=PATIENT)},
    "gossip, gradients": {"sync": phalanx.Gossip(exchange="gradients", average_every=50, patience=PATIENT)},
    "gossip, bfloat16": {"sync": phalanx.Gossip(patience=PATIENT), "wire": torch.bfloat16},
    "none, own part": None,
}
MEANS = {"fashion-mnist": (0.286, 0.353), "digits": (0.0192, 0.0236), "cifar10": (0.473, 0.25)}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """One run on the ranks of this world; the same row on all of them."""
    torch.set_num_threads(1)
    options = VARIANTS[args.variant]
    with phalanx.create_communicator(timeout=120) as comm:
        kind = args.data.partition(":")[0]
        source, held_out = (phalanx.data.open(args.data, split=split) for split in ("train", "test"))
        mean, deviation = MEANS[kind]
        phalanx.seed_everything(args.seed)
        channels, classes = source.x.shape[1], len(source.classes)
        model = phalanx.models.small_cnn(in_channels=channels, num_classes=classes)
        opt: Any = torch.optim.SGD(model.parameters(), lr=args.peak, momentum=0.9, nesterov=True, weight_decay=5e-4)
        if options is not None:
            opt = phalanx.create_multi_node_optimizer(opt, comm, **options)
        gossips = options is not None and isinstance(options["sync"], phalanx.Gossip)
        if gossips:
            opt.follow(model)
        spreads, begun = [], time.perf_counter()
        per_rank = args.batch // comm.size
        steps = len(source.y) // args.batch
        for epoch in range(args.epochs):
            order = torch.from_numpy(epoch_order(args.seed, epoch if options is not None else 0, len(source.y))[:])
            mine = order[: steps * args.batch].view(comm.size, -1)[comm.rank]
            for step, batch in enumerate(mine.split(per_rank)):
                done = (epoch + (step + 1) / steps) / args.epochs
                for group in opt.param_groups:
                    group["lr"] = args.peak * min(1.0, 10 * done) * (1 - done)
                opt.zero_grad()
                x = (source.x[batch].float() / 255 - mean) / deviation
                torch.nn.functional.cross_entropy(model(x), source.y[batch]).backward()
                opt.step()
            if gossips:
                spreads.append(opt.spread())
        seconds = time.perf_counter() - begun
        if gossips:
            opt.average_()
        if options is not None:
            phalanx.average_batchnorm_(model, comm)
        right = _right(model.eval(), held_out, mean, deviation)
        accuracy = statistics.mean(comm.allgather_obj(right / len(held_out.y)))
        return {
            "data": kind,
            "variant": args.variant,
            "seed": args.seed,
            "ranks": comm.size,
            "epochs": args.epochs,
            "batch": args.batch,
            "peak": args.peak,
            "accuracy": accuracy,
            "spread": spreads,
            "seconds": round(seconds, 1),
        }


@torch.no_grad()
def _right(model: torch.nn.Module, held_out: Any, mean: float, deviation: float) -> int:
    batches = zip(held_out.x.split(500), held_out.y.split(500))
    return sum(int((model((x.float() / 255 - mean) / deviation).argmax(1) == y).sum()) for x, y in batches)


def run(args: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, __file__, "--rank", "--variant", variant, "--seed", str(seed), "--data", args.data]
    command += ["--epochs", str(args.epochs), "--batch", str(args.batch), "--peak", str(args.peak)]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL, text=True)
        for r in range(args.ranks)
    ]
    try:
        output = ranks[0].communicate(timeout=RUN_DEADLINE)[0]
        codes = [rank.wait(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    if any(codes):
        raise SystemExit(f"{variant}, seed {seed}: a rank failed: exit codes {codes}")
    row: dict[str, Any] = json.loads(output)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| data | variant | seeds | accuracy | spread at the end |", "|---|---|---|---|---|"]
    for data, variant in dict.fromkeys((row["data"], row["variant"]) for row in rows):
        own = [row for row in rows if (row["data"], row["variant"]) == (data, variant)]
        found = [row["accuracy"] for row in own]
        deviation = f" +- {statistics.stdev(found):.2%}" if len(found) > 1 else ""
        spread = statistics.mean(row["spread"][-1] for row in own) if own[0]["spread"] else None
        apart = "" if spread is None else f"{spread:.1e}"
        lines.append(f"| {data} | {variant} | {len(own)} | {statistics.mean(found):.2%}{deviation} | {apart} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, fashion-mnist:DIR or cifar10:DIR")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "study_gossip.jsonl")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256, help="samples per step, over all ranks")
    parser.add_argument("--peak", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        row = train(args)
        if os.environ["RANK"] == "0":
            print(json.dumps(row), flush=True)
        return
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    same = {
        "data": args.data.partition(":")[0],
        "ranks": args.ranks,
        "epochs": args.epochs,
        "batch": args.batch,
        "peak": args.peak,
    }
    for seed in args.seeds:
        for variant in args.only:
            wanted = same | {"variant": variant, "seed": seed}
            if any(wanted.items() <= row.items() for row in rows):
                continue
            row = run(args, variant, seed)
            rows.append(row)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"# {row['data']}, {variant}, seed {seed}: {row['accuracy']:.2%} in {row['seconds']:.0f} s", flush=True)
    print(table([row for row in rows if same.items() <= row.items()]))


if __name__ == "__main__":
    main()
