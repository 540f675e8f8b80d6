"""`report.html`: one run, or several side by side, in one self-contained file.

    write_report([Path("runs/digits")], Path("runs/digits/report.html"))

run        a run as a value, from its directory       figures, tables   what the page shows of it
words      the task's names for its results
plots      lines, areas and bars as SVG               pictures, timeline   schedules and a few steps as SVG
prediction a plan's predictions beside the measurements
page       the HTML around them, with page.css and page.js inside
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from phalanx.train.report import figures, prediction, tables
from phalanx.train.report.page import page
from phalanx.train.report.run import ReportError, Run, read_runs

__all__ = ["ReportError", "build", "report_or_warning", "write_report"]


def write_report(directories: Sequence[Path], out: Path) -> None:
    """Write the report of one or several runs to one HTML file, atomically.

    Args:
        directories: Directories of runs, as `phalanx train --out DIR` writes them.
        out: The file to write.

    Raises:
        ReportError: If a directory holds no run, or `out` is not a regular file.
    """
    if out.exists() and not out.is_file():  # as root, it would replace /dev/null
        raise ReportError(f"{out} exists and is not a regular file: name another one")
    text = build(read_runs(directories))
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(out)


def report_or_warning(directory: Path) -> Path | None:
    """Write the report of a finished run into its directory, and return its path. A failure only warns."""
    path = directory / "report.html"
    try:
        write_report([directory], path)
        return path
    except Exception as error:  # noqa: BLE001  whatever it is, it becomes a warning
        words = f"no report ({type(error).__name__}: {error}); `phalanx report {directory}` tries again"
        warnings.warn(words, stacklevel=2)
    return None


def build(runs: Sequence[Run]) -> str:
    """Build the page."""
    if not runs:
        raise ReportError("no runs: name at least one directory")
    one = runs[0] if len(runs) == 1 else None
    return page(
        title=str(one.config.get("name", one.name)) if one else f"{len(runs)} runs compared",
        subtitle=tables.subtitle(one) if one else " · ".join(run.name for run in runs),
        status=one.why if one else "",
        facts=tables.facts(one) if one else [],
        sections=[
            ("Results", [] if one else [tables.comparison(runs)]),
            ("Learning", list(figures.learning(runs))),
            ("Speed", [*figures.speed(runs), *tables.stragglers(runs), *tables.changes(runs)]),
            ("Communication", list(figures.communication(runs))),
            ("Plan", list(prediction.prediction(runs))),
            ("What was run", [tables.environment(runs), *tables.configuration(runs)]),
        ],
    )
