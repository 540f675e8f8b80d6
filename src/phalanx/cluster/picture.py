"""A plan for people and for other programs: a table, plain data, pictures as SVG, a Chrome trace of the step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.schedule.markup import Markup, join, tag
from phalanx.schedule.printable import one_line

from .chance import Spread
from .plan import Candidate, Plan
from .step import PredictedStep
from .training import Training

SHOWN_RANKS = 16  # rows of a timeline; evenly chosen where there are more
_COLOURS = {"forward": "#9ecae1", "backward": "#3182bd", "group": "#fd8d3c", "wait": "#eeeeee"}


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


def spans(step: PredictedStep) -> Iterator[tuple[int, str, float, float]]:
    """What a few ranks do when: rank, name, begin, end in seconds."""
    ranks = step.forward_end.size
    for rank in sorted({int(i * (ranks - 1) / max(1, SHOWN_RANKS - 1)) for i in range(min(ranks, SHOWN_RANKS))}):
        yield rank, "forward", 0.0, float(step.forward_end[rank])
        yield rank, "backward", float(step.forward_end[rank]), float(step.backward_end[rank])
        for number, group in enumerate(step.groups):
            yield rank, f"group {number}", float(group.begin[rank]), float(group.end[rank])


def trace(step: PredictedStep) -> str:
    """The step for chrome://tracing or ui.perfetto.dev: a process per rank, one row computing, one communicating."""
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": rank,
            "tid": int(name.startswith("group")),
            "ts": begin * 1e6,
            "dur": (end - begin) * 1e6,
        }
        for rank, name, begin, end in spans(step)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def timeline_svg(step: PredictedStep, title: str) -> str:
    """The step as a picture: ranks down, time across; computing above, communicating below."""
    drawn = list(spans(step))
    rows = {rank: row for row, rank in enumerate(dict.fromkeys(rank for rank, *_ in drawn))}
    scale = 800 / max(step.seconds, 1e-12)
    shapes = []
    for rank, name, begin, end in drawn:
        group = name.startswith("group")
        y = 40 + 26 * rows[rank] + (12 if group else 0)
        colour = _COLOURS["group" if group else name]
        hint = tag("title", f"rank {rank}: {name}, {(end - begin) * 1e3:.3f} ms")
        box = {"x": f"{80 + begin * scale:.2f}", "y": y, "width": f"{max(0.3, (end - begin) * scale):.2f}", "height": 10}
        shapes.append(tag("rect", hint, **box, fill=colour))
    shapes += [tag("text", f"rank {rank}", x=5, y=54 + 26 * row) for rank, row in rows.items()]
    height = 70 + 26 * len(rows)
    shapes.append(tag("text", "0", x=80, y=height - 8))
    shapes.append(tag("text", f"{step.seconds * 1e3:.2f} ms", x=880, y=height - 8, text_anchor="end"))
    return _svg(900, height, title, shapes)


def efficiency_svg(points: Sequence[tuple[int, float]], title: str) -> str:
    """Efficiency against one device over the number of ranks, the latter by powers of two."""
    if not points:
        raise ValueError("a curve needs at least 1 point")
    last = max(1, len(points) - 1)
    places = [(80 + 780 * i / last, 340 - 280 * min(efficiency, 1.05)) for i, (_, efficiency) in enumerate(points)]
    shapes = []
    for percent in (0, 25, 50, 75, 100):
        y = 340 - 2.8 * percent
        shapes.append(tag("line", x1=80, x2=860, y1=y, y2=y, stroke="#dddddd"))
        shapes.append(tag("text", f"{percent} %", x=70, y=y + 4, text_anchor="end"))
    points_drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shapes.append(tag("polyline", fill="none", stroke="#3182bd", stroke_width=2, points=points_drawn))
    for (x, y), (ranks, efficiency) in zip(places, points):
        hint = tag("title", f"{ranks}: {efficiency:.1%}")
        shapes.append(tag("circle", hint, cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, fill="#3182bd"))
        shapes.append(tag("text", ranks, x=f"{x:.1f}", y=360, text_anchor="middle"))
    return _svg(900, 375, title, shapes)


def _svg(width: int, height: int, title: str, shapes: list[Markup]) -> str:
    inside = join(["", tag("text", title, x=80, y=22, font_size=14), *shapes, ""], "\n")
    size = {"width": width, "height": height, "font_family": "sans-serif", "font_size": 11}
    return tag("svg", inside, xmlns="http://www.w3.org/2000/svg", **size) + "\n"
