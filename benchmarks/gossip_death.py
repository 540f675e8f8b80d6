"""kill -9 on one of 8 gossiping ranks in the middle of training: whether the others finish, their longest gap, their accuracy.

    python benchmarks/gossip_death.py [--data fashion-mnist:DIR] [--epochs 2] [--seeds 0 1 2] [--ranks 8] [--json FILE]

Every seed trains twice, undisturbed and with a kill: the network, the data and the learning rate of study_gossip.py. The victim
is rank 0, which holds the job's store, for the first seed, and other ranks for the others; the kill comes from outside when the
victim has done half of its steps, so it hits wherever the victim then is. A gap is the time between the ends of two steps of a
survivor: no rank is started again, and the samples that were dealt to the dead rank are not seen by anybody.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from local_ranks import finish, started
from study_gossip import SETTINGS, kind_of, learning_rate, own_batches, scaled, small_net, test_accuracy
from torch import nn

import phalanx

DEADLINE = 150  # seconds for one run
HALF_WAY = "half of the steps are done"


def train(data: str, seed: int, epochs: int, batch: int) -> dict[str, Any]:
    """One run on this rank: the times of its steps, and the accuracy of the mean of all replicas that are left."""
    torch.set_num_threads(1)
    setting = SETTINGS[kind_of(data)]
    comm = phalanx.create_communicator(timeout=60)
    source, held_out = (phalanx.data.open(data, split=split) for split in ("train", "test"))
    phalanx.seed_everything(seed)
    model = small_net(source.x.shape[1], len(source.classes))
    sgd = torch.optim.SGD(model.parameters(), lr=setting.peak, momentum=0.9, nesterov=True, weight_decay=5e-4)
    opt: Any = phalanx.create_multi_node_optimizer(sgd, comm, sync=phalanx.Gossip())
    opt.follow(model)
    steps = len(source.y) // batch
    comm.barrier()
    ends = [time.perf_counter()]
    for epoch in range(epochs):
        for mine in own_batches(comm, seed, epoch, len(source.y), batch, dealt_anew=True):
            learning_rate(opt, setting, len(ends) / (epochs * steps))
            opt.zero_grad()
            nn.functional.cross_entropy(model(scaled(source.x[mine], setting)), source.y[mine]).backward()
            opt.step()
            ends.append(time.perf_counter())
            if len(ends) == epochs * steps // 2:
                print(HALF_WAY, flush=True)
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    opt.average_()
    left = opt.survivors()
    accuracy = test_accuracy(model.eval(), held_out, setting, left, equal=True)
    found = {
        "left": left.size,
        "missing": list(opt.missing),
        "accuracy": accuracy,
        "steps": len(gaps),
        "median_gap_s": statistics.median(gaps),
        "longest_gap_s": max(gaps[1:]),  # the first step makes connections
    }
    comm.close()
    return found


def run(args: argparse.Namespace, seed: int, victim: int | None) -> dict[str, Any]:
    """One run; the worst gap of all who survive."""
    command = [sys.executable, __file__, "--rank", str(seed), "--data", args.data]
    command += ["--epochs", str(args.epochs), "--batch", str(args.batch)]
    with started(command, args.ranks) as ranks:
        if victim is not None:
            assert ranks[victim].stdout.readline().strip() == HALF_WAY  # type: ignore[union-attr]
            ranks[victim].kill()
        words = finish(ranks, deadline=DEADLINE, may_die=victim)
    found = [json.loads(text.splitlines()[-1]) for r, text in enumerate(words) if r != victim]
    longest = max(row["longest_gap_s"] for row in found)
    return {"data": kind_of(args.data), "seed": seed, "ranks": args.ranks, "killed": victim, **found[0], "longest_gap_s": longest}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| seed | killed | finished | accuracy | usual step | longest gap |", "|---|---|---|---|---|---|"]
    for row in rows:
        killed = "nobody" if row["killed"] is None else f"rank {row['killed']}"
        times = f"{row['median_gap_s'] * 1e3:.0f} ms | {row['longest_gap_s']:.2f} s"
        lines.append(f"| {row['seed']} | {killed} | {row['left']} of {row['ranks']} | {row['accuracy']:.2%} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, fashion-mnist:DIR or cifar10:DIR")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256, help="samples per step, over all ranks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path, help="append the rows there")
    parser.add_argument("--rank", type=int, metavar="SEED", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(train(args.data, args.rank, args.epochs, args.batch)), flush=True)
        return
    header = {
        "what": "kill -9 on one gossiping rank",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "epochs": args.epochs,
        "batch": args.batch,
    }
    if args.json and not args.json.exists():
        args.json.write_text(json.dumps(header) + "\n")
    rows = []
    for seed in args.seeds:
        for victim in (None, 3 * seed % args.ranks):
            rows.append(run(args, seed, victim))
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(f"# {json.dumps(header)}\n{table(rows)}")


if __name__ == "__main__":
    main()
