"""Draw a few steps of a run as SVG from its trace.json: the training thread and the network, by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from phalanx.schedule.limits import MAX_RANKS
from phalanx.schedule.markup import NOTHING, Markup, join, tag
from phalanx.train.report.axis import ticks
from phalanx.train.report.run import MOST

LANES = 8  # most ranks that are drawn
TRAVELS = {"all-reduce": 5, "exchange": 5}  # communication, and its colour
PHASES = {"input": 1, "forward": 0, "backward": 4, "wait": 3, "update": 2}  # and their colours


@dataclass(frozen=True, slots=True)
class DrawnSpan:
    """An interval of time on a rank; `begun` and `took` are in microseconds."""

    rank: int
    kind: str
    name: str
    begun: float
    took: float


def read_spans(trace: Mapping[str, Any]) -> list[DrawnSpan]:
    """The spans of a trace that can be drawn. The file may come from another program, so unknown events are skipped."""
    events = trace.get("traceEvents")
    return list(_spans(events)) if isinstance(events, list) else []


def _spans(events: list[Any]) -> Iterator[DrawnSpan]:
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        rank, kind, name, begun, took = [event.get(key) for key in ("pid", "cat", "name", "ts", "dur")]
        if not isinstance(kind, str) or kind not in ("phase", *TRAVELS) or not isinstance(name, str):
            continue
        if type(rank) is int and 0 <= rank < MAX_RANKS and _is_time(begun) and _is_time(took):
            yield DrawnSpan(rank, kind, name, float(begun), float(took))


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST


def draw_timeline(trace: Mapping[str, Any]) -> Markup:
    """Draw the first ranks: the training thread above, communication below."""
    spans = read_spans(trace)
    ranks = sorted({span.rank for span in spans})
    if not spans:
        return NOTHING
    shown = ranks[:LANES]
    begin, end = min(span.begun for span in spans), max(span.begun + span.took for span in spans)
    left, width, row, top = 58, 1000, 46, 26
    height = top + row * len(shown)
    whole = max(end - begin, 1e-3)  # at least a nanosecond, for the axis
    scale = (width - left - 10) / whole
    body = []
    for tick in ticks(0.0, whole / 1000, 8):
        x = left + tick * 1000 * scale
        if x < width - 8:
            body.append(tag("line", class_="grid", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=18, y2=height))
            body.append(tag("text", f"{tick:g} ms", class_="middle", x=f"{x:.1f}", y=12))
    for place, rank in enumerate(shown):
        y = top + row * place
        body.append(tag("text", f"rank {rank}", class_="end", x=left - 10, y=y + 19))
        body += [_bar(span, left + (span.begun - begin) * scale, y, scale) for span in spans if span.rank == rank]
    picture = tag("svg", *body, class_="picture timeline", viewBox=f"0 0 {width} {height}", role="img", aria_label="timeline")
    more = tag("p", f"The first {LANES} of {len(ranks)} ranks; trace.json has all.", class_="quiet")
    return join([tag("div", picture, class_="wide"), more if len(ranks) > LANES else NOTHING])


def _bar(span: DrawnSpan, x: float, y: float, scale: float) -> Markup:
    phase = span.kind == "phase"
    top, height = (y + 4, 22) if phase else (y + 29, 9)
    colour = PHASES.get(span.name, 6) if phase else 5
    hint = tag("title", f"{span.name}: {span.took / 1000:.3g} ms")
    place = {"x": f"{x:.2f}", "y": top, "width": f"{max(span.took * scale, 0.6):.2f}", "height": height, "rx": 1.5}
    return tag("rect", hint, class_=f"bar c{colour}", **place)


def name_travels(trace: Mapping[str, Any]) -> dict[str, int]:
    """The legend of communication."""
    there = {span.kind for span in read_spans(trace)}
    return {name: colour for name, colour in TRAVELS.items() if name in there}
