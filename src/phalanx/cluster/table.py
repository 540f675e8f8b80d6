"""A plan for people and for other programs: a page of text, and plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.schedule.printable import one_line

from .chance import Spread
from .question import Candidate, Plan
from .training import Training


def describe(candidate: Candidate) -> str:
    """`torus:512x4, groups of 8 MB, 2 bytes per gradient, overlapped with backward`."""
    plan = candidate.plan
    how = {"all-reduce": "overlapped with backward", "double buffering": "one step late", "gossip": "gossip beside the step"}
    groups = f"groups of {plan.group_bytes / 1e6:g} MB, " if plan.sync == "all-reduce" else ""
    return f"{candidate.algorithm.name}, {groups}{plan.wire} bytes per gradient, {how.get(plan.sync, plan.sync)}"


def table(plan: Plan, training: Training, spread: Spread | None) -> str:
    """The answer as a page of text."""
    return "\n".join(map(one_line, _lines(plan, training, spread))) + "\n"


def _lines(plan: Plan, training: Training, spread: Spread | None) -> Iterator[str]:
    question, best = plan.question, plan.best
    cluster = question.cluster
    yield (
        f"{question.model.name} on {cluster.name}: {cluster.hosts} hosts x {cluster.per_host} = {cluster.ranks} ranks,"
        f" batch {question.batch:g} ({question.per_rank:g} each), {question.profile.name}"
    )
    yield f"best      {describe(best)}"
    yield f"step      {best.seconds * 1e3:.3f} ms  (+- {plan.error:.0%}, two sigma of the profile's residual)"
    if spread:
        yield f"          p50 {spread.p50 * 1e3:.3f} ms, p99 {spread.p99 * 1e3:.3f} ms over {spread.samples} simulated steps"
    yield f"rate      {plan.rate:,.0f} samples/s; {plan.efficiency_device:.1%} of {cluster.ranks} times one device,"
    yield f"          {plan.efficiency_host:.1%} of {cluster.hosts} times one host"
    yield f"training  {training.epochs:.1f} epochs ({training.epochs_source})"
    yield f"          {training.steps:,.0f} steps, {_duration(training.hours)}" + _extras(training)
    yield "why"
    for name, seconds in plan.terms:
        if seconds > 0:
            yield f"  {seconds * 1e3:10.3f} ms {seconds / best.seconds:6.1%}  {name}"
    yield "what would change it                       step    best then"
    for effect in plan.effects:
        yield f"  {effect.input + ' ' + effect.change:38s} {effect.relative:+7.1%}  {effect.best_then}"
    yield "also looked at                             step"
    for candidate in _rivals(plan):
        yield f"  {candidate.algorithm.name:38s} {candidate.seconds / best.seconds - 1:+7.1%}  {describe(candidate)}"
    for warning in plan.warnings:
        yield f"note      {warning}"


def _rivals(plan: Plan) -> list[Candidate]:
    """The best candidate of every other algorithm, the best few of them."""
    seen, rivals = {plan.best.algorithm.name}, []
    for candidate in sorted(plan.candidates, key=lambda candidate: candidate.seconds):
        if candidate.algorithm.name not in seen:
            seen.add(candidate.algorithm.name)
            rivals.append(candidate)
    return rivals[:6]


def _duration(hours: float) -> str:
    if hours < 1 / 30:
        return f"{hours * 3600:.1f} s"
    return f"{hours * 60:.1f} min" if hours < 2 else f"{hours:.2f} h"


def _extras(training: Training) -> str:
    parts = []
    if training.checkpoint_every is not None:
        parts.append(f"goodput {training.goodput:.2%} with a checkpoint every {training.checkpoint_every / 60:.1f} min")
    elif training.goodput < 1:
        parts.append(f"goodput {training.goodput:.2%} without a checkpoint: it is over before one pays")
    if training.cost is not None:
        parts.append(f"cost {training.cost:,.2f}")
    if training.kwh is not None:
        parts.append(f"{training.kwh:,.1f} kWh")
    return "".join(f"; {part}" for part in parts)


def as_data(plan: Plan, training: Training, spread: Spread | None) -> dict[str, Any]:
    """The answer as plain data; `run` is what a training run needs to follow the plan."""
    question, best = plan.question, plan.best
    return {
        "cluster": question.cluster.name,
        "hosts": question.cluster.hosts,
        "per_host": question.cluster.per_host,
        "model": question.model.name,
        "batch": question.batch,
        "backend": question.profile.name,
        "run": {
            "schedule": best.algorithm.name,
            "group_bytes": best.plan.group_bytes,
            "wire_bytes": best.plan.wire,
            "sync": best.plan.sync,
        },
        "step_s": best.seconds,
        "error": plan.error,
        "p50_s": spread.p50 if spread else None,
        "p99_s": spread.p99 if spread else None,
        "samples_per_s": plan.rate,
        "efficiency_device": plan.efficiency_device,
        "efficiency_host": plan.efficiency_host,
        "terms_s": dict(plan.terms),
        "effects": [
            {"input": e.input, "change": e.change, "relative": e.relative, "best_then": e.best_then} for e in plan.effects
        ],
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
        "training": {
            "epochs": training.epochs,
            "epochs_source": training.epochs_source,
            "hours": training.hours,
            "goodput": training.goodput,
            "cost": training.cost,
            "kwh": training.kwh,
        },
        "notes": list(plan.warnings),
    }
