"""The plots of the page: from rows to series to figures. Several runs are overlaid, each in its own colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from phalanx.schedule import ScheduleError, from_text
from phalanx.schedule.markup import NOTHING, tag
from phalanx.train.report.page import Figure
from phalanx.train.report.pictures import draw_schedule, name_calls
from phalanx.train.report.plots import Number, Series, plot_bars, plot_lines, plot_stack, spans_decades
from phalanx.train.report.run import Run, typical, value_of
from phalanx.train.report.timeline import PHASES, draw_timeline, name_travels
from phalanx.train.report.words import LOSS, Shown, all_metrics, words_of

PARTS = {"compute": 0, "input": 1, "wait": 3, "update": 2}  # of a step, and their colours


def lines(
    runs: Sequence[Run],
    kind: str,
    y: str | Callable[[Run], str],
    x: str,
    *,
    name: str = "",
    colour: int = 0,
    style: str = "solid",
    per: float = 1.0,
) -> list[Series]:
    """One series per run, from its rows of a kind that have an `x`; with several runs, each has its own colour."""
    made = []
    for i, run in enumerate(runs):
        path = y if isinstance(y, str) else y(run)
        rows = [(place / per, value_of(row, path)) for row in run.of(kind) if (place := value_of(row, x)) is not None]
        if any(value is not None for _, value in rows):
            label = " ".join(filter(None, [run.name, name])) if len(runs) > 1 else name
            own = i if len(runs) > 1 else colour
            made.append(Series(label, tuple(p for p, _ in rows), tuple(v for _, v in rows), own, style))
    return made


def _time_axis(runs: Sequence[Run]) -> tuple[str, float]:
    most = max((run.seconds or 0.0 for run in runs), default=0.0)
    return ("seconds", 1.0) if most < 180 else ("minutes", 60.0) if most < 3 * 3600 else ("hours", 3600.0)


def _legend(series: Sequence[Series], runs: Sequence[Run]) -> Sequence[Series]:
    """The series of one run or, for several, the runs, because the note explains the line styles."""
    if len(runs) > 1:
        return [Series(run.name, (), (), i) for i, run in enumerate(runs)]
    return series if len(series) > 1 else ()


def _events(runs: Sequence[Run], x: str, per: float = 1.0) -> list[tuple[float, str]]:
    """Where a run was resumed or its ranks changed. Not for several runs: the lines would be ambiguous."""
    return [(at / per, text) for at, text in runs[0].events_at(x)] if len(runs) == 1 else []


def learning(runs: Sequence[Run]) -> Iterator[Figure]:
    """Loss and results over epochs and over time, learning rate and batch size over steps, and the spread of gossip."""
    unit, per = _time_axis(runs)
    many = len(runs) > 1
    for x, axis, size in (("epoch", "epochs", 1.0), ("seconds", unit, per)):
        loss = lines(runs, "interval", "loss", x, name="training", colour=0, style="faint" if many else "solid", per=size)
        loss += lines(runs, "evaluation", "loss", x, name="test", colour=1, per=size)
        log = spans_decades(loss)
        drawn = plot_lines(loss, title=f"loss over {axis}", x=axis, log=log, events=_events(runs, x, size))
        note = " · ".join(["bold: test, faint: training"] * many + ["log scale"] * log)
        yield Figure(f"Loss over {axis}", drawn, _legend(loss, runs), note)
        yield from results(runs, x, axis, size)
    rate = lines(runs, "interval", "rate", "step", name="" if many else "learning rate")
    drawn = plot_lines(rate, title="learning rate over steps", x="steps", zero=True, events=_events(runs, "step"))
    yield Figure("Learning rate", drawn, _legend(rate, runs))
    batch = lines(runs, "interval", "batch", "step", name="" if many else "samples", colour=4, style="steps")
    drawn = plot_lines(batch, title="batch size over steps", x="steps", zero=True)
    yield Figure("Batch size", drawn, _legend(batch, runs), "samples per step, all ranks")
    spread = lines(runs, "evaluation", "spread", "epoch", name="" if many else "spread", colour=5)
    if spread:
        drawn = plot_lines(spread, title="spread of the replicas", x="epochs", log=spans_decades(spread))
        note = "distance of the ranks' weights from their mean"
        yield Figure("Spread of the replicas", drawn, _legend(spread, runs), note)


def results(runs: Sequence[Run], x: str, axis: str, size: float) -> Iterator[Figure]:
    """The results of evaluations over epochs or time: fractions in one figure with the training accuracy, others one by one."""
    many, events, metrics = len(runs) > 1, _events(runs, x, size), all_metrics(runs)
    shares = [metric for metric in metrics if metric.percent]
    if shares:
        right = lines(runs, "interval", "accuracy", x, name="training", colour=0, style="faint", per=size)
        for i, metric in enumerate(shares):
            style = "dashed" if i else "solid"
            right += lines(runs, "evaluation", metric.key, x, name=f"test {metric.words}", colour=1 + i, style=style, per=size)
        drawn = plot_lines(right, title=f"accuracy over {axis}", x=axis, unit="percent", most=1.0, events=events)
        first, *others = [metric.words for metric in shares]
        strokes = ", ".join([f"bold: test {first}", *(f"dotted: {words}" for words in others), "faint: training"]) if many else ""
        yield Figure(f"Accuracy over {axis}", drawn, _legend(right, runs), strokes)
    for metric in metrics:
        if not metric.percent and metric != LOSS:
            yield _result(runs, metric, x, axis, size)


def _result(runs: Sequence[Run], metric: Shown, x: str, axis: str, size: float) -> Figure:
    found = lines(runs, "evaluation", metric.key, x, name=f"test {metric.words}", colour=1, per=size)
    log = spans_decades(found)
    drawn = plot_lines(found, title=f"{metric.words} over {axis}", x=axis, log=log, events=_events(runs, x, size))
    return Figure(f"{metric.title} over {axis}", drawn, _legend(found, runs), "log scale" if log else "")


def speed(runs: Sequence[Run]) -> Iterator[Figure]:
    """Throughput, and where a step's time goes: over the epochs of one run, or as means of several."""
    units = " or ".join(dict.fromkeys(words_of(run).unit for run in runs))
    made = lines(runs, "interval", lambda run: words_of(run).speed, "epoch", name="" if len(runs) > 1 else f"{units}/s")
    drawn = plot_lines(made, title="throughput over epochs", x="epochs", zero=True, events=_events(runs, "epoch"))
    yield Figure("Throughput", drawn, _legend(made, runs), f"{units} per second, all ranks")
    if len(runs) == 1:
        rows = [row for row in runs[0].of("interval") if value_of(row, "epoch") is not None]
        places = tuple(value_of(row, "epoch") or 0.0 for row in rows)
        parts = [Series(n, places, tuple(value_of(row, f"times.{n}") for row in rows), c) for n, c in PARTS.items()]
        drawn = plot_stack(places, parts, title="where a step's time goes", x="epochs", unit="ms")
    else:
        none = tuple(0.0 for _ in runs)
        parts = [Series(n, none, tuple(typical(run, f"times.{n}") for run in runs), c) for n, c in PARTS.items()]
        drawn = plot_bars([run.name for run in runs], parts, title="where a step's time goes", unit="ms")
    yield Figure(
        "Where a step's time goes", drawn, parts, note="mean over ranks" if len(runs) == 1 else "medians of the means over ranks"
    )


def communication(runs: Sequence[Run]) -> Iterator[Figure]:
    """Waiting, overlap, a few steps in detail, and the schedule."""
    many = len(runs) > 1
    share = lines(runs, "interval", "wait_share", "epoch", name="" if many else "waiting", colour=3)
    drawn = plot_lines(share, title="share of a step spent waiting", x="epochs", unit="percent", zero=True, most=1.0)
    yield Figure("Waiting for communication", drawn, _legend(share, runs), "share of a step, mean over ranks")
    yield from _overlap(runs)
    for run in runs:
        after = f" · {run.name}" if many else ""
        drawn = draw_timeline(run.trace) if run.trace is not None else NOTHING
        if drawn:
            legend = [Series(name, (), (), colour) for name, colour in {**PHASES, **name_travels(run.trace or {})}.items()]
            yield Figure(f"A few steps{after}", drawn, legend, note="from trace.json, which ui.perfetto.dev opens", wide=True)
    yield from _schedules(runs)


def _overlap(runs: Sequence[Run]) -> Iterator[Figure]:
    """The fraction of communication hidden behind computation, if there was any."""
    recorded = lines(runs, "interval", "overlapped_share", "epoch", name="" if len(runs) > 1 else "hidden", colour=4)
    single = {i for i, run in enumerate(runs) if not run.gossips and _groups(run) == 1}
    overlapped = [
        own for own in recorded if (own.colour if len(runs) > 1 else 0) not in single
    ]  # with several runs the colour is the number of the run
    if overlapped:
        behind = "the next forward and backward" if all(run.gossips for run in runs) else "backward"
        drawn = plot_lines(overlapped, title="overlap with backward", x="epochs", unit="percent", zero=True, most=1.0)
        yield Figure("Overlap", drawn, _legend(overlapped, runs), f"share of communication hidden behind {behind}")
    elif recorded:
        reason = "The gradients are sent in one group, which is complete when backward ends: there is nothing to overlap."
        yield Figure("Overlap", tag("span"), note=reason)


def _groups(run: Run) -> Number:
    """The largest number of gradient groups; None if the rows do not have it."""
    return max((value for row in run.of("interval") if (value := value_of(row, "groups")) is not None), default=None)


def _schedules(runs: Sequence[Run]) -> Iterator[Figure]:
    """Each schedule once, even if several runs used it."""
    drawn: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        recorded = run.environment.get("schedule")
        text, seats = (recorded.get("text"), recorded.get("seats", "rank")) if isinstance(recorded, dict) else (None, "")
        if isinstance(text, str):
            drawn.setdefault((text, str(seats)), []).append(run.name)
    for (text, seats), names in drawn.items():
        try:
            schedule = from_text(text)
        except ScheduleError:
            continue  # written by another version; the environment table has its name
        after = f" · {', '.join(names)}" if len(drawn) > 1 else ""
        legend = [Series(name, (), (), colour) for name, colour in name_calls(schedule)]
        note = f"{seats}s down, steps across"
        picture = draw_schedule(schedule, seats)
        yield Figure(f"Schedule{after}", picture, legend if schedule.world > 1 else [], note=note, wide=True)
