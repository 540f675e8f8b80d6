"""Explain why a run was slower or faster than its plan, by the parts of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.train.report.plots import Number
from phalanx.train.report.run import Run, typical, value_of
from phalanx.train.report.words import words_of

# The name of a part of a step in a plan, and its measurement in a run.
PARTS = (
    (
        "computing",
        ("computing samples", "computing, whatever the batch", "computing that communication slows down"),
        ("times.compute",),
        "the device is not as fast as --rate says: measure it with this batch, and plan again",
    ),
    (
        "waiting for input, others and the network",
        ("waiting for the slowest host", "agreeing on what is ready, packing", "communication that nothing hides", "input"),
        ("times.input", "times.wait"),
        "look at the input and at the slowest rank, then calibrate the network (phalanx plan --calibrate)",
    ),
    ("update", ("optimizer",), ("times.update",), "give the time of the update with --optimizer"),
)
CLOSE = 0.05  # of the step: a smaller difference needs no reason


def parts(run: Run, plan: dict[str, Any]) -> Iterator[tuple[str, Number, Number, str]]:
    """By part of a step: its name, seconds as predicted and as measured, and what to do if they differ."""
    told = plan.get("terms_s")
    terms = {name: value_of(told, name) for name in told} if isinstance(told, dict) else {}
    for name, predicted, measured, remedy in PARTS:
        yield name, total([terms.get(term) for term in predicted]), total([typical(run, path) for path in measured]), remedy


def measured_step(run: Run) -> Number:
    """Seconds of a step of the run, or None if it has too few rows."""
    words = words_of(run)
    speed, batch = typical(run, words.speed), typical(run, "batch")
    return batch * words.per_sample / speed if speed and batch else None


def explain(run: Run, plan: dict[str, Any]) -> str | None:
    """Explain the difference between plan and run in a sentence. None if one of them has no step time."""
    predicted, measured = value_of(plan, "step_s"), measured_step(run)
    if not predicted or measured is None:
        return None
    gap = measured - predicted
    said = f"a step took {measured * 1e3:,.1f} ms, the plan predicted {predicted * 1e3:,.1f} ms ({gap / predicted:+.0%})"
    error = value_of(plan, "error")
    if abs(gap) <= CLOSE * predicted:
        return f"{said}: as planned"
    within = f", {'within' if abs(gap) <= error * predicted else 'beyond'} its uncertainty of {error:.0%}" if error else ""
    known = [(m - p, name, remedy) for name, p, m, remedy in parts(run, plan) if p is not None and m is not None]
    same_way = [(abs(off), name, remedy) for off, name, remedy in known if off * gap > 0]
    if not same_way:
        return f"{said}{within}; no part of the step that was measured explains it"
    off, name, remedy = max(same_way)
    return f"{said}{within}. Most of it is {name}: {off * 1e3:,.1f} ms {'more' if gap > 0 else 'less'} than planned; {remedy}"


def total(values: Sequence[Number]) -> Number:
    """The sum of the values that exist."""
    there = [value for value in values if value is not None]
    return sum(there) if there else None
