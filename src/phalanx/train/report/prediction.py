"""A plan's predictions beside the measurements of the run that followed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.train.report.gap import explain, measured_step, parts
from phalanx.train.report.page import Table
from phalanx.train.report.plots import Number
from phalanx.train.report.run import Run, typical, value_of
from phalanx.train.report.words import words_of


def prediction(runs: Sequence[Run]) -> Iterator[Table]:
    """A table for each run that followed a plan: the step and its parts, medians over the intervals."""
    for run in runs:
        if run.plan is not None:
            what = f"{run.plan.get('model', '?')}, batch {run.plan.get('batch', '?')}, {_schedule(run.plan)}"
            title = f"Predicted and measured{f': {run.name}' if len(runs) > 1 else ''} (the plan is for {what})"
            yield Table(title, ("", "Predicted", "Measured", "Measured / predicted"), list(_rows(run, run.plan)))


def _schedule(plan: dict[str, Any]) -> str:
    run = plan.get("run")
    return str(run.get("schedule", "?")) if isinstance(run, dict) else "?"


def _rows(run: Run, plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    words = words_of(run)
    error = value_of(plan, "error")
    error_text = f" (± {error:.0%})" if error is not None else ""
    yield _row(f"step, ms{error_text}", value_of(plan, "step_s"), measured_step(run), 1e3)
    for name, predicted, measured, _ in parts(run, plan):
        yield _row(f"  {name}, ms", predicted, measured, 1e3)
    rate = value_of(plan, "samples_per_s")
    speed = typical(run, words.speed)
    yield _row(f"{words.unit} per second", rate * words.per_sample if rate is not None else None, speed, 1.0)
    why = explain(run, plan)
    if why:
        yield f"why: {why}", "", "", ""


def _row(name: str, predicted: Number, measured: Number, unit: float) -> tuple[str, ...]:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "–"
    return name, *(f"{value * unit:,.1f}" if value is not None else "–" for value in (predicted, measured)), ratio
