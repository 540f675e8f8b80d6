"""Pictures of what happens between ranks, as SVG text: a schedule (ranks down, steps across), and a few steps as a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from phalanx.schedule import Collective, Move, Schedule, lower, show
from phalanx.schedule.describe import describe
from phalanx.schedule.limits import MAX_RANKS
from phalanx.train.report.plots import ticks
from phalanx.train.report.run import MOST

RANKS, STEPS = 16, 40  # of a schedule that is drawn; a larger one is shown as text, with its middle left out
APART = 14  # pixels between groups that stand side by side in one step
LANES = 8  # ranks of a timeline
TRAVELS = {"all-reduce": 5, "exchange": 5}  # what is on the wire, and its colour
PHASES = {"input": 1, "forward": 0, "backward": 4, "wait": 3, "update": 2}  # and their colours


# ---- a schedule --------------------------------------------------------------------------------------------------------------


def draw_schedule(schedule: Schedule, seats: str = "rank") -> str:
    """As it is called and, where it calls a library, as the messages of that call. `seats`: what its rows are, ranks or hosts."""
    if schedule.world == 1:
        return f'<p class="quiet">One {escape(seats)} has nobody to communicate with.</p>'
    if schedule.world > RANKS:
        return f"<pre>{escape(show(schedule, width=110))}</pre>"
    drawn = [_picture(schedule, schedule.name, seats)]
    if not schedule.lowered and len((messages := lower(schedule)).steps) <= STEPS:
        drawn.append(_picture(messages, f"{schedule.name}, as messages", seats))
    return f'<div class="pair">{"".join(drawn)}</div>'


def _picture(s: Schedule, title: str, seats: str) -> str:
    if len(s.steps) > STEPS:
        return f"<pre>{escape(show(s, width=110))}</pre>"
    beside = [_side_by_side([op.group for op in step.ops if isinstance(op, Collective)]) for step in s.steps]
    row, left, top = 26, 58, 34
    column = max(64, 40 + APART * max((len(set(places.values())) for places in beside), default=0))
    width, height = left + column * len(s.steps) + 14, top + row * s.world + 2

    def y(rank: int) -> float:
        return top + row * (rank + 0.5)

    body = []
    for rank in range(s.world):
        body.append(f'<line class="grid" x1="{left}" x2="{width - 8}" y1="{y(rank)}" y2="{y(rank)}"/>')
        body.append(f'<text class="end" x="{left - 10}" y="{y(rank) + 4}">{escape(seats)} {rank}</text>')
    for number, step in enumerate(s.steps):
        lanes = len(set(beside[number].values()))
        x = left + column * number
        body.append(f'<text class="middle" x="{x + column / 2}" y="14">{number + 1}<title>{escape(step.label)}</title></text>')
        if number:
            body.append(f'<line class="grid" x1="{x}" x2="{x}" y1="22" y2="{height - 4}"/>')
        for op in step.ops:
            told = f"<title>{escape(f'step {number + 1}, {step.label}: {describe(op)}')}</title>"
            if isinstance(op, Move):
                colour = 0 if op.reduce else 2
                body.append(_arrow(x + 12, y(op.src), x + column - 12, y(op.dst), colour, told))
            elif isinstance(op, Collective):
                aside = APART * (beside[number][op.group] - (lanes - 1) / 2)
                body.append(_call(x + column / 2 + aside, [y(rank) for rank in op.group], op.kind, told))
            else:
                body += [f'<circle class="op c3" cx="{x + column / 2}" cy="{y(rank)}" r="4">{told}</circle>' for rank in op.ranks]
    size = f'viewBox="0 0 {width} {height}" style="width:{width}px"'
    picture = f'<svg class="picture" {size} role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    return f'<div class="wide"><p class="quiet">{escape(title)}</p>{picture}</div>'


def _side_by_side(groups: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """A place for each group, from left to right: groups whose lines would lie on each other get different ones."""
    below: list[int] = []  # the lowest rank that each place has reached
    places: dict[tuple[int, ...], int] = {}
    for group in sorted(set(groups), key=min):
        place = next((i for i, rank in enumerate(below) if rank < min(group)), len(below))
        below[place : place + 1] = [max(group)]
        places[group] = place
    return places


def _arrow(x0: float, y0: float, x1: float, y1: float, colour: int, told: str) -> str:
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    wing = [(x1 - 7 * dx - 3.2 * dy, y1 - 7 * dy + 3.2 * dx), (x1 - 7 * dx + 3.2 * dy, y1 - 7 * dy - 3.2 * dx)]
    head = " ".join(f"{px:.1f},{py:.1f}" for px, py in [(x1, y1), *wing])
    return (
        f'<g class="op c{colour}"><line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1 - 5 * dx:.1f}" y2="{y1 - 5 * dy:.1f}"/>'
        f'<polygon points="{head}"/>{told}</g>'
    )


def _call(x: float, ys: Sequence[float], kind: str, told: str) -> str:
    """A library call: its ranks as dots on one line, beside it what is called."""
    colour = {"reduce_scatter": 0, "reduce": 0, "all_gather": 2, "broadcast": 2, "all_reduce": 5}[kind]
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="5"/>' for y in ys)
    return f'<g class="op c{colour}"><line x1="{x}" x2="{x}" y1="{min(ys)}" y2="{max(ys)}"/>{dots}{told}</g>'


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


# ---- a timeline --------------------------------------------------------------------------------------------------------------


def draw_timeline(trace: Mapping[str, Any]) -> str:
    """The steps of `trace.json` on the first ranks: above what the training thread does, below what is on the wire."""
    spans = [e for e in _events(trace) if e.get("ph") == "X" and e.get("cat") in ("phase", *TRAVELS) and _is_span(e)]
    ranks = sorted({e["pid"] for e in spans})
    if not spans:
        return ""
    shown = ranks[:LANES]
    begin, end = min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    left, width, row, top = 58, 1000, 46, 26
    height = top + row * len(shown)
    scale = (width - left - 10) / max(end - begin, 1e-9)
    body = []
    for tick in ticks(0.0, (end - begin) / 1000, 8):
        x = left + tick * 1000 * scale
        if x < width - 8:
            body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{height}"/>')
            body.append(f'<text class="middle" x="{x:.1f}" y="12">{tick:g} ms</text>')
    for place, rank in enumerate(shown):
        y = top + row * place
        body.append(f'<text class="end" x="{left - 10}" y="{y + 19}">rank {rank}</text>')
        body += _lane((e for e in spans if e["pid"] == rank), left, y, begin, scale)
    more = f'<p class="quiet">The first {LANES} of {len(ranks)} ranks; trace.json has all.</p>' if len(ranks) > LANES else ""
    size = f'viewBox="0 0 {width} {height}"'
    picture = f'<svg class="picture timeline" {size} role="img" aria-label="timeline">{"".join(body)}</svg>'
    return f'<div class="wide">{picture}</div>{more}'


def name_travels(trace: Mapping[str, Any]) -> dict[str, int]:
    """The legend of what is on the wire."""
    there = [e.get("cat") for e in _events(trace)]
    return {name: colour for name, colour in TRAVELS.items() if name in there}


def _events(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    events = trace.get("traceEvents")
    return [e for e in events if isinstance(e, dict)] if isinstance(events, list) else []


def _is_span(event: Mapping[str, Any]) -> bool:
    """Whether it is one that we write; a trace of another program, or one that was edited, may have others."""
    rank, begun, took = event.get("pid"), event.get("ts"), event.get("dur")
    return (
        isinstance(event.get("name"), str)
        and type(rank) is int
        and 0 <= rank < MAX_RANKS
        and all(isinstance(at, int | float) and 0 <= at <= MOST for at in (begun, took))
    )


def _lane(spans: Iterable[Mapping[str, Any]], left: float, y: float, begin: float, scale: float) -> Iterable[str]:
    for e in spans:
        x, wide = left + (e["ts"] - begin) * scale, max(e["dur"] * scale, 0.6)
        phase = e["cat"] == "phase"
        box = (y + 4, 22) if phase else (y + 29, 9)
        colour = PHASES.get(e["name"], 6) if phase else 5
        told = escape(f"{e['name']}: {e['dur'] / 1000:.3g} ms")
        yield (
            f'<rect class="bar c{colour}" x="{x:.2f}" y="{box[0]}" width="{wide:.2f}" height="{box[1]}" rx="1.5">'
            f"<title>{told}</title></rect>"
        )
