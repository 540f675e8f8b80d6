"""Format the findings of a selftest as lines for the terminal and as plain data for a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from phalanx.schedule.printable import one_line
from phalanx.selftest.result import Outcome, Status

GROUP, NAME = 11, 26  # characters of the columns


def line(outcome: Outcome) -> str:
    """One line: status, group, name, reason and remedy."""
    result = outcome.result
    words = result.reason if not result.remedy else f"{result.reason.rstrip('.')}. Remedy: {result.remedy}"
    return one_line(f"{result.status.value}  {outcome.group:<{GROUP}}  {outcome.name:<{NAME}}  {words}")


def last_line(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The summary line."""
    counts = Counter(outcome.result.status for outcome in outcomes)
    words = f"{counts[Status.PASS]} passed, {counts[Status.FAIL]} failed, {counts[Status.SKIP]} skipped in {seconds:.1f} s"
    bad = [f"{outcome.group} {outcome.name}" for outcome in outcomes if outcome.result.status is Status.FAIL]
    return f"{words}: {', '.join(bad)} failed" if bad else words


def to_record(facts: dict[str, Any], outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The content of the file for a bug report."""
    return {
        "selftest": 1,  # the version of this format
        **facts,
        "seconds": round(seconds, 3),
        "failed": sum(outcome.result.status is Status.FAIL for outcome in outcomes),
        "checks": [
            {
                "group": outcome.group,
                "name": outcome.name,
                "status": outcome.result.status.value,
                "reason": outcome.result.reason,
                "remedy": outcome.result.remedy,
                "ranks": list(outcome.result.ranks),
                "figures": outcome.result.figures,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in outcomes
        ],
    }
