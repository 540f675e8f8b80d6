"""Draws the picture of docs/large-batch.md: `python docs/images/draw_large_batch.py` writes the SVGs beside this file.

Accuracy over batch size, a line per set of techniques, from the rows of benchmarks/study_large_batch.py. It has its own card, and
follows the reader's choice of light or dark.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "study_large_batch.jsonl"
NAMES = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 500, 56, 340
DEPTH = 0.08  # below the best that is drawn: what is worse lies on the lower edge, and its name says how bad it is
STYLE = """<style>
  svg { --card: #fbfbfd; --edge: #e5e7eb; --ink: #1f2937; --quiet: #5b6573; --grid: #e7e9ee;
    --c0: #64707f; --c1: #e07b1f; --c2: #8a7a1f; --c3: #2f6fde; --c4: #14957a; --c5: #d1495b }
  @media (prefers-color-scheme: dark) { svg { --card: #181c23; --edge: #2a303a; --ink: #e7eaf0; --quiet: #a3acb9; --grid: #2a303a;
    --c0: #9aa6b5; --c1: #f5a155; --c2: #cdbb55; --c3: #6ea2ff; --c4: #3fc9a8; --c5: #f37a8a } }
  text { fill: var(--ink); font: 13px ui-sans-serif, system-ui, Helvetica, Arial, sans-serif } .quiet { fill: var(--quiet) }
  .middle { text-anchor: middle } .end { text-anchor: end } .title { font-weight: 600; font-size: 15px }
  .grid { stroke: var(--grid) } .line { fill: none; stroke-width: 2.4; stroke-linejoin: round } .bar { stroke-width: 1.6 }
</style>"""


def read(path: Path = ROWS) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Accuracies by data, method and batch."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        row: dict[str, Any] = json.loads(line)
        if row.get("purpose") == "grid":
            found.setdefault(row["data"], {}).setdefault(row["method"], {}).setdefault(row["batch"], []).append(row["accuracy"])
    return found


def lines_picture(data: str, methods: dict[str, dict[int, list[float]]]) -> str:
    """One line per method with a bar of one standard deviation at each batch, names at the right in the order of the ends."""
    batches = sorted({batch for own in methods.values() for batch in own})
    means = {name: {b: statistics.mean(values) for b, values in own.items()} for name, own in methods.items()}
    all_means = [mean for own in means.values() for mean in own.values()]
    high = math.ceil(max(all_means) * 100) / 100
    low = max(math.floor(min(all_means) * 100) / 100, round(high - DEPTH, 2))
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2) if (high - low) / s <= 8)

    def x(batch: int) -> float:
        return LEFT + 20 + (RIGHT - LEFT - 40) * math.log(batch / batches[0]) / math.log(batches[-1] / batches[0])

    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (max(share, low) - low) / (high - low)

    parts = [f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="var(--card)" stroke="var(--edge)"/>']
    parts.append(f'<text class="title" x="24" y="32">{escape(NAMES[data])}: test accuracy over batch size, same epochs</text>')
    for i in range(round((high - low) / step) + 1):
        mark = low + i * step
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        parts.append(f'<text class="quiet end" x="{LEFT - 8}" y="{y(mark) + 4:.1f}">{100 * mark:g} %</text>')
    parts += [f'<text class="quiet middle" x="{x(b):.1f}" y="{BOTTOM + 22}">{b:,}</text>' for b in batches]
    parts.append(f'<text class="quiet middle" x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 14}">samples per step</text>')
    labels = sorted(((y(own[max(own)]), name) for name, own in means.items()), key=lambda end: end[0])
    at = TOP - 20.0
    for wanted, name in labels:
        at = max(wanted, at + 20)
        colour, own = f"var(--c{list(means).index(name)})", means[name]
        points = " ".join(f"{x(b):.1f},{y(own[b]):.1f}" for b in sorted(own))
        parts.append(f'<polyline class="line" stroke="{colour}" points="{points}"/>')
        for b in sorted(own):
            spread = statistics.stdev(methods[name][b]) if len(methods[name][b]) > 1 else 0.0
            ends = f'y1="{y(own[b] - spread):.1f}" y2="{y(own[b] + spread):.1f}"'
            parts.append(f'<line class="bar" stroke="{colour}" x1="{x(b):.1f}" x2="{x(b):.1f}" {ends}/>')
            parts.append(f'<circle fill="{colour}" cx="{x(b):.1f}" cy="{y(own[b]):.1f}" r="3.6"/>')
        told = f"{name}: {100 * own[max(own)]:.1f} %"
        parts.append(
            f'<line stroke="{colour}" x1="{RIGHT - 12}" x2="{RIGHT + 12}" y1="{wanted:.1f}" y2="{at:.1f}" opacity="0.5"/>'
        )
        parts.append(f'<text x="{RIGHT + 17}" y="{at + 4:.1f}">{escape(told)}</text>')
    title = f"<title>{escape(NAMES[data])}: test accuracy over batch size</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    return "\n".join([head, title, STYLE, *parts, "</svg>\n"])


def pictures() -> dict[str, str]:
    """One for each set of data that has more than two batches, by the name of its file."""
    return {
        f"large_batch_{data.replace('-', '_')}": lines_picture(data, methods)
        for data, methods in read().items()
        if len({batch for own in methods.values() for batch in own}) > 2
    }


if __name__ == "__main__":
    for name, svg in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(svg, encoding="utf-8")
