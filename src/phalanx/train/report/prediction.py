"""What a plan predicted, beside what the run that followed it measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.train.report.page import Table
from phalanx.train.report.plots import Number
from phalanx.train.report.run import Run, typical, value_of
from phalanx.train.report.words import words_of

COMPUTING = ("computing samples", "computing, whatever the batch")
WAITING = ("waiting for the slowest host", "communication that nothing hides", "input")


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
    speed, batch = typical(run, words.speed), typical(run, "batch")
    step = batch * words.per_sample / speed if speed and batch else None
    told_terms = plan.get("terms_s")
    terms = {name: value_of(told_terms, name) for name in told_terms} if isinstance(told_terms, dict) else {}
    error = value_of(plan, "error")
    error_text = f" (± {error:.0%})" if error is not None else ""
    yield _row(f"step, ms{error_text}", value_of(plan, "step_s"), step, 1e3)
    yield _row("  computing, ms", _sum(terms, COMPUTING), typical(run, "times.compute"), 1e3)
    waiting = [typical(run, f"times.{part}") for part in ("input", "wait")]
    yield _row("  waiting for input, others and the network, ms", _sum(terms, WAITING), _total(waiting), 1e3)
    yield _row("  update, ms", terms.get("optimizer"), typical(run, "times.update"), 1e3)
    predicted = value_of(plan, "samples_per_s")
    yield _row(f"{words.unit} per second", predicted * words.per_sample if predicted is not None else None, speed, 1.0)


def _sum(terms: dict[str, Number], names: Sequence[str]) -> Number:
    return _total([terms[name] for name in names if name in terms])


def _total(values: Sequence[Number]) -> Number:
    there = [value for value in values if value is not None]
    return sum(there) if there else None


def _row(name: str, predicted: Number, measured: Number, unit: float) -> tuple[str, ...]:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "–"
    return name, *(f"{value * unit:,.1f}" if value is not None else "–" for value in (predicted, measured)), ratio
