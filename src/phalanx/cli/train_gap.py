"""The comparison of plan and run that `phalanx train --plan` prints at the end."""

from __future__ import annotations

from pathlib import Path

from phalanx.train.planned import PlannedRun
from phalanx.train.report.gap import explain
from phalanx.train.report.run import read_run


def tell_gap(out: Path, plan: PlannedRun) -> None:
    """Print what caused the difference between the plan and the run."""
    why = explain(read_run(out, out.name), plan.content)
    if why:
        print(f"plan      {why}")
