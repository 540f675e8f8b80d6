"""`phalanx plan`: predict a training run on a cluster, and find and explain the best way to communicate there."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace

import numpy as np

from phalanx.cli.plan_device import device_of, read_model
from phalanx.cli.plan_goals import answer
from phalanx.cli.plan_options import WIRES, add_parser
from phalanx.cli.plan_techniques import EVERY, MAY_LOSE, check_techniques, technique_lines
from phalanx.cli.usage import UsageError
from phalanx.cluster import PRESETS, PROFILES, BackendProfile, Cluster, Model, by_size, compile_schedule
from phalanx.cluster import calibrate as calibration
from phalanx.cluster import machine as cluster_model
from phalanx.cluster import profile_file as backend_profile
from phalanx.cluster.candidates import FAMILIES, Algorithm, always
from phalanx.cluster.chance import Failures, Noise, Spread, spread
from phalanx.cluster.curve import efficiency_curve
from phalanx.cluster.devices import STATE
from phalanx.cluster.effects import changed
from phalanx.cluster.hosts_differ import typical_slowness
from phalanx.cluster.picture import efficiency_svg, timeline_svg, trace
from phalanx.cluster.plan import make_plan
from phalanx.cluster.pricing import domain_of, price_techniques
from phalanx.cluster.question import GROUP_SIZES, Plan, Question
from phalanx.cluster.screen import rank_candidates
from phalanx.cluster.table import WIDTH, as_data, describe, fold, table
from phalanx.cluster.techniques import as_records, recommend
from phalanx.cluster.training import Prices, Training, whole_training
from phalanx.schedule.names import find_all_reduce, is_file, read_text


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the command line."""
    add_parser(verbs).set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, print, and write the requested files."""
    if args.show_cluster:
        print(cluster_model.to_json(PRESETS[args.show_cluster]), end="")
        return 0
    asks = args.within is not None or args.budget is not None
    for name in ("cluster",) if asks else ("cluster", "batch"):
        if not getattr(args, name):
            raise UsageError(f"--{name} is missing; `phalanx plan --help` has examples")
    if args.within is not None and args.budget is not None:
        raise UsageError("--within and --budget are two questions; ask one of them")
    check_techniques(args)
    if asks and args.techniques:
        raise UsageError("--techniques compares steps on one number of hosts; --within and --budget look for that number")
    if asks and args.ranks is not None:
        raise UsageError("--ranks is what --within and --budget look for; leave it out")
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):  # raise instead of planning with infinities
            return _run(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except ArithmeticError as error:  # an input is absurdly large or small
        raise UsageError(f"these numbers are too large or too small to plan with ({error})") from None
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None


def _run(args: argparse.Namespace) -> int:
    cluster = _cluster(args)
    profile = _profile(args, cluster)
    families, own = _algorithms(args, cluster)
    model, compute = read_model(args)
    asks = args.within is not None or args.budget is not None
    question = Question(
        cluster,
        model,
        compute,
        profile,
        args.batch or cluster.ranks,
        group_sizes=tuple(size * 1e6 for size in args.group or ()) or GROUP_SIZES,
        wires=WIRES[args.wire],
        families=families,
        double_buffering=args.double_buffering,
        input=args.input / 1e3,
        host_spread=args.host_spread,
        own=own,
    )
    prices = Prices(args.price, args.watts)
    failures = None if args.mtbf is None else Failures(args.mtbf * 3600, args.checkpoint, args.restart)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    if asks:
        if own:
            raise UsageError("a schedule in a file has one number of ranks; --within and --budget try many")
        return answer(args, replace(question, families=_quick(families)), prices, failures, width)
    plan = make_plan(question)
    plan = replace(plan, spread=_spread(args, plan), warnings=(*plan.warnings, *_too_large(args, model)))
    training = _training(args, plan, prices, failures)
    others = [(f"{name} x{factor:g}", rank_candidates(changed(question, name, factor))[0]) for name, factor in args.what_if]
    print(table(plan, training, others, width), end="")
    data = as_data(plan, training, others)
    if args.techniques:
        data["techniques"] = _techniques(args, question, width)
    if args.json:
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if args.schedules:
        args.schedules.write_text(by_size.to_file(cluster, profile), encoding="utf-8")
    if args.save_profile:
        args.save_profile.write_text(backend_profile.to_json(profile), encoding="utf-8")
    _pictures(args, plan)
    return 0


def _techniques(args: argparse.Namespace, question: Question, width: int) -> list[dict[str, object]]:
    """Print the techniques that save bytes, and return them as data."""
    may_lose = MAY_LOSE if args.may_lose is None else args.may_lose
    rows = price_techniques(question, every=args.every or EVERY, ranks=tuple(dict.fromkeys(args.low_rank or (4,))))
    domain = domain_of(question.model)
    advice = recommend(rows, domain, may_lose)
    print(fold(technique_lines(rows, advice, domain, may_lose), max(width, 84)), end="")
    return as_records(rows, advice, domain, may_lose)


def _quick(families: tuple[str, ...]) -> tuple[str, ...]:
    """The families that are quick to price, because a search prices many times."""
    return tuple(family for family in families if family not in ("tree", "halving-doubling")) or families


def _algorithms(args: argparse.Namespace, cluster: Cluster) -> tuple[tuple[str, ...], tuple[Algorithm, ...]]:
    """Families by name, and the user's own schedules, which are verified."""
    asked = args.algorithm or [family for family in FAMILIES if not family.startswith("gossip")]
    families, own = [], []
    for text in asked:
        if text in FAMILIES:
            families.append(text)
        elif is_file(text):
            schedule = find_all_reduce(text, cluster.ranks, f"--algorithm {text}")
            own.append(Algorithm("own", text, always(schedule)))
        else:
            raise UsageError(f"--algorithm {text}: neither a file nor one of {', '.join(FAMILIES)}")
    if args.gossip:
        families += ["gossip", "gossip-hosts"]
    return tuple(dict.fromkeys(families)), tuple(own)


def _too_large(args: argparse.Namespace, model: Model) -> list[str]:
    """A note if one device cannot hold what plain data parallelism keeps on each."""
    device, needed = device_of(args), STATE * model.elements
    if device is None or needed <= device.memory:
        return []
    return [
        f"weights, gradients and Adam's moments of {model.name} take {needed / 1e9:.0f} GB, but one {device.name} has"
        f" {device.memory / 1e9:.0f}. Every rank holds all of them here, so divide the model first"
    ]


def _training(args: argparse.Namespace, plan: Plan, prices: Prices, failures: Failures | None) -> Training | None:
    """The whole run, or None if no number of epochs is published for it."""
    model, cluster = plan.question.model, plan.question.cluster
    if args.trace_batch and args.epochs is not None:
        raise UsageError("--epochs has no effect: a trace does not show how many samples an epoch has")
    if args.epochs is None and model.name != "resnet50":
        if args.target_accuracy or args.price or args.watts or args.mtbf:
            raise UsageError(f"--epochs is missing: epochs to an accuracy are published for ResNet-50, not for {model.name}")
        return None
    return whole_training(
        plan.seconds,
        args.batch,
        model.samples,
        devices=cluster.ranks,
        hosts=cluster.hosts,
        epochs=args.epochs,
        accuracy=args.target_accuracy,
        prices=prices,
        failures=failures,
    )


def _pictures(args: argparse.Namespace, plan: Plan) -> None:
    step, question = plan.best.step, plan.question
    assert step is not None, "the best candidate is always simulated"
    title = f"{question.model.name} on {question.cluster.ranks} ranks of {question.cluster.name}"
    if args.svg:
        how = describe(plan.best, question.profile, question.model.elements)
        args.svg.write_text(timeline_svg(step, f"{title}: {how}"), encoding="utf-8")
    if args.trace:
        args.trace.write_text(trace(step), encoding="utf-8")
    if args.curve:
        args.curve.write_text(efficiency_svg(efficiency_curve(question), f"{title}: efficiency"), encoding="utf-8")


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
