"""Final test accuracy of GossipGraD against all-reduce and against no communication: 8 ranks, 3 seeds, the same hyper-parameters.

    python benchmarks/study_gossip.py --data fashion-mnist:DIR cifar10:DIR [--out FILE] [--seeds 0 1 2] [--epochs N] [--ranks 8]

Every run appends one row to FILE; runs that are there already are not done again, so the study can be interrupted and continued.
The table at the end is made of all rows. Fashion-MNIST runs all variants, CIFAR-10 the main ones, digits (for a try) all.

Each rank trains on its own part of the data, dealt out anew in every epoch over all ranks, except for "none", where it always
sees the same part: the negative control. Replicas are averaged before evaluation, except without communication, where the mean
accuracy of all replicas counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from local_ranks import finish, lines_of, started
from torch import nn

import phalanx
from phalanx.data.order import epoch_order

DEADLINE = 3600  # seconds for one run
PATIENT = 3600.0  # seconds: accuracy must not depend on how busy the machine is, nor on whether the study was paused
WARM_UP = 0.1  # of the run, until the learning rate is at its peak

VARIANTS: dict[str, dict[str, Any] | None] = {
    "all-reduce": {"sync": phalanx.AllReduce()},
    "gossip": {"sync": phalanx.Gossip(patience=PATIENT)},
    "none": None,
    "gossip, no rotation": {"sync": phalanx.Gossip(rotate=False, patience=PATIENT)},
    "gossip, coherent": {"sync": phalanx.Gossip(overlap=False, patience=PATIENT)},
    "gossip, hypercube": {"sync": phalanx.Gossip(topology="hypercube", patience=PATIENT)},
    "gossip, gradients": {"sync": phalanx.Gossip(exchange="gradients", average_every=50, patience=PATIENT)},
    "gossip, bfloat16": {"sync": phalanx.Gossip(patience=PATIENT), "wire": torch.bfloat16},
}


@dataclass(frozen=True)
class Setting:
    """How a data set is trained on: `peak` of the learning rate, mean and deviation of its pixels, and by which variants."""

    epochs: int
    peak: float
    mean: float
    deviation: float
    variants: tuple[str, ...] = tuple(VARIANTS)


SETTINGS = {
    "digits": Setting(6, 0.05, 0.0192, 0.0236),
    "fashion-mnist": Setting(4, 0.1, 0.286, 0.353),
    "cifar10": Setting(10, 0.1, 0.473, 0.25, variants=("all-reduce", "gossip", "none")),
}


# ---- one run, inside a rank ------------------------------------------------------------------------------------------------


def small_net(channels: int, classes: int, width: int = 16) -> nn.Module:
    """Three convolutions with batch norm, whose statistics must follow the replicas; small enough for eight on two cores."""

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        # pooled first: batch norm then has a quarter of the pixels
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.ReLU()]

    widths = [channels, width, 2 * width, 4 * width]
    layers = [layer for inputs, outputs in itertools.pairwise(widths) for layer in convolution(inputs, outputs)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, classes))


def train(comm: phalanx.Communicator, data: str, variant: str, seed: int, batch: int, epochs: int) -> dict[str, Any]:
    """One run on the ranks of `comm`; what was found, the same on all of them."""
    setting, options = replace(SETTINGS[kind_of(data)], epochs=epochs), VARIANTS[variant]
    source, held_out = (phalanx.data.open(data, split=split) for split in ("train", "test"))
    phalanx.seed_everything(seed)
    model = small_net(source.x.shape[1], len(source.classes))
    opt: Any = torch.optim.SGD(model.parameters(), lr=setting.peak, momentum=0.9, nesterov=True, weight_decay=5e-4)
    if options is not None:
        opt = phalanx.create_multi_node_optimizer(opt, comm, **options)
    gossips = options is not None and isinstance(options["sync"], phalanx.Gossip)
    if gossips:
        opt.follow(model)
    spreads, begun = [], time.perf_counter()
    steps = len(source.y) // batch
    for epoch in range(setting.epochs):
        for step, mine in enumerate(own_batches(comm, seed, epoch, len(source.y), batch, dealt_anew=options is not None)):
            learning_rate(opt, setting, (epoch + (step + 1) / steps) / setting.epochs)
            opt.zero_grad()
            nn.functional.cross_entropy(model(scaled(source.x[mine], setting)), source.y[mine]).backward()
            opt.step()
        if gossips:
            spreads.append(opt.spread())
    seconds = time.perf_counter() - begun
    if gossips:
        opt.average_()
    elif options is not None:
        phalanx.average_batchnorm_(model, comm)
    accuracy = test_accuracy(model.eval(), held_out, setting, comm, equal=options is not None)
    return {"accuracy": accuracy, "spread": spreads, "seconds": round(seconds, 1)}


def own_batches(
    comm: phalanx.Communicator, seed: int, epoch: int, samples: int, batch: int, *, dealt_anew: bool
) -> tuple[torch.Tensor, ...]:
    """The numbers of this rank's samples in every step of an epoch; unless `dealt_anew` always of one part of all samples."""
    whole = samples // batch * batch
    dealt = torch.from_numpy(epoch_order(seed, epoch if dealt_anew else 0, samples)[:])[:whole].view(comm.size, -1)[comm.rank]
    if not dealt_anew:
        dealt = dealt[torch.from_numpy(epoch_order(seed, epoch, len(dealt))[:])]
    return dealt.split(batch // comm.size)


def learning_rate(opt: Any, setting: Setting, done: float) -> None:
    """Up to its peak and down to 0, by the share of the run that is over after this step."""
    for group in opt.param_groups:
        group["lr"] = setting.peak * min(done / WARM_UP, (1 - done) / (1 - WARM_UP))


def scaled(x: torch.Tensor, setting: Setting) -> torch.Tensor:
    return (x.float() / 255 - setting.mean) / setting.deviation


@torch.no_grad()
def test_accuracy(model: nn.Module, held_out: Any, setting: Setting, comm: phalanx.Communicator, *, equal: bool) -> float:
    """Of `equal` replicas each tests its share of the images; of different ones each tests all, and their mean counts."""
    mine = slice(comm.rank, None, comm.size) if equal else slice(None)
    batches = zip(held_out.x[mine].split(500), held_out.y[mine].split(500))
    right = sum(int((model(scaled(x, setting)).argmax(1) == y).sum()) for x, y in batches)
    return sum(comm.allgather_obj(right)) / len(held_out.y) / (1 if equal else comm.size)


# ---- the study -------------------------------------------------------------------------------------------------------------


def kind_of(data: str) -> str:
    """`fashion-mnist` of `fashion-mnist:DIR`."""
    return data.partition(":")[0]


def run(data: str, variants: list[str], seed: int, batch: int, epochs: int, ranks: int) -> Iterator[dict[str, Any]]:
    """What rank 0 found for each variant, of so many ranks started here."""
    numbers = ["--rank", str(seed), "--batch", str(batch), "--epochs", str(epochs)]
    command = [sys.executable, __file__, *numbers, "--data", data, "--only", *variants]
    with started(command, ranks) as processes:
        for line in lines_of(processes[0], deadline=DEADLINE * len(variants)):
            yield json.loads(line)
        finish(processes, deadline=60)


def table(rows: list[dict[str, Any]]) -> str:
    """By data, epochs and variant: mean and deviation over the seeds, and the mean distance from all-reduce of equal seeds."""
    head = ["data", "epochs", "variant", "seeds", "accuracy", "against all-reduce", "spread at the end"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    by_kind: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault((row["data"], row["epochs"], row["variant"]), {})[row["seed"]] = row
    for (data, epochs, variant), own in sorted(by_kind.items(), key=lambda item: item[0][:2]):
        judge = by_kind.get((data, epochs, "all-reduce"), {})
        found = [row["accuracy"] for row in own.values()]
        deviation = f" ± {statistics.stdev(found):.2%}" if len(found) > 1 else ""
        both = own.keys() & judge.keys()
        apart = statistics.mean(own[seed]["accuracy"] - judge[seed]["accuracy"] for seed in both) if both else None
        against = "" if apart is None or variant == "all-reduce" else f"{100 * apart:+.2f}"
        spreads = [row["spread"][-1] for row in own.values() if row["spread"]]
        spread = f"{statistics.mean(spreads):.1e}" if spreads else ""
        lines.append(
            f"| {data} | {epochs} | {variant} | {len(own)} | {statistics.mean(found):.2%}{deviation} | {against} | {spread} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["digits"], help="digits, fashion-mnist:DIR or cifar10:DIR")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "study_gossip.jsonl")
    parser.add_argument("--batch", type=int, default=256, help="samples per step, over all ranks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, help="others than a data set has by default")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="of the variants of a data set only these")
    parser.add_argument("--rank", type=int, metavar="SEED", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for data in args.data:
        if kind_of(data) not in SETTINGS:
            parser.error(f"--data {data}: one of {', '.join(SETTINGS)}, with its directory after a colon")
    if args.rank is not None:
        torch.set_num_threads(1)
        with phalanx.create_communicator(timeout=PATIENT) as comm:
            for variant in args.only:
                found = train(comm, args.data[0], variant, args.rank, args.batch, args.epochs)
                if comm.rank == 0:
                    print(json.dumps(found), flush=True)
        return
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    for seed, data in itertools.product(args.seeds, args.data):
        setting = SETTINGS[kind_of(data)]
        setting = replace(setting, epochs=args.epochs or setting.epochs)
        here = {"data": kind_of(data), "seed": seed, "ranks": args.ranks, "batch": args.batch}
        here |= {"epochs": setting.epochs, "peak": setting.peak}
        done = {row["variant"] for row in rows if here.items() <= row.items()}
        wanted = [variant for variant in setting.variants if variant in (args.only or VARIANTS) and variant not in done]
        if not wanted:
            continue
        for found, variant in zip(run(data, wanted, seed, args.batch, setting.epochs, args.ranks), wanted, strict=True):
            versions = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version()}
            rows.append({**here, "variant": variant, **found, **versions})
            with args.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"# {kind_of(data)}, {variant}, seed {seed}: {found['accuracy']:.2%} in {found['seconds']:.0f} s", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
