"""A plan as pictures: the step and the curve as SVG, a Chrome trace of the step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from phalanx.schedule.markup import Markup, join, tag

from .step import PredictedStep

SHOWN_RANKS = 16  # rows of a timeline; evenly chosen if there are more


def spans(step: PredictedStep) -> Iterator[tuple[int, str, float, float]]:
    """What a few ranks do, and when: rank, name, begin and end in seconds."""
    ranks = step.forward_end.size
    for rank in sorted({int(i * (ranks - 1) / max(1, SHOWN_RANKS - 1)) for i in range(min(ranks, SHOWN_RANKS))}):
        yield rank, "forward", 0.0, float(step.forward_end[rank])
        yield rank, "backward", float(step.forward_end[rank]), float(step.backward_end[rank])
        for number, group in enumerate(step.groups):
            yield rank, f"group {number}", float(group.begin[rank]), float(group.end[rank])
        together = max(float(step.backward_end.max()), *(float(group.end.max()) for group in step.groups))
        if step.seconds > together:
            yield rank, "update", together, step.seconds  # includes agreeing and packing


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
    scale = 780 / max(step.seconds, 1e-12)
    shapes = []
    for rank, name, begin, end in drawn:
        group = name.startswith("group")
        y = 54 + 26 * rows[rank] + (12 if group else 0)
        hint = tag("title", f"rank {rank}: {name}, {(end - begin) * 1e3:.3f} ms")
        box = {"x": f"{80 + begin * scale:.2f}", "y": y, "width": f"{max(0.3, (end - begin) * scale):.2f}", "height": 10}
        shapes.append(tag("rect", hint, **box, class_="group" if group else name))
    shapes += [tag("text", rank, x=70, y=64 + 26 * row, text_anchor="end") for rank, row in rows.items()]
    bottom = 54 + 26 * len(rows)
    for part in range(6):
        x = 80 + 156 * part
        shapes.append(tag("line", x1=x, x2=x, y1=50, y2=bottom, class_="grid"))
        shapes.append(tag("text", f"{step.seconds * part / 5 * 1e3:.4g}", x=x, y=bottom + 14, text_anchor="middle"))
    legend = ("forward", "backward", ("group", "gradients under way"), ("update", "update, agreeing, packing"))
    return drawing(900, bottom + 36, title, shapes, across="time in ms", down="rank", legend=legend)


def efficiency_svg(points: Sequence[tuple[int, float]], title: str) -> str:
    """Efficiency, compared with one device, over the number of ranks. The points have equal distances."""
    if not points:
        raise ValueError("a curve needs at least 1 point")
    last = max(1, len(points) - 1)
    places = [(80 + 780 * i / last, 340 - 280 * min(efficiency, 1.05)) for i, (_, efficiency) in enumerate(points)]
    shapes = []
    for percent in (0, 25, 50, 75, 100):
        y = 340 - 2.8 * percent
        shapes.append(tag("line", x1=80, x2=860, y1=y, y2=y, class_="grid"))
        shapes.append(tag("text", f"{percent} %", x=74, y=y + 4, text_anchor="end"))
    points_drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shapes.append(tag("polyline", class_="curve", points=points_drawn))
    for (x, y), (ranks, efficiency) in zip(places, points):
        hint = tag("title", f"{ranks}: {efficiency:.1%}")
        shapes.append(tag("circle", hint, cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, class_="backward"))
        shapes.append(tag("text", ranks, x=f"{x:.1f}", y=358, text_anchor="middle"))
    return drawing(
        900, 384, title, shapes, across="ranks", down="efficiency", legend=(("backward", "of as many single devices"),)
    )


# One style for every picture of a plan, on light and on dark pages.
_STYLE = Markup(
    "text{fill:#222}.grid{stroke:#ddd}.forward{fill:#9ecae1}.backward{fill:#3182bd}.group{fill:#fd8d3c}.update{fill:#9e9ac8}"
    ".curve{fill:none;stroke:#3182bd;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}.forward{fill:#4f7fa3}.group{fill:#e07b30}}"
)


def drawing(
    width: int, height: int, title: str, shapes: list[Markup], *, across: str, down: str, legend: Sequence[str | tuple[str, str]]
) -> str:
    """`shapes` with a title, the names of both axes, and a legend of classes (with their names, if these differ)."""
    parts = [tag("style", _STYLE), tag("text", title, x=80, y=18, font_size=14)]
    x = 80
    for entry in legend:
        kind, name = (entry, entry) if isinstance(entry, str) else entry
        parts.append(tag("rect", x=x, y=28, width=10, height=10, class_=kind))
        parts.append(tag("text", name, x=x + 14, y=37))
        x += 32 + 6 * len(name)
    middle = (height - 40) / 2 + 30
    parts.append(tag("text", across, x=width / 2, y=height - 6, text_anchor="middle"))
    parts.append(tag("text", down, x=14, y=middle, text_anchor="middle", transform=f"rotate(-90 14 {middle:g})"))
    inside = join(["", *parts, *shapes, ""], "\n")
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}", "font_family": "sans-serif", "font_size": 11}
    return tag("svg", inside, xmlns="http://www.w3.org/2000/svg", **size) + "\n"
