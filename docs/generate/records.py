"""Reads the records in benchmarks/results/: a first row that says how it was measured, then the rows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Row = dict[str, Any]


@cache
def rows(name: str) -> tuple[Row, ...]:
    """All rows of a file, its headers included."""
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def find(name: str, **wanted: Any) -> Row:
    """The last row with these values: a file that holds several runs has the newest at its end."""
    found = [row for row in rows(name) if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"benchmarks/results/{name}.jsonl: no row has {wanted}")
    return found[-1]


def over_gloo(row: Row) -> float:
    """The lower of two ratios: of the medians, and the median of the ratios in each turn. The machine's speed changes."""
    return float(min(row["times_gloo"], row["turn_by_turn"]))


def measured(name: str) -> str:
    """The day on which the newest rows of a file were measured, and how often where they say it."""
    day = max(str(row.get("date") or row["when"])[:10] for row in rows(name) if "date" in row or "when" in row)
    first = rows(name)[0]
    often = first.get("config", {}).get("repeat")
    turns = sorted({row.get("turns") or row["repeat"] for row in rows(name) if "turns" in row or "repeat" in row})  # of all runs
    if turns and not often:
        often = f"{turns[0]} to {turns[-1]}" if len(turns) > 1 else turns[0]
    return f"{day}, {often} times" if often else day
