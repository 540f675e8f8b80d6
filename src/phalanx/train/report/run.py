"""A run as a value, read from its directory, and its summary numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.schedule.plain_json import loads
from phalanx.train.report.plots import Number, is_number
from phalanx.train.report.words import Shown
from phalanx.train.rows import read_rows

WHY = {"epochs": "complete", "target": "target reached", "stopped": "stopped on request"}
NO_END = "no end recorded"  # killed, or still running
LEAST, MOST = 1e-30, 1e15  # limits of the numbers that are drawn


class ReportError(ValueError):
    """A directory does not hold a run; the message says what is missing."""


@dataclass(frozen=True)
class Run:
    """A run as its directory describes it. `name` is its name on the page."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    trace: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None  # the plan that it followed

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The rows of a kind."""
        return [row for row in self.rows if row.get("kind") == kind]

    @property
    def end(self) -> dict[str, Any] | None:
        """The row that ended the run; None if it was killed, or resumed and not ended since."""
        turns = [row for row in self.rows if row.get("kind") in ("start", "end")]
        return turns[-1] if turns and turns[-1]["kind"] == "end" else None

    @property
    def why(self) -> str:
        return NO_END if self.end is None else WHY.get(str(self.end.get("why")), str(self.end.get("why")))

    @property
    def gossips(self) -> bool:
        """Whether replicas were mixed, with partners or after local steps, instead of averaging gradients."""
        comm = self.config.get("comm")
        return isinstance(comm, dict) and comm.get("sync", "allreduce") != "allreduce"

    @property
    def resumed(self) -> list[dict[str, Any]]:
        """The rows of later starts, which continued from a checkpoint."""
        return [row for row in self.of("start") if value_of(row, "step")]

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The rows of changes of membership."""
        return self.of("membership")

    def events_at(self, x: str) -> list[tuple[float, str]]:
        """Where the run was resumed or ranks left or joined, by `x` ("step", "seconds" or "epoch"), with a description."""
        found = []
        for row in [*self.resumed, *self.changes]:
            step = value_of(row, "step") or 0.0
            before = [own for own in self.of("interval") if (value_of(own, "step") or 0.0) <= step]
            at = value_of(row, x) if x != "epoch" else value_of(before[-1], "epoch") if before else None
            if at is not None:
                words = describe_change(row) if row.get("kind") == "membership" else "resumed"
                found.append((at, f"{words} after step {step:.0f}"))
        return found

    @property
    def seconds(self) -> Number:
        """Seconds of training and evaluation, as far as known."""
        known = [value for row in self.rows if is_number(value := value_of(row, "seconds"))]
        return known[-1] if known else None


def describe_change(row: dict[str, Any]) -> str:
    """Describe a change of membership: which members left and why, which joined, and the new number of ranks."""
    left = [f"member {who} {why}" for who, why in _pairs(row.get("left"))]
    joined = row.get("joined")
    came = [f"member {who} joined" for who in joined if isinstance(who, int)] if isinstance(joined, list) else []
    ranks = value_of(row, "ranks")
    return "; ".join([*left, *came, *([f"{ranks:.0f} ranks"] if ranks is not None else [])])


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return [tuple(pair) for pair in value if isinstance(pair, list) and len(pair) == 2] if isinstance(value, list) else []


def value_of(row: dict[str, Any], path: str) -> Number:
    """A number of a row, by a path such as `times.input`, or None."""
    found: Any = row
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= MOST:
        return None
    return float(found) if abs(found) >= LEAST else 0.0


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs, named by the last part of their paths that distinguishes them."""
    whole = [directory.absolute() for directory in directories]
    if len(set(whole)) < len(whole):
        raise ReportError(f"{next(d for d in directories if whole.count(d.absolute()) > 1)} is named twice")
    deep = next(n for n in range(1, 100) if len({d.parts[-n:] for d in whole}) == len(whole))
    return [read_run(d, "/".join(w.parts[-deep:])) for d, w in zip(directories, whole)]


def read_run(directory: Path, name: str) -> Run:
    """Read the run in `directory`. A killed run has fewer files."""
    if not directory.is_dir():
        raise ReportError(f"{directory}: there is no such directory")
    if not (directory / "config.json").is_file():
        raise ReportError(f"{directory} holds no run: it has no config.json, which `phalanx train --out DIR` writes")
    trace = _read(directory / "trace.json") if (directory / "trace.json").is_file() else None
    environment = _read(directory / "environment.json") if (directory / "environment.json").is_file() else {}
    plan = _read(directory / "plan.json") if (directory / "plan.json").is_file() else None
    return Run(name, _read(directory / "config.json"), environment, tuple(read_rows(directory / "metrics.jsonl")), trace, plan)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ReportError(f"{path} is damaged: it holds no JSON object")
    return found


def best(run: Run, metric: Shown) -> Number:
    """The best value of an evaluation."""
    choose = min if metric.lower_is_better else max
    return choose((value for row in run.of("evaluation") if (value := value_of(row, metric.key)) is not None), default=None)


def last(run: Run, kind: str, key: str) -> Number:
    """The value of the last row of a kind that has it."""
    return next((value for row in reversed(run.of(kind)) if (value := value_of(row, key)) is not None), None)


def typical(run: Run, path: str) -> Number:
    """The median over the intervals."""
    there = [value for row in run.of("interval") if (value := value_of(row, path)) is not None]
    return median(there) if there else None
