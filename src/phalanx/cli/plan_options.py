"""The options of `phalanx plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.numbers import at_least_one, not_negative, part, positive
from phalanx.cli.plan_device import KNOWN
from phalanx.cli.plan_goals import hours
from phalanx.cluster import PRESETS, PROFILES
from phalanx.cluster.candidates import FAMILIES
from phalanx.cluster.effects import INPUTS
from phalanx.cluster.hosts_differ import HOST_SPREAD

WIRES = {"float32": (4,), "float16": (2,), "both": (4, 2)}

EXAMPLES = """examples:
  phalanx plan --cluster abci --model resnet50 --batch 81920 --rate 1403@208
  phalanx plan --cluster dgx-a100 --ranks 1024 --batch 35840 --rate 3293@408 --curve scaling.svg --svg step.svg
  phalanx plan --cluster cloud-10g --ranks 32 --batch 2048 --rate 300@64 --wire both --gossip
  phalanx plan --cluster cloud-10g --ranks 32 --batch 2048 --techniques     8 bits, low rank, local steps, gossip: which pays?
  phalanx plan --cluster dgx-a100 --within 1h --price 2
  phalanx plan --cluster abci --batch 81920 --what-if network=0.5 --what-if device=2
  phalanx plan --cluster dgx-a100 --ranks 64 --model gpt2-xl --batch 512 --epochs 1
  phalanx plan --show-cluster lab > mine.json     edit it, then: phalanx plan --cluster mine.json ...
"""


def what_if(text: str) -> tuple[str, float]:
    """A parser of `network=0.5` for argparse."""
    name, _, factor = text.partition("=")
    if name not in INPUTS:
        raise argparse.ArgumentTypeError(
            f"{name!r} is not an input of a plan; give one of {', '.join(INPUTS)}, as in network=0.5"
        )
    return name, positive(factor)


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `phalanx plan` with its options."""
    parser = verbs.add_parser(
        "plan",
        help="predict a training run on a cluster",
        description="Predict the step time of a training run on a cluster, choose the best way to communicate, and explain why.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what")
    what.add_argument("--cluster", metavar="FILE|NAME", help=f"a file, or {', '.join(PRESETS)}")
    what.add_argument("--show-cluster", metavar="NAME", choices=PRESETS, help="print a preset as a file to edit, and stop")
    what.add_argument("--ranks", type=at_least_one, help="use as many of the cluster's hosts as have this many ranks")
    what.add_argument(
        "--model",
        metavar="NAME|FILE",
        default="resnet50",
        help=f"{', '.join(KNOWN)}, or a file of phalanx.train.profile_model, torch.profiler or Chakra",
    )
    what.add_argument(
        "--trace-batch",
        type=at_least_one,
        metavar="N",
        help="samples of the step, if --model is a trace of a profiler",
    )
    what.add_argument("--batch", type=at_least_one, help="samples per step over all ranks")
    what.add_argument(
        "--rate",
        action="append",
        metavar="R@B",
        help="samples/s of one device with batch B; give it twice for a device's curve (default: a published one of ResNet-50)",
    )
    what.add_argument(
        "--overhead",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="part of a step on one device that does not depend on the batch",
    )
    what.add_argument(
        "--optimizer", type=not_negative, default=0.0, metavar="MS", help="time of the update, after the last gradient"
    )
    what.add_argument(
        "--input", type=not_negative, default=0.0, metavar="MS", help="time to prepare a batch, in parallel with the step"
    )
    how = parser.add_argument_group("how it communicates")
    how.add_argument("--backend", default="nccl", choices=PROFILES)
    how.add_argument("--calibrate", metavar="ROWS", type=Path, help="fit the backend to rows of `phalanx bench allreduce --json`")
    how.add_argument("--profile", metavar="FILE", type=Path, help="a backend as --save-profile wrote it")
    how.add_argument("--save-profile", metavar="FILE", type=Path)
    how.add_argument(
        "--algorithm",
        action="append",
        metavar="NAME|FILE",
        help=f"only these (default: all but gossip): {', '.join(FAMILIES)}, or a file with your own schedule",
    )
    how.add_argument("--gossip", action="store_true", help="also consider gossip, which trains differently from an all-reduce")
    how.add_argument(
        "--group", action="append", type=positive, metavar="MB", help="a size of gradient groups to try; may be repeated"
    )
    how.add_argument("--wire", default="float16", choices=WIRES)
    how.add_argument(
        "--double-buffering", action="store_true", help="apply gradients one step late, so that the exchange has a whole step"
    )
    slow = parser.add_argument_group("slow networks")
    slow.add_argument(
        "--techniques",
        action="store_true",
        help="price ways to save bytes between hosts (16 bits, Int8, PowerSGD, LocalSGD, DiLoCo, gossip), and recommend one",
    )
    slow.add_argument("--every", type=at_least_one, metavar="H", help="steps of LocalSGD and DiLoCo (default 50)")
    slow.add_argument("--low-rank", type=at_least_one, action="append", metavar="R", help="rank of PowerSGD; may be repeated")
    slow.add_argument(
        "--may-lose",
        type=not_negative,
        metavar="POINTS",
        help="percentage points of accuracy that a recommended technique may have lost where it was measured (default 0.5)",
    )
    chance = parser.add_argument_group("chance")
    chance.add_argument("--host-spread", type=not_negative, default=HOST_SPREAD, help="relative standard deviation between hosts")
    chance.add_argument(
        "--jitter", type=part, default=0.0, help="relative spread of a rank's steps, from 0 to 1; adds p50 and p99"
    )
    chance.add_argument("--stragglers", type=part, default=0.0, help="share of the ranks that are 1.5 times slower in a step")
    chance.add_argument("--mtbf", type=positive, metavar="HOURS", help="mean time between failures of one host")
    chance.add_argument(
        "--checkpoint", type=not_negative, default=30.0, metavar="S", help="time to write a checkpoint (with --mtbf)"
    )
    chance.add_argument(
        "--restart",
        type=not_negative,
        default=300.0,
        metavar="S",
        help="time from a failure until training continues (with --mtbf)",
    )
    training = parser.add_argument_group("the whole training run")
    training.add_argument("--epochs", type=positive, help="default: published epochs to 75.9 %% top-1 for this batch (ResNet-50)")
    training.add_argument("--price", type=positive, metavar="P", help="price per device and hour")
    training.add_argument("--watts", type=positive, help="power per device, with its share of the host")
    training.add_argument(
        "--target-accuracy",
        type=positive,
        metavar="PERCENT",
        help="epochs of published runs of ResNet-50 that reached this top-1",
    )
    asks = parser.add_argument_group("questions")
    asks.add_argument("--within", type=hours, metavar="TIME", help="how many hosts finish in this time (90s, 30min, 1h, 2d)?")
    asks.add_argument(
        "--budget", type=positive, metavar="N", help="the fastest run for this much: device hours, or money with --price"
    )
    asks.add_argument(
        "--device-batch",
        type=at_least_one,
        metavar="N",
        help="most samples that one device holds (default: published, ResNet-50)",
    )
    asks.add_argument(
        "--what-if",
        action="append",
        type=what_if,
        default=[],
        metavar="INPUT=FACTOR",
        help=f"plan again with an input multiplied, as in network=0.5; may be repeated: {', '.join(INPUTS)}",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", type=Path, help="write everything as data")
    out.add_argument(
        "--schedules",
        metavar="FILE",
        type=Path,
        help="write the fastest all-reduce by size, for create_communicator (PHALANX_SCHEDULES)",
    )
    out.add_argument("--svg", metavar="FILE", type=Path, help="write a picture of the step")
    out.add_argument("--trace", metavar="FILE", type=Path, help="write the step for chrome://tracing or ui.perfetto.dev")
    out.add_argument("--curve", metavar="FILE", type=Path, help="write a picture of efficiency over the number of ranks")
    return parser
