"""Ops in a few words, for error messages and pictures."""

from __future__ import annotations

from typing import cast

from .ops import Chunks, Collective, Move, Op, Recode


def describe(op: Op) -> str:
    """Describe an op in a few words: `Move(0 -> 1, 4)`, `Collective(all_reduce of 0 1 2, 0-5)`."""
    if isinstance(op, Move):
        factor = "" if op.factor == 1 else f", times {op.factor}"
        how = f"{', reduce' if op.reduce else ''}{factor}{', coded' if op.coded else ''}"
        return f"Move({op.src} -> {op.dst}, {spans(op.chunks)}{how})"
    if isinstance(op, Collective):
        return f"Collective({op.kind} of {members(op.group)}, {span(op.chunks)})"
    if isinstance(op, Recode):
        return f"{'Encode' if op.coded else 'Decode'}({span(op.ranks)}, {span(op.chunks)})"
    return f"Scale({span(op.ranks)}, {span(op.chunks)}, {op.factor})"


def span(part: range) -> str:
    """Format a run of numbers: `4`, `0-5`."""
    if not isinstance(cast(object, part), range) or part.step != 1 or len(part) == 0:
        return f"{part!s:.80}"
    return str(part.start) if len(part) == 1 else f"{part.start}-{part[-1]}"


def spans(chunks: Chunks, limit: int = 8) -> str:
    """Format chunks: `0-1,4,6-7`. The middle of many runs is left out."""
    if isinstance(chunks, range):
        return span(chunks)
    shown = [span(run) for run in chunks]
    return ",".join(shown if len(shown) <= limit else [*shown[: limit - 2], "..", shown[-1]]) or "nothing"


def members(group: tuple[int, ...], limit: int = 8) -> str:
    """Format the ranks of a group. The middle of a long group is left out."""
    shown = [str(rank) for rank in group]
    return " ".join(shown if len(shown) <= limit else [*shown[: limit - 2], "..", shown[-1]])
