"""Final test accuracy of what saves bytes on a slow network, against the same epochs of all-reduce: 8 ranks, 3 seeds.

    python benchmarks/study_slow_networks.py --data fashion-mnist:DIR cifar10:DIR [--only VARIANT ...] [--seeds 0 1 2]

The set-up is that of study_gossip.py: network, batch (256 over all ranks), epochs, learning rate, momentum, order of samples. Its
rows for "all-reduce" and "gossip" (dissemination) are the baselines, unless this program ran them too. One difference: tensors
are channels_last, which computes the same in half the time, and ranks are threads of one process, so that on a busy machine they
do not wait for each other. What travels, and what becomes of it, is the same.

Every run appends one row to FILE; runs that are there already are not done again, so the study can be interrupted and continued.
The table at the end is made of all rows.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from study_gossip import PATIENT, SETTINGS, Setting, kind_of, learning_rate, own_batches, scaled, small_net, test_accuracy
from torch import nn

import phalanx

BASELINES = Path(__file__).parent / "results" / "study_gossip.jsonl"


def exact(**options: Any) -> dict[str, Any]:
    return {"sync": phalanx.Gossip(topology="exact", patience=PATIENT, **options)}


@dataclass(frozen=True)
class Variant:
    """Options of `create_multi_node_optimizer`, and the peak of the learning rate, relative to all-reduce's."""

    options: functools.partial[dict[str, Any]]
    peak: float = 1.0
    outlier: bool = False  # whether the network has a parameter with gradients that are 1,000 times as large as others


PLAIN = functools.partial(dict, sync=phalanx.AllReduce())
INT8 = functools.partial(dict, wire=phalanx.Int8(level="rank"))
# one scale for all numbers of the network, and what it rounds away is lost
COARSE = functools.partial(dict, wire=phalanx.Int8(block=1 << 16, error_feedback=False, level="rank"))

VARIANTS = {
    "all-reduce": Variant(PLAIN),
    "gossip": Variant(functools.partial(dict, sync=phalanx.Gossip(patience=PATIENT))),
    "gossip, exact": Variant(functools.partial(exact)),
    "Int8": Variant(INT8),
    "PowerSGD, rank 4": Variant(functools.partial(dict, wire=phalanx.PowerSGD(rank=4))),
    "Int8, no error feedback, one block": Variant(COARSE),
    # The negative control. One scale for all makes zeros of what is small beside the outlier.
    "all-reduce, outlier": Variant(PLAIN, outlier=True),
    "Int8, outlier": Variant(INT8, outlier=True),
    "Int8, no error feedback, one block, outlier": Variant(COARSE, outlier=True),
    "LocalSGD, H=20": Variant(functools.partial(dict, sync=phalanx.LocalSGD(every=20))),
    "DiLoCo, H=20": Variant(functools.partial(dict, sync=phalanx.DiLoCo(every=20))),
    # In a short run a momentum of 0.9 comes too late, and replicas that part in the first steps do not find together again.
    "DiLoCo, H=20, outer 1/0.7, after 200 steps": Variant(
        functools.partial(dict, sync=phalanx.DiLoCo(every=20, outer={"lr": 1.0, "momentum": 0.7, "nesterov": True}, start=200))
    ),
    # Between two outer steps a rank is alone with an eighth of the batch, which wants a lower rate.
    "DiLoCo, H=20, half the rate": Variant(functools.partial(dict, sync=phalanx.DiLoCo(every=20)), peak=0.5),
    "DiLoCo, H=20, 4 parts, overlapped": Variant(
        functools.partial(dict, sync=phalanx.DiLoCo(every=20, fragments=4, overlap=True))
    ),
    "NoLoCo, H=20": Variant(functools.partial(dict, sync=phalanx.DiLoCo(every=20, partners="random"))),
}


class Outlier(nn.Module):
    """A network with a parameter that changes nothing, but has large gradients."""

    def __init__(self, network: nn.Module, classes: int) -> None:
        super().__init__()
        self.network, self.bias = network, nn.Parameter(torch.zeros(classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = 1000 * self.bias
        return self.network(x) + (large - large.detach())


def run(data: str, variant: str, seed: int, batch: int, epochs: int, ranks: int) -> dict[str, Any]:
    """What one run finds."""
    source, held_out = (phalanx.data.open(data, split=split) for split in ("train", "test"))
    phalanx.seed_everything(seed)
    first = small_net(source.x.shape[1], len(source.classes)).to(memory_format=torch.channels_last)
    if VARIANTS[variant].outlier:
        first = Outlier(first, len(source.classes))
    setting = SETTINGS[kind_of(data)]
    replicas = [copy.deepcopy(first) for _ in range(ranks)]

    def play(comm: phalanx.Communicator) -> dict[str, Any]:
        return train(comm, replicas[comm.rank], source, held_out, setting, variant, seed, batch, epochs)

    return phalanx.run_local(ranks, play, timeout=PATIENT)[0]


def train(
    comm: phalanx.Communicator,
    model: nn.Module,
    source: Any,
    held_out: Any,
    setting: Setting,
    variant: str,
    seed: int,
    batch: int,
    epochs: int,
) -> dict[str, Any]:
    """One run on the ranks of `comm`; what was found, the same on all of them."""
    kind = VARIANTS[variant]
    setting = replace(setting, peak=setting.peak * kind.peak)
    sgd = torch.optim.SGD(model.parameters(), lr=setting.peak, momentum=0.9, nesterov=True, weight_decay=5e-4)
    opt: Any = phalanx.create_multi_node_optimizer(sgd, comm, **kind.options())
    opt.follow(model)
    spreads, begun = [], time.perf_counter()
    steps = len(source.y) // batch
    for epoch in range(epochs):
        for step, mine in enumerate(own_batches(comm, seed, epoch, len(source.y), batch, dealt_anew=True)):
            learning_rate(opt, setting, (epoch + (step + 1) / steps) / epochs)
            opt.zero_grad()
            x = scaled(source.x[mine], setting).contiguous(memory_format=torch.channels_last)
            nn.functional.cross_entropy(model(x), source.y[mine]).backward()
            opt.step()
        spreads.append(opt.spread())
    seconds = time.perf_counter() - begun
    opt.average_()
    accuracy = test_accuracy(model.eval(), held_out, setting, comm, equal=True)
    return {"accuracy": accuracy, "spread": spreads, "seconds": round(seconds, 1)}


# ---- the study -------------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """By data, epochs and variant: mean and deviation over the seeds, and how far its mean is from that of all-reduce."""
    head = ["data", "epochs", "variant", "seeds", "accuracy", "against all-reduce", "spread at the end"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    by_kind: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault((row["data"], row["epochs"], row["variant"]), {})[row["seed"]] = row
    for (data, epochs, variant), own in by_kind.items():
        judge = by_kind.get((data, epochs, "all-reduce"), {})
        found = [row["accuracy"] for row in own.values()]
        deviation = f" ± {statistics.stdev(found):.2%}" if len(found) > 1 else ""
        both = own.keys() & judge.keys()
        apart = statistics.mean(own[seed]["accuracy"] - judge[seed]["accuracy"] for seed in both) if both else None
        against = "" if apart is None or variant == "all-reduce" else f"{100 * apart:+.2f}"
        spreads = [row["spread"][-1] for row in own.values() if row["spread"]]
        spread = f"{statistics.mean(spreads):.1e}" if any(spreads) else ""
        lines.append(
            f"| {data} | {epochs} | {variant} | {len(own)} | {statistics.mean(found):.2%}{deviation} | {against} | {spread} |"
        )
    return "\n".join(lines)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["digits"], help="digits, fashion-mnist:DIR or cifar10:DIR")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "study_slow_networks.jsonl")
    parser.add_argument("--batch", type=int, default=256, help="samples per step, over all ranks")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: only the table")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, help="others than a data set has by default")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="only these variants")
    args = parser.parse_args()
    for data in args.data:
        if kind_of(data) not in SETTINGS:
            parser.error(f"--data {data}: one of {', '.join(SETTINGS)}, with its directory after a colon")
    torch.set_num_threads(1)  # per rank
    for seed, data, variant in itertools.product(args.seeds, args.data, args.only or VARIANTS):
        setting = SETTINGS[kind_of(data)]
        epochs = args.epochs or setting.epochs
        here = {"data": kind_of(data), "seed": seed, "ranks": args.ranks, "batch": args.batch}
        here |= {"epochs": epochs, "peak": setting.peak, "variant": variant}
        if any(here.items() <= row.items() for row in read(args.out)):
            continue
        found = run(data, variant, seed, args.batch, epochs, args.ranks)
        versions = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version()}
        with args.out.open("a") as file:
            file.write(json.dumps({**here, **found, **versions}) + "\n")
        print(f"# {kind_of(data)}, {variant}, seed {seed}: {found['accuracy']:.2%} in {found['seconds']:.0f} s", flush=True)
    print(table(sorted([*read(BASELINES), *read(args.out)], key=lambda row: (row["data"], row["epochs"]))))


if __name__ == "__main__":
    main()
