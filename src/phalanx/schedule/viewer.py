"""An interactive, self-contained HTML page that shows the chunks of a schedule fill up as contributions arrive.

The page holds the messages as data and a script that replays them, so it stays small. It loads nothing from elsewhere, and its
policy does not let the browser do so. Names and labels are inserted as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources

from .lower import lower
from .markup import Markup, tag
from .ops import Move, Scale, Schedule, ScheduleError, Step
from .printable import one_line
from .traffic import lowered_ops
from .verify import verify

MAX_MESSAGES = 4096  # of the lowered schedule; a page stays below 200 kB
MAX_CELLS = 16384  # chunks of all ranks together
MAX_SIZE = 200_000  # bytes of a page


def _own(name: str) -> Markup:
    return Markup(resources.files("phalanx.schedule").joinpath(name).read_text("utf-8"))


SCRIPT, STYLE = _own("viewer.js"), _own("viewer.css")
SCRIPT_HASH = f"sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}"


def to_html(s: Schedule, *, nbytes: int = 64 << 20) -> str:
    """Draw a schedule as an HTML page: play it, or drag the slider, and see the chunks of every rank fill up.

    A torus and a hierarchical schedule are drawn as a grid, hosts down and their ranks across; others one rank per line. The last
    step shows whether `verify` proves the claim.

    Args:
        s: The schedule. Collectives are drawn as the messages of `lower(s)`.
        nbytes: The size of the buffer, for the bytes of each link.

    Returns:
        A page that needs no other file and no network.

    Raises:
        ScheduleError: If an op is invalid, or the schedule is too large to draw.

    Example:
        >>> page = phalanx.schedule.to_html(phalanx.torus(2, 3))
        >>> page.startswith("<!DOCTYPE html>"), len(page) < 200_000
        (True, True)
    """
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{SCRIPT_HASH}'; form-action 'none'; base-uri 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", one_line(s.name)),
        tag("style", STYLE, Markup(":root{color-scheme:light dark}body{margin:0;background:light-dark(#fff,#12161c)}")),
    )
    page = "<!DOCTYPE html>\n" + tag("html", head, tag("body", draw(s, nbytes=nbytes), tag("script", SCRIPT)), lang="en") + "\n"
    if len(page.encode()) > MAX_SIZE:
        raise ScheduleError(f"{one_line(s.name)}: a page of {len(page.encode()):,} bytes; at most {MAX_SIZE:,} are drawn")
    return page


def draw(s: Schedule, *, nbytes: int = 64 << 20, start: str = "begin") -> Markup:
    """The part of a page for one schedule. It needs `STYLE` before it and `SCRIPT` after it."""
    if s.world * s.chunks > MAX_CELLS or lowered_ops(s) > MAX_MESSAGES:
        raise ScheduleError(
            f"{one_line(s.name)}: {s.world:,} ranks of {s.chunks:,} chunks and {lowered_ops(s):,} messages are too many to draw;"
            f" at most {MAX_CELLS:,} chunks in all and {MAX_MESSAGES:,} messages"
        )
    proved, proof = _proof(s)
    data = {
        "world": s.world,
        "chunks": s.chunks,
        "columns": _columns(s),
        "bytes": nbytes,
        "steps": [_step(step) for step in lower(s).steps],
        "proved": proved,
        "proof": proof,
        "start": start,
    }
    words = f"{s.world} ranks, {s.chunks} chunks each, goal: {s.goal}"
    text = json.dumps(data, separators=(",", ":"))
    return tag("div", tag("h2", one_line(s.name)), tag("p", words), class_="pv", data_schedule=text)


def notebook(s: Schedule) -> str:
    """The page in a frame for notebooks, so that its script cannot access the notebook."""
    try:
        page = to_html(s)
    except ScheduleError as error:
        return tag("pre", one_line(str(error)))
    lines = s.world if _columns(s) == 1 else -(-s.world // _columns(s))
    height = min(900, 260 + 62 * lines)
    return (
        tag(
            "iframe", srcdoc=page, sandbox="allow-scripts", style=f"width:100%;height:{height}px;border:0", title=one_line(s.name)
        )
        + ""
    )


def _proof(s: Schedule) -> tuple[bool, str]:
    """Whether `s` does what it claims, and the text for the last step."""
    try:
        verify(s, bitwise=s.goal != "mixing")
    except ScheduleError as error:
        try:
            verify(s)
        except ScheduleError as wrong:
            return False, one_line(str(wrong))
        return True, f"proved: goal {s.goal}; but {one_line(str(error))}"
    return True, f"proved: goal {s.goal}{'' if s.goal == 'mixing' else ', equal bits on all ranks'}"


def _columns(s: Schedule) -> int:
    """How many ranks to draw side by side: those of a host if the name tells, else one."""
    found = re.match(r"(?:torus|hierarchical)\((?:\d+x)*(\d+)x(\d+)[,)]", s.name)
    columns = int(found.group(2)) if found else 1
    return columns if 1 <= columns <= 16 and s.world % columns == 0 else 1


def _step(step: Step) -> dict[str, object]:
    moves = [
        [op.src, op.dst, [[run.start, run.stop] for run in op.runs], int(op.reduce)] for op in step.ops if isinstance(op, Move)
    ]
    factors = sorted({op.factor for op in step.ops if isinstance(op, Scale)})
    made: dict[str, object] = {"label": one_line(step.label), "moves": moves}
    if factors:
        made["scales"] = f"some ranks multiply by {', '.join(map(str, factors[:4]))}"
    return made
