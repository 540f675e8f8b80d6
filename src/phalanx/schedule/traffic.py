"""What a schedule costs before any machine is known: latency steps, and how much of the buffer each rank sends."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from .lower import lower
from .ops import Collective, Move, Schedule


def latency_steps(s: Schedule) -> int:
    """How many messages follow one another: the steps of the lowered schedule in which something moves."""
    return sum(any(isinstance(op, Move) for op in step.ops) for step in lower(s).steps)


def sent(s: Schedule, counts: Callable[[int, int], bool] | None = None) -> tuple[Fraction, ...]:
    """By rank, the part of the buffer it sends when lowered: 2 is the whole buffer twice. `counts(src, dst)` selects links."""
    chunks = [0] * s.world
    for op in lower(s).ops():
        if isinstance(op, Move) and (counts is None or counts(op.src, op.dst)):
            chunks[op.src] += len(op.chunks)
    return tuple(Fraction(count, s.chunks) for count in chunks)


def lowered_ops(s: Schedule) -> int:
    """How many ops `lower(s)` has, without making them."""
    count = 0
    for op in s.ops():
        if isinstance(op, Collective):
            size = len(op.group)
            ring = size * (size - 1)
            count += {"all_reduce": 2 * ring, "reduce_scatter": ring, "all_gather": ring}.get(op.kind, size - 1)
        else:
            count += 1
    return count
