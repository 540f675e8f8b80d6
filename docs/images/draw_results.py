"""Draws the chart of the README and of the results: `python docs/images/draw_results.py` writes results.svg beside this file.

Everything in it is read from benchmarks/results/.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draw import AMBER, BLUE, FAINT, GREY, INK, TEAL, box, picture, text

sys.path.insert(0, str(Path(__file__).parents[1] / "generate"))
from records import find, over_gloo, rows

WIDTH, HEIGHT = 860, 330
CONTENDERS = (("gloo", "DDP on gloo", AMBER), ("optimizer", "Phalanx", BLUE), ("fused", "Phalanx, fused=True", TEAL))


def steps(left: float, top: float) -> Iterator[str]:
    """Bars: a step of ResNet-50 on 2 and on 4 ranks, and without communication."""
    yield text(left, top, "Step of ResNet-50, ms (less is better)", bold=True)
    longest = max(_step(ranks, "gloo")["ms"] for ranks in (2, 4))
    y = top + 18
    for ranks in (2, 4):
        yield text(left, y + 12, f"{ranks} ranks", fill=FAINT)
        least = _step(ranks, "none")["ms"] / longest * 220
        for name, said, colour in CONTENDERS:
            row = _step(ranks, name)
            y += 24
            length = row["ms"] / longest * 220
            faster = "" if name == "gloo" else f", {over_gloo(row):.2f}x faster"
            yield box(left, y, length, 17, colour)
            yield text(left + length + 6, y + 13, f"{said}: {row['ms']:.0f}{faster}", size=12)
        x = left + least
        yield f'<line x1="{x:g}" y1="{y - 52:g}" x2="{x:g}" y2="{y + 21:g}" stroke="{INK}" stroke-dasharray="3 3"/>'
        y += 34
    yield text(left, y + 16, "dashed: without communication", size=12, fill=FAINT)


def _step(ranks: int, contender: str) -> dict[str, Any]:
    return find(f"steps_{ranks}_ranks", model="resnet50", batch=2, contender=contender)


def sums(left: float, top: float) -> Iterator[str]:
    """Lines: an all-reduce over its size, both axes logarithmic."""
    yield text(left, top, "All-reduce on 2 ranks, ms (less is better)", bold=True)
    width, height, bottom = 335.0, 220.0, top + 248
    found = [row for row in rows("allreduce_2_ranks") if "size" in row]
    sizes = sorted({row["size"] for row in found})

    def x(size: int) -> float:
        return left + 40 + (width - 40) * math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])

    def y(us: float) -> float:
        return bottom - height * math.log10(us / 4) / math.log10(200_000 / 4)

    for us, said in ((10, "0.01"), (100, "0.1"), (1000, "1"), (10_000, "10"), (100_000, "100")):
        yield f'<line x1="{left + 40:g}" y1="{y(us):g}" x2="{left + width:g}" y2="{y(us):g}" stroke="{GREY}"/>'
        yield text(left + 34, y(us) + 4, said, size=12, fill=FAINT, anchor="end")
    for size in (sizes[0], sizes[2], sizes[4], sizes[-1]):
        said = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        yield text(x(size), bottom + 18, said, size=12, fill=FAINT, anchor="middle")
    for name, said, colour, above in (("gloo", "gloo", AMBER, -12), ("phalanx buffer", "Phalanx", BLUE, 20)):
        line = [(x(row["size"]), y(row["time_us"])) for row in found if row["contender"] == name]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in line)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.2" fill="{colour}"/>' for a, b in line)
        yield text(line[4][0] + above / 2, line[4][1] + above, said, size=12)


def pictures() -> dict[str, str]:
    """By file name."""
    title = "Phalanx against DDP and gloo: the step of ResNet-50, and the all-reduce by size"
    return {"results": picture(WIDTH, HEIGHT, title, [*steps(24, 34), *sums(490, 34)])}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (Path(__file__).parent / f"{name}.svg").write_text(svg, encoding="utf-8")
