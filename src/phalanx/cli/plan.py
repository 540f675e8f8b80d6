"""`phalanx plan`: how long a training run takes on a cluster, the best way to communicate there, and why."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from phalanx.cli.numbers import at_least_one, not_negative, part, positive
from phalanx.cli.usage import UsageError
from phalanx.cluster import (
    MODELS,
    PRESETS,
    PROFILES,
    BackendProfile,
    Cluster,
    Compute,
    Model,
    by_size,
    compile_schedule,
    from_one,
    from_two,
    workload_file,
)
from phalanx.cluster import calibrate as calibration
from phalanx.cluster import machine as cluster_model
from phalanx.cluster import profile_file as backend_profile
from phalanx.cluster.candidates import FAMILIES
from phalanx.cluster.chance import Failures, Noise, Spread, spread
from phalanx.cluster.curve import efficiency_curve
from phalanx.cluster.hosts_differ import HOST_SPREAD, typical_slowness
from phalanx.cluster.picture import efficiency_svg, timeline_svg, trace
from phalanx.cluster.plan import make_plan
from phalanx.cluster.presets import PUBLISHED_RATES
from phalanx.cluster.question import GROUP_SIZES, Plan, Question
from phalanx.cluster.table import as_data, describe, table
from phalanx.cluster.training import Prices, whole_training
from phalanx.schedule.names import is_file, read_text

WIRES = {"float32": (4,), "float16": (2,), "both": (4, 2)}

EXAMPLES = """examples:
  phalanx plan --cluster abci --model resnet50 --batch 81920 --rate 1403@208
  phalanx plan --cluster dgx-a100 --ranks 1024 --batch 35840 --rate 3293@408 --curve scaling.svg --svg step.svg
  phalanx plan --cluster cloud-10g --ranks 32 --batch 2048 --rate 300@64 --wire both --gossip
  phalanx plan --show-cluster lab > mine.json     edit it, then: phalanx plan --cluster mine.json ...
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make `plan` known to the command line."""
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
        "--model", metavar="NAME|FILE", default="resnet50", help=f"{', '.join(MODELS)}, or a file of phalanx.train.profile_model"
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
    how.add_argument("--algorithm", action="append", choices=FAMILIES, help="only these (default: all but gossip)")
    how.add_argument("--gossip", action="store_true", help="also consider gossip, which trains differently from an all-reduce")
    how.add_argument(
        "--group", action="append", type=positive, metavar="MB", help="a size of gradient groups to try; may be repeated"
    )
    how.add_argument("--wire", default="float16", choices=WIRES)
    how.add_argument(
        "--double-buffering", action="store_true", help="apply gradients one step late, so that the exchange has a whole step"
    )
    chance = parser.add_argument_group("chance")
    chance.add_argument("--host-spread", type=not_negative, default=HOST_SPREAD, help="relative standard deviation between hosts")
    chance.add_argument("--jitter", type=not_negative, default=0.0, help="relative spread of a rank's steps; adds p50 and p99")
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, print, and write the requested files."""
    if args.show_cluster:
        print(cluster_model.to_json(PRESETS[args.show_cluster]), end="")
        return 0
    for name in ("cluster", "batch"):
        if not getattr(args, name):
            raise UsageError(f"--{name} is missing; `phalanx plan --help` has examples")
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):  # raise instead of planning with infinities
            return _run(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except ArithmeticError as error:  # a number on the command line or in a file is absurd
        raise UsageError(f"these numbers are too large or too small to plan with ({error})") from None
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None


def _run(args: argparse.Namespace) -> int:
    cluster = _cluster(args)
    profile = _profile(args, cluster)
    families = tuple(args.algorithm or (family for family in FAMILIES if not family.startswith("gossip")))
    if args.gossip:
        families = tuple(dict.fromkeys((*families, "gossip", "gossip-hosts")))
    model, compute = _model(args)
    question = Question(
        cluster,
        model,
        compute,
        profile,
        args.batch,
        group_sizes=tuple(size * 1e6 for size in args.group or ()) or GROUP_SIZES,
        wires=WIRES[args.wire],
        families=families,
        double_buffering=args.double_buffering,
        input=args.input / 1e3,
        host_spread=args.host_spread,
    )
    plan = make_plan(question)
    if args.epochs is None and model.name != "resnet50":
        note = f"the epochs are those of ResNet-50 on ImageNet; set those of {model.name} with --epochs"
        plan = replace(plan, warnings=(*plan.warnings, note))
    varied = _spread(args, plan)
    failures = None if args.mtbf is None else Failures(args.mtbf * 3600, args.checkpoint, args.restart)
    training = whole_training(
        varied.mean if varied else plan.best.seconds,
        args.batch,
        question.model.samples,
        devices=cluster.ranks,
        hosts=cluster.hosts,
        epochs=args.epochs,
        prices=Prices(args.price, args.watts),
        failures=failures,
    )
    print(table(plan, training, varied), end="")
    if args.json:
        args.json.write_text(json.dumps(as_data(plan, training, varied), indent=2) + "\n", encoding="utf-8")
    if args.schedules:
        args.schedules.write_text(by_size.to_file(cluster, profile), encoding="utf-8")
    if args.save_profile:
        args.save_profile.write_text(backend_profile.to_json(profile), encoding="utf-8")
    _pictures(args, plan)
    return 0


def _pictures(args: argparse.Namespace, plan: Plan) -> None:
    step = plan.best.step
    assert step is not None, "the best candidate is always simulated"
    title = f"{plan.question.model.name} on {plan.question.cluster.ranks} ranks of {plan.question.cluster.name}"
    if args.svg:
        args.svg.write_text(timeline_svg(step, f"{title}: {describe(plan.best)}"), encoding="utf-8")
    if args.trace:
        args.trace.write_text(trace(step), encoding="utf-8")
    if args.curve:
        args.curve.write_text(efficiency_svg(efficiency_curve(plan.question), f"{title}: efficiency"), encoding="utf-8")


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.cluster in PRESETS:
        cluster = PRESETS[args.cluster]
    elif is_file(args.cluster):
        cluster = cluster_model.from_json(read_text(args.cluster))
    else:
        raise UsageError(f"{args.cluster!r} is neither a file nor one of {', '.join(PRESETS)}")
    return cluster if args.ranks is None else cluster.with_ranks(args.ranks)


def _profile(args: argparse.Namespace, cluster: Cluster) -> BackendProfile:
    profile = PROFILES[args.backend]
    if args.profile:
        profile = backend_profile.from_json(read_text(args.profile))
    if args.calibrate:
        rows = calibration.read_rows(read_text(args.calibrate).splitlines())
        profile = calibration.fit(rows, cluster, profile)
    return profile


def _model(args: argparse.Namespace) -> tuple[Model, Compute]:
    """A known model, whose device `--rate` describes, or your own, whose file may describe it."""
    if args.model in MODELS:
        return MODELS[args.model], _compute(args, MODELS[args.model])
    if not is_file(args.model):
        raise UsageError(f"--model {args.model} is neither a file nor one of {', '.join(MODELS)}")
    model, measured = workload_file.from_json(read_text(args.model))
    if not args.rate:
        if args.overhead:
            raise UsageError("--overhead has no effect: the file of the model has the part that does not grow with the batch")
        return model, replace(measured, optimizer=args.optimizer / 1e3) if args.optimizer else measured
    return model, replace(_compute(args, model), forward=measured.forward)


def _compute(args: argparse.Namespace, model: Model) -> Compute:
    """The device: from one rate and the model's number of kernels, or from two rates."""
    published = PUBLISHED_RATES.get(args.cluster) if model.name == "resnet50" and not args.rate else None
    if not args.rate and published is None:
        raise UsageError("--rate is missing: samples/s of one device, as in --rate 1403@208; `phalanx plan --help` has examples")
    pairs = []
    for text in args.rate or ([published.rate] if published else []):
        rate, at, batch = text.partition("@")
        try:
            pairs.append((float(batch), float(rate)))
        except ValueError:
            at = ""
        if not at or not all(0 < number < inf for number in pairs[-1]):
            raise UsageError(f"--rate {text}: give samples/s and batch, as in 1403@208")
    if len(pairs) > 2:
        raise UsageError(f"--rate: {len(pairs)} times; give one rate or two")
    if len(pairs) == 2:
        if args.overhead:
            raise UsageError(
                "--overhead has no effect with two rates, which already determine the part that does not grow with the batch"
            )
        return replace(from_two(*pairs), optimizer=args.optimizer / 1e3)
    note = (
        "one rate, so the part that does not grow with the batch is assumed to be 10 us per kernel; a second --rate replaces it"
    )
    if not model.kernels:
        note = "one rate, so the time is assumed to be proportional to the batch; a second --rate adds a constant part"
    if published:
        note = f"--rate {published.rate}, {published.source}; {note}"
    (batch, rate) = pairs[0]
    compute = from_one(model, batch, rate, overhead=args.overhead / 1e3, source=note)
    return replace(compute, optimizer=args.optimizer / 1e3)


def _spread(args: argparse.Namespace, plan: Plan) -> Spread | None:
    if not (args.jitter or args.stragglers):
        return None
    question, best = plan.question, plan.best
    schedules = (best.algorithm.make(number) for number in range(best.algorithm.rounds))
    first, *others = (compile_schedule(schedule, question.cluster, question.profile) for schedule in schedules)
    noise = Noise(args.jitter, args.stragglers)
    always = typical_slowness(question.cluster, question.host_spread)
    model, compute, batch = question.model, question.compute, question.per_rank
    return spread(first, model, compute, batch, best.plan, noise, always=always, rounds=others)
