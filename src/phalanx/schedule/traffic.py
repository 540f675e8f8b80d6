"""The machine-independent cost of a schedule: latency steps, and how much of the buffer each rank sends."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from .lower import lower
from .ops import Collective, Move, Schedule


def latency_steps(s: Schedule) -> int:
    """The number of consecutive messages: the steps of the lowered schedule that move data.

    Args:
        s: The schedule.

    Returns:
        The number of steps.

    Example:
        >>> phalanx.schedule.latency_steps(phalanx.ring(8)), phalanx.schedule.latency_steps(phalanx.torus(2, 4))
        (14, 8)
    """
    return sum(any(isinstance(op, Move) for op in step.ops) for step in lower(s).steps)


def sent(s: Schedule, counts: Callable[[int, int], bool] | None = None, *, code: Fraction = Fraction(1)) -> tuple[Fraction, ...]:
    """How much of the buffer each rank sends.

    Args:
        s: The schedule.
        counts: Counts only messages for which `counts(src, dst)` is true, for example those between hosts.
        code: The size of an encoded chunk, as a fraction of its size in full precision.

    Returns:
        One fraction per rank: 2 means the whole buffer twice.

    Example:
        >>> phalanx.schedule.sent(phalanx.ring(4))[0]
        Fraction(3, 2)
    """
    chunks = [Fraction()] * s.world
    for op in lower(s).ops():
        if isinstance(op, Move) and (counts is None or counts(op.src, op.dst)):
            chunks[op.src] += op.count * (code if op.coded else 1)
    return tuple(count / s.chunks for count in chunks)


def lowered_ops(s: Schedule) -> int:
    """The number of ops of `lower(s)`, without making them.

    Args:
        s: The schedule.

    Returns:
        The number of ops.

    Example:
        >>> phalanx.schedule.lowered_ops(phalanx.ring(4))
        24
    """
    count = 0
    for op in s.ops():
        if isinstance(op, Collective):
            size = len(op.group)
            ring = min(size, len(op.chunks)) * (size - 1)  # with fewer chunks than ranks, some ranks send nothing
            count += {"all_reduce": 2 * ring, "reduce_scatter": ring, "all_gather": ring}.get(op.kind, size - 1)
        else:
            count += 1
    return count
