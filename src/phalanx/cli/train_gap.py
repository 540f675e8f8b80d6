"""What `phalanx train --plan` prints at the end: the plan beside the run."""

from __future__ import annotations

from pathlib import Path

from phalanx.train.planned import PlannedRun
from phalanx.train.report.gap import explain
from phalanx.train.report.run import read_run


def tell_gap(out: Path, plan: PlannedRun) -> None:
    """Print where the difference between the plan and the run came from."""
    why = explain(read_run(out, out.name), plan.content)
    if why:
        print(f"plan      {why}")
