"""The rows of study_large_batch.py as tables: accuracy by method and batch, the rates that were found, and what follows.

`write_docs` puts them into docs/large-batch.md, between two marks, and draws the picture: the page says what the rows say.
"""

from __future__ import annotations

import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- made by benchmarks/study_large_batch.py --docs -->", "<!-- /made -->"
NAMES = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}

Rows = list[dict[str, Any]]


def by_method(rows: Rows, data: str, purpose: str) -> dict[str, dict[int, Rows]]:
    """The rows of one set of data, by method and batch."""
    found: dict[str, dict[int, Rows]] = {}
    for row in rows:
        if row.get("data") == data and row["purpose"] == purpose:
            found.setdefault(row["method"], {}).setdefault(row["batch"], []).append(row)
    return found


def mean(rows: Rows) -> float:
    return statistics.mean(row["accuracy"] for row in rows)


def best_small(found: dict[str, dict[int, Rows]]) -> tuple[float, str]:
    """The highest mean at the smallest batch, and whose it is."""
    smallest = min(batch for own in found.values() for batch in own)
    return max((mean(own[smallest]), method) for method, own in found.items() if smallest in own)


def table(rows: Rows, purpose: str = "grid") -> str:
    """In Markdown, one for each set of data."""
    parts = []
    for data in dict.fromkeys(row["data"] for row in rows if row.get("purpose") == purpose):
        found = by_method(rows, data, purpose)
        batches = sorted({batch for own in found.values() for batch in own})
        best, _ = best_small(found)
        head = [f"{NAMES[data]}, % right", *(f"{batch:,}" for batch in batches), "lost"]
        lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
        for method, own in found.items():
            last = own.get(batches[-1])
            lost = f"{100 * (best - mean(last)):.2f}" if last else ""
            lines.append(f"| {' | '.join([method, *(cell(own.get(batch, [])) for batch in batches), lost])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def cell(rows: Rows) -> str:
    if not rows:
        return ""
    spread = f" ± {100 * statistics.stdev(row['accuracy'] for row in rows):.2f}" if len(rows) > 1 else ""
    return f"{100 * mean(rows):.2f}{spread}"


def rates(rows: Rows) -> str:
    """What every method was trained with, how many updates that were, and what the search found."""
    lines = ["| | batch: peak rate, updates | tried: % right |", "|---|---|---|"]
    for data in dict.fromkeys(row["data"] for row in rows if row.get("purpose") == "grid"):
        searched = by_method(rows, data, "search")
        for method, own in by_method(rows, data, "grid").items():
            used = [f"{batch:,}: {same[0]['rate']:g}, {same[0]['updates']:,}" for batch, same in sorted(own.items())]
            tried = []
            for batch, same in sorted(searched.get(method, {}).items()):
                found = [f"{row['rate']:g}: {100 * row['accuracy']:.1f}" for row in sorted(same, key=lambda row: row["rate"])]
                tried.append(f"{batch:,} with {', '.join(found)}")
            lines.append(f"| {NAMES[data]}, {method} | {'; '.join(used)} | {'; '.join(tried)} |")
    return "\n".join(lines)


def conclusion(rows: Rows) -> str:
    """The full recipe and plain SGD at the largest batch against the best of the smallest, in a sentence for each set of data."""
    told = []
    for data in dict.fromkeys(row["data"] for row in rows if row.get("purpose") == "grid"):
        found = by_method(rows, data, "grid")
        best, whose = best_small(found)
        small, large = (pick(batch for own in found.values() for batch in own) for pick in (min, max))
        ends = {method: own[large] for method, own in found.items() if large in own}
        full, plain = list(ends)[-1], next(iter(ends))
        told.append(
            f"{NAMES[data]}: the best of batch {small:,} has {100 * best:.2f} % ({whose}). At {large:,} the full recipe, down to "
            f'"{full}", loses {100 * (best - mean(ends[full])):.2f} points, plain SGD with the linear rule '
            f"{100 * (best - mean(ends[plain])):.2f} ({len(ends[full])} and {len(ends[plain])} seeds)."
        )
    return "\n\n".join(told)


def write_docs(rows: Rows) -> None:
    """The page and the pictures anew."""
    sys.path.insert(0, str(DOCS / "images"))
    pictures = runpy.run_path(str(DOCS / "images" / "draw_large_batch.py"))["pictures"]()
    for name, svg in pictures.items():
        (DOCS / "images" / f"{name}.svg").write_text(svg, encoding="utf-8")
    shown = [f"![Test accuracy over batch size](images/{name}.svg)" for name in pictures]
    parts = [BEGIN, *shown, table(rows), conclusion(rows), "Peak rates, and what the search found:", rates(rows), END]
    page = DOCS / "large-batch.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(before + "\n\n".join(parts) + rest.split(END)[1], encoding="utf-8")
