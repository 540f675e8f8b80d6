"""The facts and tables of the page: results, environment and configuration."""

from __future__ import annotations

import importlib
import pkgutil
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.train.duration import duration
from phalanx.train.report.axis import number
from phalanx.train.report.page import Table
from phalanx.train.report.plots import Number
from phalanx.train.report.run import Run, best, describe_change, last, typical, value_of
from phalanx.train.report.words import all_metrics, words_of


def subtitle(run: Run) -> str:
    """Which run, when, and where."""
    at = [run.environment.get("date", ""), run.environment.get("host", "")]
    return " · ".join([run.name, *(str(part).replace("T", " ").replace("+00:00", " UTC") for part in at if part)])


def _show(value: Number, form: Callable[[float], str]) -> str:
    return form(value) if value is not None else "–"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def facts(run: Run) -> list[tuple[str, str, str]]:
    """The head of the page: name, value, and a few words below it."""
    ranks, hosts = value_of(run.environment, "ranks"), value_of(run.environment, "hosts")
    words = words_of(run)
    speed, epochs = typical(run, words.speed), last(run, "interval", "epoch")
    value, most = last(run, "evaluation", words.goal.key), best(run, words.goal)
    steps = last(run, "interval", "step")
    times = len(run.resumed)
    resumed = f" · resumed{f' {times} times' if times > 1 else ''}" if times else ""
    others = [m for m in words.metrics[1:] if m.key != "loss"]
    below = [f"{metric.words} {_show(last(run, 'evaluation', metric.key), metric.text)}" for metric in others]
    below += [f"best {words.goal.text(most)}"] if most is not None and most != value else []
    return [
        (words.goal_title, _show(value, words.goal.text), " · ".join(below)),
        ("Time", _show(run.seconds, duration), f"{_show(epochs, number)} epochs · {_show(steps, _whole)} steps{resumed}"),
        (
            f"{words.unit[:1].upper()}{words.unit[1:]} per second",
            _show(speed, _whole),
            f"{_show(speed / ranks if speed and ranks else None, _whole)} per rank · median",
        ),
        (
            "Ranks",
            _show(ranks, _whole),
            f"{_show(hosts, _whole)} host{'s' if hosts != 1 else ''} · {run.environment.get('device', '–')}{_changed(run)}",
        ),
        ("Waiting", _show(typical(run, "wait_share"), lambda v: f"{v:.0%}"), "of each step"),
    ]


def comparison(runs: Sequence[Run]) -> Table:
    """The results, one line per run."""
    metrics, all_words = all_metrics(runs), [words_of(run) for run in runs]
    units = list(dict.fromkeys(words.unit for words in all_words))
    goals = {words.goal for words in all_words}
    shown = [column for metric in metrics for column in ((metric, False), (metric, True)) if not column[1] or metric in goals]
    named = ["Best" if is_best else metric.title for metric, is_best in shown]
    rate = f"{units[0][:1].upper()}{units[0][1:]}/s" if len(units) == 1 else "Per second"
    columns = ("", *named, "Time", rate, "Waiting", "Epochs", "Ranks", "Ended")
    rows = [
        (
            run.name,
            *(
                _show(best(run, metric) if is_best else last(run, "evaluation", metric.key), metric.text)
                for metric, is_best in shown
            ),
            _show(run.seconds, duration),
            _show(typical(run, words.speed), _whole) + ("" if len(units) == 1 else f" {words.unit}"),
            _show(typical(run, "wait_share"), lambda v: f"{v:.0%}"),
            _show(last(run, "interval", "epoch"), number),
            str(run.environment.get("ranks", "–")),
            run.why,
        )
        for run, words in zip(runs, all_words)
    ]
    return Table("", columns, rows, keyed=True)


def environment(runs: Sequence[Run]) -> Table:
    """Where it ran, and with which command."""

    def cells(run: Run) -> dict[str, str]:
        env = run.environment
        versions, schedule = (found if isinstance(found := env.get(name), dict) else {} for name in ("versions", "schedule"))
        command = env.get("command")
        return {
            "date": str(env.get("date", "–")),
            "host": f"{env.get('host', '–')}, {env.get('cores', '–')} cores, {env.get('device', '–')}",
            "ranks": f"{env.get('ranks', '–')} on {env.get('hosts', '–')} host(s)",
            "starts": _starts(run),
            "schedule": str(schedule.get("name", "–")),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or "–",
            "command": shlex.join(map(str, command)) if isinstance(command, list) else "–",
            "launcher": str(env.get("launcher", "–")),
        }

    all_cells = [cells(run) for run in runs]
    rows = [(name, *(own[name] for own in all_cells)) for name in all_cells[0]]
    return Table("Environment", ("", *(run.name for run in runs)), rows, head=len(runs) > 1, text=True)


def _starts(run: Run) -> str:
    """Each start of the run: from where, and on how many ranks."""
    starts = []
    for row in run.of("start"):
        step = value_of(row, "step") or 0.0
        where = f"resumed after step {step:.0f}" if step else "from the beginning"
        starts.append(f"{where}, {row.get('ranks', '–')} rank(s)")
    return "; ".join(starts) or "–"


def configuration(runs: Sequence[Run]) -> Iterator[Table]:
    """The settings that differ between runs, or from the recipe; the others are folded."""
    flat = [dict(flatten(run.config)) for run in runs]
    paths = list(dict.fromkeys(path for own in flat for path in own))
    if len(runs) > 1:
        differ = [path for path in paths if len({_text(own.get(path, "–")) for own in flat}) > 1]
        rows = [(path, *(_text(own.get(path, "–")) for own in flat)) for path in differ]
        yield Table(
            "Configuration: differences",
            ("", *(run.name for run in runs)),
            rows,
            empty="The runs have equal settings.",
            text=True,
        )
    else:
        name, usual = recipe_of(runs[0].config)
        differ = [path for path in paths if _text(usual.get(path, "–")) != _text(flat[0][path])]
        rows = [(path, _text(flat[0][path]), _text(usual.get(path, "–"))) for path in differ]
        yield Table(
            f"Configuration: changed from {name}",
            ("", "this run", name),
            rows,
            empty="Nothing was changed.",
            text=True,
        )
    rows = [(path, *(_text(own.get(path, "–")) for own in flat)) for path in paths]
    yield Table("Configuration: all settings", ("", *(run.name for run in runs)), rows, folded=True, text=True)


def flatten(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of nested plain data, as in `--set`."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flatten(inner, f"{before}.{name}" if before else str(name))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{before}.{i}")
    else:
        yield before, value


def recipe_of(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The recipe with the name of the run, as paths and values of this version; else the defaults."""
    from phalanx import recipes  # here, because recipes import torch, which comparing runs does not need
    from phalanx.train.config import RunConfig, plain

    name = str(config.get("name", ""))
    module = name.replace("-", "_")
    if module in [found.name for found in pkgutil.iter_modules(recipes.__path__)]:
        return f"recipe {name}", dict(flatten(plain(importlib.import_module(f"{recipes.__name__}.{module}").config)))
    return "the defaults", dict(flatten(plain(RunConfig(name=name))))


def _text(value: Any) -> str:
    """A setting as `--set` takes it."""
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _changed(run: Run) -> str:
    count = len(run.changes)
    return f" · {count} change{'s' * (count > 1)}" if count else ""


def changes(runs: Sequence[Run]) -> Iterator[Table]:
    """Every change of membership: when, which ranks and why, what was repeated, and how long ranks were delayed."""
    several = len(runs) > 1
    rows = []
    for name, row in ((run.name, row) for run in runs for row in run.changes):
        held_up = _show(value_of(row, "held_up"), lambda v: f"{v:.2f} s")
        again = "one exchange" if row.get("redone") is True else "nothing"
        step = _show(value_of(row, "step"), _whole)
        rows.append((*([name] if several else []), step, describe_change(row), again, held_up))
    if rows:
        yield Table(
            "Ranks that left and joined",
            (*(["Run"] if several else []), "After step", "What happened", "Done again", "Held up for"),
            rows,
            text=True,
        )


def stragglers(runs: Sequence[Run]) -> Iterator[Table]:
    """Each slow rank and cause once: how often, by how much at most, and when."""
    several = len(runs) > 1
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for name, row in ((run.name, row) for run in runs for row in run.of("straggler")):
        who = "network" if row.get("rank") is None else f"rank {row['rank']}"
        found.setdefault((name, who, str(row.get("cause"))), []).append(row)
    rows = []
    for (name, who, cause), slow in found.items():
        most = max((value for row in slow if (value := value_of(row, "factor")) is not None), default=None)
        much = _show(most, lambda v, share=who == "network": f"{v:.0%} of the step" if share else f"{v:.1f} times the others")  # type: ignore[misc]
        at = [step for row in slow if (step := value_of(row, "step")) is not None]
        where = f"{min(at):.0f} to {max(at):.0f}" if at else "–"
        rows.append((*([name] if several else []), who, cause, much, str(len(slow)), where))
    columns = (*(["Run"] if several else []), "Who", "Cause", "At most", "Intervals", "Steps")
    if rows:
        yield Table("Stragglers", columns, rows, text=True)
