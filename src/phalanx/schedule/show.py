"""Pictures of schedules: a rank x step grid for terminals, and a trace for chrome://tracing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from .describe import describe, members, span, spans
from .ops import Collective, Move, Op, Recode, Schedule, Step

SHORT = {"all_reduce": "AR", "reduce_scatter": "RS", "all_gather": "AG", "reduce": "R", "broadcast": "B"}
LEGEND = {
    "RS": "RS 0-5 {0 1} → 0-2   reduce-scatter of chunks 0-5 by ranks 0 and 1; this rank keeps the sums of 0-2",
    "AR": "AR 0-5 {0 1}         all-reduce of chunks 0-5 by ranks 0 and 1",
    "AG": "0-2 → AG 0-5 {0 1}   all-gather of chunks 0-5 by ranks 0 and 1; this rank brings 0-2",
    "R": "R 0-5 {0 1}          reduce of chunks 0-5 by ranks 0 and 1; the first gets the sums",
    "B": "B 0-5 {0 1}          broadcast of chunks 0-5 by ranks 0 and 1; the first gives",
    "→": "4→1   sends chunk 4 to rank 1",
    "+": "+3←2  adds chunk 3 of rank 2 to its own",
    "=": "=3←2  takes chunk 3 of rank 2 for its own",
    "+*": "+3←2*1/2  adds chunk 3 of rank 2 times 1/2 to its own",
    "=*": "=3←2*1/2  takes chunk 3 of rank 2 times 1/2 for its own",
    "q": "q3    encodes its chunk 3, which rounds it",
    "x": "x3    decodes its chunk 3",
    "'": "4'→1  the same, encoded; +3'←2 decodes and adds",
    "*": "0*1/2 multiplies its chunk 0 by 1/2",
    ".": ".     nothing to do",
}


def show(s: Schedule, *, width: int = 100, max_ranks: int = 16, max_steps: int = 64) -> str:
    """Draw a schedule as a grid: ranks down, steps across, with a legend.

    Args:
        s: The schedule to draw.
        width: The maximum line length, if the cells allow it.
        max_ranks: Show the first and last ranks of a larger world. A line names those left out.
        max_steps: Show the first and last steps of a longer schedule.

    Returns:
        The picture as text.

    Example:
        >>> print(phalanx.schedule.show(phalanx.schedule.lower(phalanx.ring(2))))
        ring(2): 2 ranks, 2 chunks, 2 steps, goal: sum
        ...
    """
    ranks, hidden_ranks = _ends(s.world, max_ranks)
    numbers, hidden_steps = _ends(len(s.steps), max_steps)
    marks: set[str] = set()
    columns = [_column(number + 1, s.steps[number], ranks, marks) for number in numbers]
    names = [f"rank {rank}" for rank in ranks]
    lines = [_summary(s)]
    hidden = [f"ranks {span(hidden_ranks)}"] if hidden_ranks else []
    hidden += [f"steps {span(range(hidden_steps.start + 1, hidden_steps.stop + 1))}"] if hidden_steps else []
    if hidden:
        lines += [f"not shown: {', '.join(hidden)}"]
    for block in _blocks(columns, width - max(map(len, names))):
        lines += ["", *_render(block, names, hidden_ranks)]
    if marks:
        lines += ["", *(line for mark, line in LEGEND.items() if mark in marks)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _summary(s: Schedule) -> str:
    def count(number: int, noun: str) -> str:
        return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

    goal = f"copy of rank {s.root}" if s.goal == "copy" else s.goal
    return f"{s.name}: {count(s.world, 'rank')}, {count(s.chunks, 'chunk')}, {count(len(s.steps), 'step')}, goal: {goal}"


def _ends(count: int, limit: int) -> tuple[list[int], range]:
    """The first and last of `count` numbers, `limit` in total, and the range between them."""
    if count <= limit:
        return list(range(count)), range(0)
    last = limit // 4
    hidden = range(limit - last, count - last)
    return [*range(hidden.start), *range(hidden.stop, count)], hidden


def _column(number: int, step: Step, ranks: list[int], marks: set[str]) -> list[str]:
    """The cells of one step, under its number and label: what a rank sends, then what it receives."""
    gives: dict[int, list[str]] = defaultdict(list)
    gets: dict[int, list[str]] = defaultdict(list)
    shown = set(ranks)
    for op in step.ops:
        if isinstance(op, Move) and op.coded and (op.src in shown or op.dst in shown):
            marks.add("'")
        for rank, mark, text in _words(op):
            if rank in shown:
                (gives if mark == "→" else gets)[rank].append(text)
                marks.add(mark)
    margin = max(len(" ".join(gives[rank])) for rank in ranks)
    body = [" ".join([" ".join(gives[rank]).ljust(margin), *gets[rank]]).strip() or "." for rank in ranks]
    if not margin:
        body = [" ".join(gets[rank]) or "." for rank in ranks]
    if "." in body:
        marks.add(".")
    return [f"{number} {step.label}".rstrip(), *body]


def _words(op: Op) -> Iterator[tuple[int, str, str]]:
    """For every rank in `op`, yield the rank, its legend key and its text in the cell."""
    if isinstance(op, Move):
        chunks, sign = f"{spans(op.chunks, limit=4)}{chr(39) * op.coded}", "+" if op.reduce else "="
        yield op.src, "→", f"{chunks}→{op.dst}"
        factor = "" if op.factor == 1 else f"*{op.factor}"
        yield op.dst, sign + factor[:1], f"{sign}{chunks}←{op.src}{factor}"
    elif isinstance(op, Collective):
        short = SHORT[op.kind]
        text = f"{short} {span(op.chunks)} {{{members(op.group, limit=4)}}}"
        length = len(op.chunks) // len(op.group)
        for i, rank in enumerate(op.group):
            part = span(op.chunks[i * length : (i + 1) * length])
            yield rank, short, {"RS": f"{text} → {part}", "AG": f"{part} → {text}"}.get(short, text)
    elif isinstance(op, Recode):
        for rank in op.ranks:
            yield rank, "q" if op.coded else "x", f"{'q' if op.coded else 'x'}{span(op.chunks)}"
    else:
        for rank in op.ranks:
            yield rank, "*", f"{span(op.chunks)}*{op.factor}"


def _blocks(columns: list[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Split the columns into blocks that fit the width."""
    block: list[list[str]] = []
    used = 0
    for column in columns:
        needed = 3 + _cell_width(column)
        if block and used + needed > width:
            yield block
            block, used = [], 0
        block.append(column)
        used += needed
    if block:
        yield block


def _cell_width(column: list[str]) -> int:
    return max(12, *map(len, column[1:]))


def _render(block: list[list[str]], names: list[str], hidden: range) -> list[str]:
    widths = [_cell_width(column) for column in block]
    heads = [wrap(column[0], width) for column, width in zip(block, widths, strict=True)]
    height = max(map(len, heads))
    rows = [[head[i] if i < len(head) else "" for head in heads] for i in range(height)]
    rows += [[column[1 + i] for column in block] for i in range(len(names))]
    margin = max(map(len, names))
    first = [""] * height + names
    lines = [
        " | ".join([name.ljust(margin), *(cell.ljust(width) for cell, width in zip(row, widths, strict=True))])
        for name, row in zip(first, rows, strict=True)
    ]
    lines.insert(height, "-+-".join("-" * width for width in [margin, *widths]))
    if hidden:
        lines.insert(height + 1 + hidden.start, " | ".join([".." + " " * (margin - 2), *(".." + " " * (w - 2) for w in widths)]))
    return lines


def trace(s: Schedule) -> str:
    """Draw a schedule as a Chrome trace, for chrome://tracing or ui.perfetto.dev.

    Args:
        s: The schedule to draw.

    Returns:
        JSON with one row per rank and 1 ms per step.

    Example:
        >>> import json
        >>> len(json.loads(phalanx.schedule.trace(phalanx.ring(2)))["traceEvents"])
        5
    """
    step_us = 1000
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": s.name}},
        *({"name": "thread_name", "ph": "M", "pid": 0, "tid": r, "args": {"name": f"rank {r}"}} for r in range(s.world)),
    ]
    for number, step in enumerate(s.steps):
        concerned: dict[int, list[str]] = defaultdict(list)
        for op in step.ops:
            for rank in dict.fromkeys(rank for rank, _, _ in _words(op)):
                concerned[rank].append(describe(op))
        for rank, ops in sorted(concerned.items()):
            event = {"name": step.label or f"step {number + 1}", "ph": "X", "pid": 0, "tid": rank}
            events.append({**event, "ts": number * step_us, "dur": step_us, "args": {"step": number + 1, "ops": ops}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
