"""Plots as SVG: lines with gaps, stacked areas, bars. Colours are classes `c0` to `c7`, which the page defines.

Every series carries its numbers (`data-x`, `data-y`), for the page's hover and for your own scripts. A line of more than `MOST`
points is thinned: it is cut into MOST / 2 runs, and each keeps its minimum and maximum, so that no peak is lost. An area is drawn
from every n-th point, so that its parts stay aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from phalanx.schedule.markup import NOTHING, Markup, join, tag
from phalanx.train.report.axis import UNITS, AxisScale, decades, number, ticks

STYLE = Markup("""<style>
  .plot { --card: #ffffff; --quiet: #5b6573; --grid: #e3e6eb; --c: #2f6fde; background: var(--card) }
  .plot text { fill: var(--quiet); font: 11.5px system-ui, sans-serif }
  .plot .end { text-anchor: end } .plot .middle { text-anchor: middle }
  .plot .grid { stroke: var(--grid) } .plot path { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round }
  @media (prefers-color-scheme: dark) { .plot { --card: #181c23; --quiet: #a3acb9; --grid: #2a303a; --c: #6ea2ff } }
</style>""")  # for a plot outside the page

MOST = 600  # points of one series, more than a plot has pixels
COLOURS = 8
WIDTH, HEIGHT = 480, 236
LEFT, RIGHT, TOP, BOTTOM = 50, 468, 10, 202

Number = float | None


# ---- values ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A line. `ys` may have gaps (None or NaN); `style` is "solid", "faint", "dashed" or "steps"."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[Number, ...]
    colour: int = 0
    style: str = "solid"

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.ys):
            raise ValueError(f"{self.name}: {len(self.xs)} places, but {len(self.ys)} values")


def thin(s: Series, most: int = MOST) -> Series:
    """Thin to at most `most` points: minimum and maximum of each of most / 2 runs, in order. An empty run is a gap."""
    count, runs = len(s.xs), most // 2
    if count <= most:
        return s
    kept: list[int] = []
    for r in range(runs):
        run = range(r * count // runs, (r + 1) * count // runs)
        there = [i for i in run if is_number(s.ys[i])] or [run[0]]
        kept += sorted({min(there, key=lambda i: s.ys[i] or 0.0), max(there, key=lambda i: s.ys[i] or 0.0)})
    return replace(s, xs=tuple(s.xs[i] for i in kept), ys=tuple(s.ys[i] for i in kept))


def is_number(value: Number) -> bool:
    """Whether a value can be drawn."""
    return value is not None and math.isfinite(value)


def spans_decades(series: Sequence[Series]) -> bool:
    """Whether a logarithmic axis shows more than a linear one: all values are positive, and some are much smaller than others."""
    ys = [y for s in series for y in s.ys if y is not None and math.isfinite(y)]
    return bool(ys) and min(ys) > 0 and max(ys) > 30 * min(ys)


# ---- plots -------------------------------------------------------------------------------------------------------------------


def plot_lines(
    series: Sequence[Series],
    *,
    title: str,
    x: str,
    unit: str = "number",
    log: bool = False,
    zero: bool = False,
    most: float | None = None,
    events: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Lines over one axis `x`. `zero`: the y axis starts at 0; `most`: it ends there; `log`: logarithmic.

    `events`: positions to mark with a vertical line and a text.
    """
    lines = [thin(s) for s in series]
    ys = [y for s in lines for y in s.ys if y is not None and math.isfinite(y)]
    xs = [x for s in lines for x, y in zip(s.xs, s.ys) if is_number(y)]
    if not ys:
        return NOTHING
    if log:
        marks = decades(min(ys), max(ys))
    elif zero and not any(ys):
        marks = ticks(0.0, 1.0 if most is None else most)  # only zeros: draw them at the bottom
    else:
        marks = ticks(min([*ys, 0.0] if zero else ys), max(ys))
    if most is not None and not log:
        marks = [mark for mark in marks if mark <= most + 1e-9]
        marks = marks if len(marks) > 1 else [most - 1e-3 * (abs(most) or 1.0), most]
    across, along = _axes(xs, marks, log)
    happened = [_event(across(at), text) for at, text in events if across.low <= at <= across.high]
    body = [_frame(across, along, marks, x, unit), *happened, *(_line(s, across, along) for s in lines)]
    return _svg(title, x, unit, across, along, body)


def stand_alone(plot: Markup) -> str:
    """A plot of one line as its own file, for light and dark mode."""
    size = f"0 0 {WIDTH} {HEIGHT}"
    return f"{tag('svg', STYLE, plot, xmlns='http://www.w3.org/2000/svg', class_='plot', viewBox=size)}\n"


def plot_stack(xs: Sequence[float], parts: Sequence[Series], *, title: str, x: str, unit: str) -> Markup:
    """Areas on top of each other, the first at the bottom. Rows with a missing part are left out."""
    whole = [i for i in range(len(xs)) if all(is_number(part.ys[i]) for part in parts)]
    if not whole:
        return NOTHING
    kept = whole if len(whole) <= MOST else [whole[i * len(whole) // MOST] for i in range(MOST)]
    places = [xs[i] for i in kept]
    if len(places) == 1:  # a single point has no area: draw it as a bar
        places = [places[0] - 0.5, places[0] + 0.5]
        kept = kept * 2
    values = [[float(part.ys[i] or 0.0) for i in kept] for part in parts]
    marks = ticks(0.0, max(map(sum, zip(*values))))
    across, along = _axes(places, marks, log=False)
    body = [_frame(across, along, marks, x, unit)]
    below = [0.0] * len(places)
    for part, own in zip(parts, values):
        above = [a + b for a, b in zip(below, own)]
        edge = [f"{across(p):.2f} {along(y):.2f}" for p, y in zip(places, above)]
        edge += [f"{across(p):.2f} {along(y):.2f}" for p, y in reversed(list(zip(places, below)))]
        area = tag("path", d=f"M{' L'.join(edge)} Z")
        body.append(tag("g", area, class_=f"series area c{part.colour % COLOURS}", **_data(part.name, places, own)))
        below = above
    return _svg(title, x, unit, across, along, body)


def plot_bars(names: Sequence[str], parts: Sequence[Series], *, title: str, unit: str) -> Markup:
    """One horizontal bar per name, with the parts' values end to end. `ys[i]` of a part belongs to names[i]."""
    values = [[part.ys[i] or 0.0 for part in parts] for i in range(len(names))]
    longest = max(map(sum, values), default=0.0)
    if not longest:
        return NOTHING
    marks = ticks(0.0, longest)
    row, left = 34, 120
    height = row * len(names) + 40
    across = AxisScale(0.0, marks[-1], left, RIGHT - 20)
    body = []
    for m in marks:
        x = f"{across(m):.1f}"
        body.append(tag("line", class_="grid", x1=x, x2=x, y1=4, y2=height - 30))
        body.append(tag("text", UNITS[unit](m), x=x, y=height - 14, class_="middle"))
    for i, (name, own) in enumerate(zip(names, values)):
        y, at = 8 + i * row, 0.0
        short = name if len(name) <= 17 else f"{name[:16]}…"
        body.append(tag("text", short, tag("title", name), x=left - 8, y=y + 15, class_="end"))
        for part, value in zip(parts, own):
            wide = across(at + value) - across(at)
            hint = tag("title", f"{part.name}: {UNITS[unit](value)}")
            place = {"x": f"{across(at):.2f}", "y": y, "width": f"{wide:.2f}", "height": 22}
            body.append(tag("rect", hint, class_=f"bar c{part.colour % COLOURS}", **place))
            at += value
    return tag("svg", *body, class_="bars", viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)


def _axes(xs: Sequence[float], marks: Sequence[float], log: bool) -> tuple[AxisScale, AxisScale]:
    low, high = min([0.0, *xs]), max(xs)  # runs start at 0, even if the first row is later
    if low == high:
        low, high = low - 0.5, high + 0.5
    return AxisScale(low, high, LEFT, RIGHT), AxisScale(marks[0], marks[-1], BOTTOM, TOP, log)


def _frame(across: AxisScale, along: AxisScale, marks: Sequence[float], x: str, unit: str) -> Markup:
    """Grid, ticks and the name of the x axis."""
    parts = []
    for mark in marks:
        y = along(mark)
        parts.append(tag("line", class_="grid", x1=LEFT, x2=RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}"))
        parts.append(tag("text", UNITS[unit](mark), class_="end", x=LEFT - 7, y=f"{y + 3.5:.1f}"))
    parts += [
        tag("text", number(tick), class_="middle", x=f"{across(tick):.1f}", y=BOTTOM + 15)
        for tick in ticks(across.low, across.high, 6)
        if across.low - 1e-9 <= tick <= across.high + 1e-9
    ]
    parts.append(tag("text", x, class_="middle name", x=(LEFT + RIGHT) / 2, y=HEIGHT - 5))
    return join(parts)


def _event(x: float, text: str) -> Markup:
    """A thin line under a wide transparent one, which is easier to hover."""
    ends = {"x1": f"{x:.1f}", "x2": f"{x:.1f}", "y1": TOP, "y2": BOTTOM}
    return join([tag("line", class_="event", **ends), tag("line", tag("title", text), class_="wide", **ends)])


def _line(s: Series, across: AxisScale, along: AxisScale) -> Markup:
    """The line, split at gaps. A piece of one point is a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(s.xs, s.ys):
        if y is None or not math.isfinite(y):
            pieces.append([])
        else:
            pieces[-1].append((across(x), along(y)))
    drawn = []
    for piece in filter(None, pieces):
        if len(piece) == 1:
            drawn.append(tag("circle", cx=f"{piece[0][0]:.2f}", cy=f"{piece[0][1]:.2f}", r=3))
            continue
        points = [f"{piece[0][0]:.2f} {piece[0][1]:.2f}"]
        for (_, before), (px, py) in pairwise(piece):
            if s.style == "steps" and before != py:
                points.append(f"{px:.2f} {before:.2f}")
            points.append(f"{px:.2f} {py:.2f}")
        drawn.append(tag("path", d=f"M{' L'.join(points)}"))
    return tag("g", *drawn, class_=f"series {s.style} c{s.colour % COLOURS}", **_data(s.name, s.xs, s.ys))


def _data(name: str, xs: Sequence[float], ys: Sequence[Number]) -> dict[str, str]:
    def texts(values: Sequence[Number]) -> str:
        return " ".join(f"{v:.6g}" if v is not None and math.isfinite(v) else "-" for v in values)

    return {"data_name": name, "data_x": texts(xs), "data_y": texts(ys)}


def _svg(title: str, x: str, unit: str, across: AxisScale, along: AxisScale, body: Sequence[Markup]) -> Markup:
    return tag(
        "svg",
        *body,
        class_="plot",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
        data_x0=f"{across.low:.8g}",
        data_x1=f"{across.high:.8g}",
        data_y0=f"{along.low:.8g}",
        data_y1=f"{along.high:.8g}",
        data_log=int(along.log),
        data_unit=unit,
        data_axis=x,
        data_box=f"{LEFT} {RIGHT} {TOP} {BOTTOM}",
    )
