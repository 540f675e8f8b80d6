"""Draws the pictures of the documentation: `python docs/images/draw.py` writes the SVGs beside this file.

torus.svg is computed from the schedule that runs, so it cannot say anything else; the others are drawn from the few numbers here.
Every picture has a light card behind it: an SVG in a page does not learn whether the page is dark.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

import phalanx
from phalanx.schedule import Collective, Schedule

INK, FAINT, CARD = "#1f2937", "#6b7280", "#fbfbfd"
BLUE, TEAL, AMBER, ROSE, GREY = "#4f6bd8", "#2a9d8f", "#e9a23b", "#d1495b", "#d5d9e2"


# ---- pieces of SVG -----------------------------------------------------------------------------------------------------------


def box(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none", radius: float = 3) -> str:
    """A rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="1.2"/>'
    )


def text(x: float, y: float, words: str, *, size: float = 13, fill: str = INK, anchor: str = "start", bold: bool = False) -> str:
    """One line of text."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, *, stroke: str = FAINT) -> str:
    """A line with a head."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="1.6" marker-end="url(#head)"/>'


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole SVG: the parts on their card."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
            'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>',
            box(0.5, 0.5, width - 1, height - 1, CARD, stroke="#e5e7eb", radius=10),
            *parts,
            "</svg>\n",
        ]
    )


# ---- the torus, from its schedule --------------------------------------------------------------------------------------------

State = list[list[frozenset[int]]]  # of every rank and chunk: whose contributions are in it


def states(s: Schedule) -> list[State]:
    """What every rank holds at the start and after each step of a schedule of collectives."""
    now: State = [[frozenset([rank])] * s.chunks for rank in range(s.world)]
    seen = [now]
    for step in s.steps:
        then = [list(row) for row in now]
        for op in step.ops:
            assert isinstance(op, Collective)
            length = len(op.chunks) // len(op.group)
            for at, chunk in enumerate(op.chunks):
                total = frozenset().union(*(now[rank][chunk] for rank in op.group))
                owner = op.group[min(at // length, len(op.group) - 1)]
                for rank in op.group:
                    if op.kind == "all_reduce" or (op.kind == "reduce_scatter" and rank == owner):
                        then[rank][chunk] = total
                    elif op.kind == "all_gather":
                        then[rank][chunk] = now[owner][chunk]
        seen.append(then)
        now = then
    assert all(chunk == frozenset(range(s.world)) for row in now for chunk in row)
    return seen


def torus(rows: int, cols: int) -> str:
    """Panels, one for each moment; in a panel hosts are rows, and a bar is a chunk: the darker, the more ranks are in it."""
    s = phalanx.torus(rows, cols)
    heads = ["every rank has its own gradient", *(f"{i}. {step.label}" for i, step in enumerate(s.steps, 1))]
    shades = ["#dbe1f7", "#c3cdf1", "#9fafe8", "#7d92df", "#5f79d6", "#3a53bd"]
    across, down, left = 92, 74, 24
    panel = cols * across + 26
    parts: list[str] = []
    for number, (state, head) in enumerate(zip(states(s), heads)):
        x0, y0 = left + (number % 2) * (panel + 64), 30 + (number // 2) * (rows * down + 46)
        parts.append(text(x0 + 18, y0, head, bold=True))
        for rank in range(s.world):
            row, col = divmod(rank, cols)
            x, y = x0 + 18 + col * across, y0 + 14 + row * down
            if col == 0:
                parts.append(box(x - 6, y - 2, cols * across - 4, down - 8, "none", stroke="#c9cedb", radius=6))
                parts.append(
                    f'<text x="{x - 12:g}" y="{y + 33:g}" font-size="11" fill="{FAINT}" text-anchor="middle" '
                    f'transform="rotate(-90 {x - 12:g} {y + 33:g})">host {row}</text>'
                )
            parts.append(text(x + 37, y + 15, f"rank {rank}", size=11, fill=FAINT, anchor="middle"))
            for chunk, origins in enumerate(state[rank]):
                share = len(origins)
                fill = shades[min(len(shades) - 1, round((share - 1) / (s.world - 1) * (len(shades) - 1)))]
                parts.append(box(x + chunk * 12.6, y + 22, 11, 32, fill, radius=2))
                dark = share > s.world // 2
                parts.append(
                    text(x + chunk * 12.6 + 5.5, y + 42, str(share), size=9, fill="white" if dark else INK, anchor="middle")
                )
    width = left + 2 * panel + 64
    height = 30 + 2 * (rows * down + 46) - 8
    parts.append(text(42, height - 14, "the number in a chunk: how many ranks' contributions it holds", size=12, fill=FAINT))
    return picture(width, height, f"torus({rows}, {cols}): what every rank holds after each step", parts)


# ---- time: what travels while backward runs ----------------------------------------------------------------------------------


def overlap() -> str:
    """A step in which communication waits for backward, and one in which it does not."""
    parts: list[str] = []
    left, unit, tall = 170, 54, 26

    def lane(y: float, name: str, blocks: list[tuple[float, float, str, str]]) -> None:
        parts.append(text(left - 14, y + 17, name, size=12, fill=FAINT, anchor="end"))
        for begin, length, words, fill in blocks:
            parts.append(box(left + begin * unit, y, length * unit - 2, tall, fill))
            ink = "white" if fill != GREY else INK
            parts.append(text(left + (begin + length / 2) * unit - 1, y + 17, words, size=11.5, fill=ink, anchor="middle"))

    parts.append(text(20, 30, "One after the other", bold=True))
    lane(44, "compute", [(0, 2, "forward", BLUE), (2, 4, "backward", BLUE), (9.6, 0.9, "update", TEAL)])
    lane(74, "communicate", [(6, 1.2, "group 0", AMBER), (7.2, 1.2, "group 1", AMBER), (8.4, 1.2, "group 2", AMBER)])
    parts.append(text(20, 138, "Phalanx: a group of gradients leaves when its last one is there", bold=True))
    lane(152, "compute", [(0, 2, "forward", BLUE), (2, 4, "backward", BLUE), (6, 1.2, "wait", GREY), (7.2, 0.9, "update", TEAL)])
    lane(182, "communicate", [(3.4, 1.2, "group 0", AMBER), (4.7, 1.2, "group 1", AMBER), (6, 1.2, "group 2", AMBER)])
    parts.append(arrow(left, 226, left + 10.6 * unit, 226))
    parts.append(text(left + 10.6 * unit, 244, "time", size=12, fill=FAINT, anchor="end"))
    return picture(left + 11 * unit, 258, "gradients travel while backward runs", parts)


# ---- data: which rank trains which sample ------------------------------------------------------------------------------------


def samples() -> str:
    """Two ways to share the samples of an epoch between two ranks."""
    parts: list[str] = []
    size, gap, n, colours = 23, 4, 24, (BLUE, TEAL)

    def row(y: float, owners: list[int | None], cut: int) -> None:
        for place, owner in enumerate(owners):
            x = 24 + place * (size + gap) + (place // cut) * 10
            parts.append(box(x, y, size, size, GREY if owner is None else colours[owner]))
            parts.append(text(x + size / 2, y + 16, str(place), size=10.5, fill="white", anchor="middle"))

    parts.append(text(24, 30, "Loader(source, comm, batch=8): every batch is shared out, in the order of the epoch", bold=True))
    row(44, [(place % 8) // 4 for place in range(n)], 8)
    parts.append(
        text(24, 86, "step 0 is places 0-7, step 1 is 8-15 ...; the same steps on 1, 2, 4 or 8 ranks", size=12, fill=FAINT)
    )
    parts.append(text(24, 128, "scatter_dataset(dataset, comm, shuffle=True): every rank has its own part", bold=True))
    row(142, [place // 12 for place in range(n)], 12)
    parts.append(
        text(24, 184, "then torch's DataLoader makes batches of it; rank 0 never sees what rank 1 has", size=12, fill=FAINT)
    )
    for number, (name, colour) in enumerate(zip(("rank 0", "rank 1"), colours)):
        parts.append(box(24 + number * 90, 206, 14, 14, colour))
        parts.append(text(44 + number * 90, 218, name, size=12))
    return picture(24 + n * (size + gap) + 3 * 10 + 14, 238, "two ways to share samples", parts)


# ---- from one process to several hosts ---------------------------------------------------------------------------------------


def journey() -> str:
    """One script: alone, on one host, on several."""
    parts: list[str] = []

    def host(x: float, ranks: int, name: str) -> None:
        parts.append(box(x, 58, 64 + 44 * (ranks - 1), 84, "#eef1f8", stroke="#c9cedb", radius=8))
        parts.append(text(x + 32 + 22 * (ranks - 1), 78, name, size=11.5, fill=FAINT, anchor="middle"))
        for rank in range(ranks):
            parts.append(box(x + 14 + 44 * rank, 90, 36, 36, BLUE, radius=6))
            parts.append(text(x + 32 + 44 * rank, 113, "rank", size=10.5, fill="white", anchor="middle"))

    parts.append(text(24, 34, "python train.py", bold=True))
    host(36, 1, "alone")
    parts.append(arrow(140, 100, 186, 100))
    parts.append(text(206, 34, "torchrun --nproc-per-node 3", bold=True))
    host(206, 3, "one host")
    parts.append(arrow(378, 100, 424, 100))
    parts.append(text(444, 34, "torchrun --nnodes 2, mpirun, srun, a PyTorchJob", bold=True))
    host(444, 3, "host 0")
    host(640, 3, "host 1")
    parts.append(arrow(600, 100, 636, 100))
    parts.append(arrow(636, 116, 600, 116))
    parts.append(text(444, 162, "torus(2, 3): inside hosts, then between them", size=12, fill=FAINT))
    return picture(826, 182, "one script: alone, on one host, on several", parts)


def pictures() -> dict[str, str]:
    """All of them by name."""
    return {"torus": torus(2, 3), "overlap": overlap(), "samples": samples(), "journey": journey()}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (Path(__file__).parent / f"{name}.svg").write_text(svg, encoding="utf-8")
