"""A plan as pictures: the step and the curve as SVG, a Chrome trace of the step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from phalanx.schedule.markup import Markup, join, tag

from .step import PredictedStep

SHOWN_RANKS = 16  # rows of a timeline; evenly chosen where there are more
_COLOURS = {"forward": "#9ecae1", "backward": "#3182bd", "group": "#fd8d3c", "update": "#9e9ac8"}


def spans(step: PredictedStep) -> Iterator[tuple[int, str, float, float]]:
    """What a few ranks do when: rank, name, begin, end in seconds."""
    ranks = step.forward_end.size
    for rank in sorted({int(i * (ranks - 1) / max(1, SHOWN_RANKS - 1)) for i in range(min(ranks, SHOWN_RANKS))}):
        yield rank, "forward", 0.0, float(step.forward_end[rank])
        yield rank, "backward", float(step.forward_end[rank]), float(step.backward_end[rank])
        for number, group in enumerate(step.groups):
            yield rank, f"group {number}", float(group.begin[rank]), float(group.end[rank])
        together = max(float(step.backward_end.max()), *(float(group.end.max()) for group in step.groups))
        if step.seconds > together:
            yield rank, "update", together, step.seconds  # and what agreeing and packing take


def trace(step: PredictedStep) -> str:
    """The step for chrome://tracing or ui.perfetto.dev: a process per rank, one row computing, one communicating."""
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": rank,
            "tid": int(name.startswith("group")),
            "ts": begin * 1e6,
            "dur": (end - begin) * 1e6,
        }
        for rank, name, begin, end in spans(step)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def timeline_svg(step: PredictedStep, title: str) -> str:
    """The step as a picture: ranks down, time across; computing above, communicating below."""
    drawn = list(spans(step))
    rows = {rank: row for row, rank in enumerate(dict.fromkeys(rank for rank, *_ in drawn))}
    scale = 800 / max(step.seconds, 1e-12)
    shapes = []
    for rank, name, begin, end in drawn:
        group = name.startswith("group")
        y = 40 + 26 * rows[rank] + (12 if group else 0)
        colour = _COLOURS["group" if group else name]
        hint = tag("title", f"rank {rank}: {name}, {(end - begin) * 1e3:.3f} ms")
        box = {"x": f"{80 + begin * scale:.2f}", "y": y, "width": f"{max(0.3, (end - begin) * scale):.2f}", "height": 10}
        shapes.append(tag("rect", hint, **box, fill=colour))
    shapes += [tag("text", f"rank {rank}", x=5, y=54 + 26 * row) for rank, row in rows.items()]
    height = 70 + 26 * len(rows)
    shapes.append(tag("text", "0", x=80, y=height - 8))
    shapes.append(tag("text", f"{step.seconds * 1e3:.2f} ms", x=880, y=height - 8, text_anchor="end"))
    return _svg(900, height, title, shapes)


def efficiency_svg(points: Sequence[tuple[int, float]], title: str) -> str:
    """Efficiency against one device over the number of ranks, the latter by powers of two."""
    if not points:
        raise ValueError("a curve needs at least 1 point")
    last = max(1, len(points) - 1)
    places = [(80 + 780 * i / last, 340 - 280 * min(efficiency, 1.05)) for i, (_, efficiency) in enumerate(points)]
    shapes = []
    for percent in (0, 25, 50, 75, 100):
        y = 340 - 2.8 * percent
        shapes.append(tag("line", x1=80, x2=860, y1=y, y2=y, stroke="#dddddd"))
        shapes.append(tag("text", f"{percent} %", x=70, y=y + 4, text_anchor="end"))
    points_drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shapes.append(tag("polyline", fill="none", stroke="#3182bd", stroke_width=2, points=points_drawn))
    for (x, y), (ranks, efficiency) in zip(places, points):
        hint = tag("title", f"{ranks}: {efficiency:.1%}")
        shapes.append(tag("circle", hint, cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, fill="#3182bd"))
        shapes.append(tag("text", ranks, x=f"{x:.1f}", y=360, text_anchor="middle"))
    return _svg(900, 375, title, shapes)


def _svg(width: int, height: int, title: str, shapes: list[Markup]) -> str:
    inside = join(["", tag("text", title, x=80, y=22, font_size=14), *shapes, ""], "\n")
    size = {"width": width, "height": height, "font_family": "sans-serif", "font_size": 11}
    return tag("svg", inside, xmlns="http://www.w3.org/2000/svg", **size) + "\n"
