"""A plan for people and for other programs: a page of text, and plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from phalanx.schedule.printable import one_line

from .goals import Option
from .profile import BackendProfile
from .question import NO_EFFECT, Candidate, Plan
from .training import Training

WIDTH = 100  # characters, if the width of the terminal is unknown


def name_of(algorithm: str, profile: BackendProfile) -> str:
    """`torus:512x4`. A ring that is one library call is the library's own all-reduce."""
    own = algorithm.startswith("ring:") and profile.protocols
    return f"{profile.name.split('-')[0].upper()}'s own all-reduce" if own else algorithm


def describe(candidate: Candidate, profile: BackendProfile, elements: int) -> str:
    """`torus:512x4, groups of 8 MB, 2 bytes per gradient, overlapped with backward`."""
    plan = candidate.plan
    how = {"all-reduce": "overlapped with backward", "double buffering": "one step late", "gossip": "gossip during the step"}
    groups = f"groups of {plan.group_bytes / 1e6:g} MB, " if plan.sync == "all-reduce" else ""
    sync = how.get(plan.sync, plan.sync)
    if plan.sync == "all-reduce" and plan.group_bytes >= 4 * elements:
        groups, sync = "one group, ", "after backward"
    return f"{name_of(candidate.algorithm.name, profile)}, {groups}{plan.wire} bytes per gradient, {sync}"


def fold(lines: Iterator[str] | Sequence[str], width: int) -> str:
    """Lines as a text of at most `width` columns; continuation lines are indented like the first value."""
    folded = []
    for line in map(one_line, lines):
        folded += wrap(line, width, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(folded) + "\n"


def table(plan: Plan, training: Training | None, what_if: Sequence[tuple[str, Candidate]] = (), width: int = WIDTH) -> str:
    """The answer as a page of text."""
    return fold(_lines(plan, training, what_if), width)


def _lines(plan: Plan, training: Training | None, what_if: Sequence[tuple[str, Candidate]]) -> Iterator[str]:
    question, best = plan.question, plan.best
    cluster, profile, elements = question.cluster, question.profile, question.model.elements
    yield (
        f"{question.model.name} on {cluster.name}: {cluster.hosts} hosts x {cluster.per_host} = {cluster.ranks} ranks,"
        f" batch {question.batch:g} ({question.per_rank:g} each), {profile.name}"
    )
    if question.compute.source:
        yield f"assumes   {question.compute.source}"
    yield f"best      {describe(best, profile, elements)}"
    yield f"step      {best.seconds * 1e3:.3f} ms  (+- {plan.error:.0%}, two sigma of such configurations)"
    if plan.spread:
        spread = plan.spread
        yield (
            f"          p50 {spread.p50 * 1e3:.3f} ms, mean {spread.mean * 1e3:.3f} ms, p99 {spread.p99 * 1e3:.3f} ms"
            f" over {spread.samples} simulated steps; the rate is that of the mean"
        )
    yield f"rate      {plan.rate:,.0f} samples/s; {plan.efficiency_device:.1%} of {cluster.ranks} times one device,"
    yield f"          {plan.efficiency_host:.1%} of {cluster.hosts} times one host"
    yield from run_lines(training)
    yield "why"
    for name, seconds in plan.terms:
        if seconds > NO_EFFECT * best.seconds:
            yield f"  {seconds * 1e3:10.3f} ms {seconds / best.seconds:6.1%}  {name}"
    yield "what would change it                       step    best then"
    for effect in plan.effects:
        if abs(effect.relative) >= NO_EFFECT:
            yield f"  {effect.input + ' ' + effect.change:38s} {effect.relative:+7.1%}  {name_of(effect.best_then, profile)}"
    for asked, then in what_if:
        change, how = then.seconds / best.seconds - 1, describe(then, profile, elements)
        yield f"what if   {asked}: step {then.seconds * 1e3:.3f} ms ({change:+.1%}); best then {how}"
    rivals = _rivals(plan)
    if rivals:
        yield "also looked at"
    for candidate in rivals:
        yield f"  {candidate.seconds / best.seconds - 1:+7.1%}  {describe(candidate, profile, elements)}"
    for warning in plan.warnings:
        yield f"note      {warning}"


def run_lines(training: Training | None) -> Iterator[str]:
    """The whole run, if its length is known."""
    if training is None:
        yield "training  unknown: give --epochs; epochs to an accuracy are published only for ResNet-50"
        return
    yield f"training  {training.epochs:.1f} epochs ({training.epochs_source})"
    yield f"          {training.steps:,.0f} steps, {duration(training.hours)}" + _extras(training)


def option_lines(chosen: Option, seen: Sequence[Option], asked: str) -> Iterator[str]:
    """The answer to a question about time or money, and the other options that were tried."""
    cluster = chosen.question.cluster
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''}"
    yield (
        f"{asked}: {hosts}, {cluster.ranks} devices, batch {chosen.question.batch:g}"
        f" ({chosen.question.per_rank:g} each): {duration(chosen.training.hours)}"
    )
    yield "   hosts  devices    batch   epochs      step         time  device hours      cost"
    for option in seen:
        cost = "" if option.training.cost is None else f"{option.training.cost:10,.2f}"
        mark = ">" if option is chosen else " "
        yield (
            f"{mark} {option.question.cluster.hosts:6d} {option.question.cluster.ranks:8d} {option.question.batch:8g}"
            f" {option.training.epochs:8.1f} {option.best.seconds * 1e3:8.2f} ms {duration(option.training.hours):>10s}"
            f" {option.device_hours:13,.1f}{cost}"
        )


def _rivals(plan: Plan) -> list[Candidate]:
    """The best candidate of every other algorithm, the best few of them."""
    seen, rivals = {plan.best.algorithm.name}, []
    for candidate in sorted(plan.candidates, key=lambda candidate: candidate.seconds):
        if candidate.algorithm.name not in seen:
            seen.add(candidate.algorithm.name)
            rivals.append(candidate)
    return rivals[:6]


def duration(hours: float) -> str:
    """Hours in the unit that people would use."""
    if hours < 1 / 30:
        return f"{hours * 3600:.1f} s"
    if hours < 2:
        return f"{hours * 60:.1f} min"
    return f"{hours:.2f} h" if hours < 100 else f"{hours / 24:,.1f} days"


def _extras(training: Training) -> str:
    parts = []
    if training.checkpoint_every is not None:
        parts.append(f"goodput {training.goodput:.2%} with a checkpoint every {training.checkpoint_every / 60:.1f} min")
    elif training.goodput < 1:
        parts.append(f"goodput {training.goodput:.2%} without a checkpoint: the run is over before one pays off")
    if training.cost is not None:
        parts.append(f"cost {training.cost:,.2f}")
    if training.kwh is not None:
        parts.append(f"{training.kwh:,.1f} kWh")
    return "".join(f"; {part}" for part in parts)


def as_data(plan: Plan, training: Training | None, what_if: Sequence[tuple[str, Candidate]] = ()) -> dict[str, Any]:
    """The answer as plain data; `run` is what a training run needs to follow the plan."""
    question, best, spread = plan.question, plan.best, plan.spread
    return {
        "cluster": question.cluster.name,
        "hosts": question.cluster.hosts,
        "per_host": question.cluster.per_host,
        "model": question.model.name,
        "batch": question.batch,
        "backend": question.profile.name,
        "assumes": question.compute.source,
        "run": {
            "schedule": best.algorithm.name,
            "group_bytes": best.plan.group_bytes,
            "wire_bytes": best.plan.wire,
            "sync": best.plan.sync,
        },
        "step_s": best.seconds,
        "error": plan.error,
        "p50_s": spread.p50 if spread else None,
        "mean_s": spread.mean if spread else None,
        "p99_s": spread.p99 if spread else None,
        "samples_per_s": plan.rate,
        "efficiency_device": plan.efficiency_device,
        "efficiency_host": plan.efficiency_host,
        "terms_s": dict(plan.terms),
        "effects": [
            {"input": e.input, "change": e.change, "relative": e.relative, "best_then": e.best_then} for e in plan.effects
        ],
        "what_if": [{"asked": asked, "step_s": then.seconds, "schedule": then.algorithm.name} for asked, then in what_if],
        "candidates": [
            {
                "schedule": c.algorithm.name,
                "group_bytes": c.plan.group_bytes,
                "wire_bytes": c.plan.wire,
                "sync": c.plan.sync,
                "step_s": c.seconds,
                "simulated": c.step is not None,
            }
            for c in plan.candidates
        ],
        "training": None
        if training is None
        else {
            "epochs": training.epochs,
            "epochs_source": training.epochs_source,
            "hours": training.hours,
            "goodput": training.goodput,
            "cost": training.cost,
            "kwh": training.kwh,
        },
        "notes": list(plan.warnings),
    }
