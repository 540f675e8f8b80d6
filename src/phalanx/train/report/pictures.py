"""Draw a schedule as SVG: ranks down, steps across. `timeline` draws measured steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.schedule import Collective, Move, Schedule, ScheduleError, lower, show
from phalanx.schedule.describe import describe
from phalanx.schedule.markup import NOTHING, Markup, join, tag
from phalanx.schedule.viewer import draw

RANKS, STEPS = 16, 40  # the most that are drawn; a larger schedule becomes text without its middle
APART = 14  # pixels between groups side by side in one step


def draw_schedule(schedule: Schedule, seats: str = "rank") -> Markup:
    """Draw the schedule and, if it calls a library, the messages of that call. `seats`: what the rows are, ranks or hosts."""
    if schedule.world == 1:
        return tag("p", f"One {seats} has no other to communicate with.", class_="quiet")
    if schedule.world > RANKS:
        return tag("pre", show(schedule, width=110))
    drawn = [_picture(schedule, schedule.name, seats)]
    if not schedule.lowered and len((messages := lower(schedule)).steps) <= STEPS:
        drawn.append(_picture(messages, f"{schedule.name}, as messages", seats))
    return join([tag("div", *drawn, class_="pair"), _player(schedule)])


def _player(schedule: Schedule) -> Markup:
    """The interactive viewer, unless the schedule is too large for it."""
    try:
        return draw(schedule)
    except ScheduleError:
        return NOTHING


def _picture(s: Schedule, title: str, seats: str) -> Markup:
    if len(s.steps) > STEPS:
        return tag("pre", show(s, width=110))
    beside = [_side_by_side([op.group for op in step.ops if isinstance(op, Collective)]) for step in s.steps]
    row, left, top = 26, 58, 34
    column = max(64, 40 + APART * max((len(set(places.values())) for places in beside), default=0))
    width, height = left + column * len(s.steps) + 14, top + row * s.world + 2

    def y(rank: int) -> float:
        return top + row * (rank + 0.5)

    body = []
    for rank in range(s.world):
        body.append(tag("line", class_="grid", x1=left, x2=width - 8, y1=y(rank), y2=y(rank)))
        body.append(tag("text", f"{seats} {rank}", class_="end", x=left - 10, y=y(rank) + 4))
    for number, step in enumerate(s.steps):
        lanes = len(set(beside[number].values()))
        x = left + column * number
        body.append(tag("text", number + 1, tag("title", step.label), class_="middle", x=x + column / 2, y=14))
        if number:
            body.append(tag("line", class_="grid", x1=x, x2=x, y1=22, y2=height - 4))
        for op in step.ops:
            hint = tag("title", f"step {number + 1}, {step.label}: {describe(op)}")
            if isinstance(op, Move):
                colour = 0 if op.reduce else 2
                body.append(_arrow(x + 12, y(op.src), x + column - 12, y(op.dst), colour, hint))
            elif isinstance(op, Collective):
                aside = APART * (beside[number][op.group] - (lanes - 1) / 2)
                body.append(_call(x + column / 2 + aside, [y(rank) for rank in op.group], op.kind, hint))
            else:
                body += [tag("circle", hint, class_="op c3", cx=x + column / 2, cy=y(rank), r=4) for rank in op.ranks]
    size = {"viewBox": f"0 0 {width} {height}", "style": f"width:{width}px"}
    picture = tag("svg", *body, class_="picture", **size, role="img", aria_label=title)
    return tag("div", tag("p", title, class_="quiet"), picture, class_="wide")


def _side_by_side(groups: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """A column for each group, so that the lines of groups do not overlap."""
    below: list[int] = []  # the lowest rank that each column has reached
    places: dict[tuple[int, ...], int] = {}
    for group in sorted(set(groups), key=min):
        place = next((i for i, rank in enumerate(below) if rank < min(group)), len(below))
        below[place : place + 1] = [max(group)]
        places[group] = place
    return places


def _arrow(x0: float, y0: float, x1: float, y1: float, colour: int, hint: Markup) -> Markup:
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    wing = [(x1 - 7 * dx - 3.2 * dy, y1 - 7 * dy + 3.2 * dx), (x1 - 7 * dx + 3.2 * dy, y1 - 7 * dy - 3.2 * dx)]
    head = " ".join(f"{px:.1f},{py:.1f}" for px, py in [(x1, y1), *wing])
    shaft = tag("line", x1=f"{x0:.1f}", y1=f"{y0:.1f}", x2=f"{x1 - 5 * dx:.1f}", y2=f"{y1 - 5 * dy:.1f}")
    return tag("g", shaft, tag("polygon", points=head), hint, class_=f"op c{colour}")


def _call(x: float, ys: Sequence[float], kind: str, hint: Markup) -> Markup:
    """A library call: its ranks as dots on one line."""
    colour = {"reduce_scatter": 0, "reduce": 0, "all_gather": 2, "broadcast": 2, "all_reduce": 5}[kind]
    dots = [tag("circle", cx=x, cy=y, r=5) for y in ys]
    return tag("g", tag("line", x1=x, x2=x, y1=min(ys), y2=max(ys)), *dots, hint, class_=f"op c{colour}")


def name_calls(schedule: Schedule) -> list[tuple[str, int]]:
    """The legend of a picture: what its colours mean."""
    kinds = {op.kind for op in schedule.ops() if isinstance(op, Collective)}
    adds, takes = {"reduce_scatter", "reduce"} & kinds, {"all_gather", "broadcast"} & kinds
    moves = [op for op in lower(schedule).ops() if isinstance(op, Move)] if schedule.world <= RANKS else []
    named = [("all-reduce", 5)] if "all_reduce" in kinds else []
    if schedule.goal == "mixing":
        named += [("halve", 3)]
    if adds or any(op.reduce for op in moves) or not moves:
        named += [(" / ".join([*sorted(k.replace("_", "-") for k in adds), "send and add"]), 0)]
    if takes or any(not op.reduce for op in moves) or not moves:
        named += [(" / ".join([*sorted(k.replace("_", "-") for k in takes), "send a copy"]), 2)]
    return named
