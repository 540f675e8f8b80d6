"""`phalanx plan --within 1h` and `--budget N`: find the number of hosts and the batch."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence

from phalanx.cli.plan_device import device_of
from phalanx.cli.usage import UsageError
from phalanx.cluster.chance import Failures
from phalanx.cluster.goals import Limits, Option, search
from phalanx.cluster.question import Question
from phalanx.cluster.table import duration, fold, option_lines
from phalanx.cluster.training import Prices, Training, largest_batch, whole_training

UNITS = {"s": 1 / 3600, "m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0}


def hours(text: str) -> float:
    """A parser of durations for argparse: 90s, 30min, 1h, 2d."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|min|h|d)", text, re.ASCII)
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 30min, 1h or 2d")
    return float(found[1]) * UNITS[found[2]]


def limits_of(args: argparse.Namespace, question: Question) -> tuple[Limits, str]:
    """The largest batch of a device and of a step, and the source of both."""
    device, resnet = device_of(args), question.model.name == "resnet50"
    if args.device_batch:
        most, source = args.device_batch, "as asked"
    elif device and resnet:
        most, source = device.most, f"the largest published batch of one {device.name}: {device.most_source}"
    else:
        raise UsageError(
            "--device-batch is missing: give the most samples that one device holds; only ResNet-50 on a preset has a default"
        )
    if args.batch:
        return Limits(most, args.batch), f"{most} samples per device ({source}); {args.batch} per step as asked"
    if args.epochs is not None:
        raise UsageError("--epochs needs --batch here: for how many samples per step are they?")
    step = largest_batch(args.target_accuracy)
    return Limits(most, step), f"{most} samples per device ({source}); {step:g} per step, the largest published batch"


def answer(args: argparse.Namespace, question: Question, prices: Prices, failures: Failures | None, width: int) -> int:
    """Search, print, and write the answer as data."""
    if question.model.name != "resnet50" and args.epochs is None:
        raise UsageError(f"--epochs is missing: epochs are published for ResNet-50, not for {question.model.name}")
    limits, why = limits_of(args, question)

    def price(asked: Question, step: float) -> Training:
        return whole_training(
            step,
            asked.batch,
            asked.model.samples,
            devices=asked.cluster.ranks,
            hosts=asked.cluster.hosts,
            epochs=args.epochs,
            accuracy=args.target_accuracy,
            prices=prices,
            failures=failures,
        )

    def spent(option: Option) -> float:
        return option.device_hours if option.training.cost is None else option.training.cost

    unit = "device hours" if prices.per_hour is None else "money"
    if args.within is not None:
        asked = f"within {duration(args.within)}"
        chosen, seen = search(question, limits, price, lambda option: option.training.hours <= args.within, fewest=True)
    else:
        asked = f"for {args.budget:g} {'device hours' if prices.per_hour is None else ''}".strip()
        chosen, seen = search(question, limits, price, lambda option: spent(option) <= args.budget, fewest=False)
    if not seen:
        raise UsageError(f"no batch fits: {why}")
    if chosen is None:
        best = min(seen, key=lambda option: option.training.hours if args.within is not None else spent(option))
        least = duration(best.training.hours) if args.within is not None else f"{spent(best):,.2f} {unit}"
        raise UsageError(
            f"no number of hosts up to {seen[-1].question.cluster.hosts} finishes {asked}; the least is {least}, with"
            f" {best.question.cluster.hosts} hosts and a batch of {best.question.batch:g}. Limits: {why}"
        )
    print(fold(option_lines(chosen, seen, asked), max(width, 84)), end="")
    print(fold(_notes(args, chosen, why), width), end="")
    if args.json:
        args.json.write_text(json.dumps(_data(chosen, seen, why), indent=2) + "\n", encoding="utf-8")
    return 0


def _notes(args: argparse.Namespace, chosen: Option, why: str) -> list[str]:
    cluster, per_host = chosen.question.cluster, chosen.question.cluster.per_host
    lines = [f"epochs    {chosen.training.epochs_source}", f"limits    {why}"]
    if chosen.question.compute.source:
        lines.append(f"assumes   {chosen.question.compute.source}")
    command = f"phalanx plan --cluster {args.cluster} --ranks {cluster.hosts * per_host} --batch {chosen.question.batch:g}"
    return [*lines, f"more      {command} explains this answer"]


def _data(chosen: Option, seen: Sequence[Option], why: str) -> dict[str, object]:
    def one(option: Option) -> dict[str, object]:
        return {
            "hosts": option.question.cluster.hosts,
            "devices": option.question.cluster.ranks,
            "batch": option.question.batch,
            "epochs": option.training.epochs,
            "epochs_source": option.training.epochs_source,
            "step_s": option.best.seconds,
            "schedule": option.best.algorithm.name,
            "hours": option.training.hours,
            "device_hours": option.device_hours,
            "cost": option.training.cost,
        }

    return {"chosen": one(chosen), "looked_at": [one(option) for option in seen], "limits": why}
