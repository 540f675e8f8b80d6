"""Draws the pictures of docs/gossip.md: `python docs/images/draw_gossip.py` writes the SVGs beside this file.

Two are computed from the schedule that runs: who sends to whom, and whose updates are in which replica after each step. The third
is drawn from the records of benchmarks/gossip_speed.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from draw import AMBER, BLUE, FAINT, GREY, INK, ROSE, TEAL, arrow, box, picture, text

from phalanx.schedule import gossip_partners, gossip_period

RANKS = 8
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gossip_speed.jsonl"
COLOURS = {"gossip": AMBER, "all-reduce": BLUE, "DDP": ROSE, "decent-dp": TEAL}


def partners_picture() -> str:
    """Rings of ranks, one per step of two periods, with an arrow from each rank to the one it sends to."""
    period, radius, cell = gossip_period(RANKS), 62.0, 190.0
    parts = []
    for step in range(2 * period):
        row, column = divmod(step, period)
        x, y = 30 + column * cell + cell / 2, 60 + row * (cell + 26) + cell / 2 - 8
        parts.append(text(x, y - radius - 26, f"step {step}: k = {column}", anchor="middle", bold=True))
        place = [(x + radius * math.sin(a), y - radius * math.cos(a)) for a in (2 * math.pi * r / RANKS for r in range(RANKS))]
        for rank, to in enumerate(gossip_partners(RANKS, step)):
            if to is not None:
                (x1, y1), (x2, y2) = place[rank], place[to]
                short = 13 / math.dist(place[rank], place[to])
                ends = (x1 + (x2 - x1) * short, y1 + (y2 - y1) * short, x2 - (x2 - x1) * short, y2 - (y2 - y1) * short)
                parts.append(arrow(*ends, stroke=AMBER if rank == 0 else FAINT))
        for rank, (px, py) in enumerate(place):
            parts.append(box(px - 11, py - 11, 22, 22, AMBER if rank == 0 else BLUE, radius=11))
            parts.append(text(px, py + 4.5, str(rank), size=12, fill="#ffffff", anchor="middle", bold=True))
    parts.append(text(30, 30, "the first period: to rank r - 2^k", size=12, fill=INK))
    parts.append(text(30, 30 + cell + 26, "the second: the same on ranks that were shuffled", size=12, fill=INK))
    return picture(60 + period * cell, 60 + 2 * (cell + 26), "Who sends to whom in six steps of gossip among 8 ranks", parts)


def diffusion_picture() -> str:
    """How much of rank 0's update is in which replica, after each step of one period."""
    share = [1.0 if rank == 0 else 0.0 for rank in range(RANKS)]
    rows = [("its own update", share)]
    for step in range(gossip_period(RANKS)):
        sends = gossip_partners(RANKS, step)
        mixed = [own / 2 for own in share]
        for rank, to in enumerate(sends):
            mixed[rank if to is None else to] += share[rank] / 2
        share = mixed
        rows.append((f"after step {step}", share))
    width, height, left = 52.0, 34.0, 150.0
    parts = [text(left + rank * width + width / 2, 32, f"rank {rank}", size=12, anchor="middle") for rank in range(RANKS)]
    for i, (name, shares) in enumerate(rows):
        y = 44 + i * (height + 6)
        parts.append(text(24, y + 22, name, size=13))
        for rank, part in enumerate(shares):
            parts.append(box(left + rank * width + 3, y, width - 6, height, AMBER if part else GREY))
            if part:
                words = "1" if part == 1 else f"1/{round(1 / part)}"
                parts.append(text(left + rank * width + width / 2, y + 22, words, size=12, anchor="middle", bold=True))
    return picture(left + RANKS * width + 24, 56 + len(rows) * (height + 6), "How one rank's update spreads over 8 ranks", parts)


def efficiency_picture() -> str:
    """The share of a step that is computation, over the number of ranks, a line for each contender."""
    found: dict[str, dict[int, float]] = {}
    ranks = 0
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        ranks = record["config"]["ranks"] if "config" in record else ranks
        if "efficiency" in record and record["contender"] in COLOURS:
            found.setdefault(record["contender"], {})[ranks] = record["efficiency"]
    worlds = sorted({n for points in found.values() for n in points})
    left, top, width, height = 64.0, 46.0, 420.0, 220.0

    def place(n: int, efficiency: float) -> tuple[float, float]:
        return left + width * (0.06 + 0.88 * worlds.index(n) / (len(worlds) - 1)), top + height * (1 - efficiency)

    parts = [text(24, 28, "efficiency: computation / step", size=13, bold=True)]
    for tenths in range(0, 11, 2):
        y = top + height * (1 - tenths / 10)
        parts.append(box(left, y - 0.5, width, 1, GREY, radius=0))
        parts.append(text(left - 8, y + 4, f"{10 * tenths} %", size=11, fill=FAINT, anchor="end"))
    parts += [text(place(n, 0)[0], top + height + 20, f"{n} ranks", size=12, anchor="middle") for n in worlds]
    ends = sorted((place(worlds[-1], points[worlds[-1]])[1], name) for name, points in found.items())
    below = 0.0
    for y, name in ends:
        points = [place(n, found[name][n]) for n in sorted(found[name])]
        line_ = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{line_}" fill="none" stroke="{COLOURS[name]}" stroke-width="2.4"/>')
        parts += [box(px - 4, py - 4, 8, 8, COLOURS[name], radius=4) for px, py in points]
        below = max(y + 4, below + 16)  # names of lines that meet stand one below the other
        share = f"{name}, {found[name][worlds[-1]]:.0%}"
        parts.append(text(left + width + 10, below, share, size=12, fill=COLOURS[name], bold=True))
    return picture(
        left + width + 150, top + height + 40, "Efficiency of gossip and of all-reduce over the number of ranks", parts
    )


def pictures() -> dict[str, str]:
    """All of them, by the name of their file."""
    return {
        "gossip_partners": partners_picture(),
        "gossip_diffusion": diffusion_picture(),
        "gossip_efficiency": efficiency_picture(),
    }


if __name__ == "__main__":
    for name, svg in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(svg, encoding="utf-8")
