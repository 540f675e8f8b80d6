"""Build schedules from schedules: run them in sequence, or renumber the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain as concatenate
from math import lcm

from .ops import Collective, Goal, Move, Op, Schedule, Step
from .runs import runs


def chain(schedules: Sequence[Schedule], *, goal: Goal, name: str | None = None) -> Schedule:
    """Run schedules one after the other, with a claim about the whole.

    Args:
        schedules: Schedules of one world size. Their chunks are cut as finely as needed.
        goal: What the whole claims.
        name: The name of the result. The default is the names joined by ` + `.

    Returns:
        One schedule.

    Raises:
        ValueError: If there is no schedule, or world sizes differ.

    Example:
        >>> rounds = [phalanx.schedule.gossip(8, k) for k in range(3)]
        >>> phalanx.schedule.verify(phalanx.schedule.chain(rounds, goal="mean"))
    """
    if not schedules:
        raise ValueError("chain([]): nothing to chain; give at least 1 schedule")
    first = schedules[0]
    for s in schedules:
        if s.world != first.world:
            raise ValueError(
                f"chain: {first.name} has {first.world} ranks and {s.name} has {s.world}; give schedules of one world size"
            )
    chunks = lcm(*(s.chunks for s in schedules))
    steps = tuple(concatenate.from_iterable(_with_chunks(s, chunks).steps for s in schedules))
    return Schedule(name or " + ".join(s.name for s in schedules), first.world, chunks, steps, goal, first.root)


def relabel(s: Schedule, ranks: Sequence[int]) -> Schedule:
    """Give the role of rank i to rank `ranks[i]`.

    Args:
        s: The schedule.
        ranks: A permutation of its ranks.

    Returns:
        The same algorithm with other rank numbers.

    Raises:
        ValueError: If `ranks` is not a permutation of the schedule's ranks.

    Example:
        >>> phalanx.schedule.relabel(phalanx.schedule.binomial(2), [1, 0]).root
        1
    """
    if sorted(ranks) != list(range(s.world)):
        raise ValueError(f"relabel: {list(ranks)} is not a permutation of the ranks 0 to {s.world - 1} of {s.name}")

    def played(op: Op) -> tuple[Op, ...]:
        if isinstance(op, Move):
            return (replace(op, src=ranks[op.src], dst=ranks[op.dst]),)
        if isinstance(op, Collective):
            return (replace(op, group=tuple(ranks[rank] for rank in op.group)),)
        return tuple(replace(op, ranks=run) for run in runs(ranks[rank] for rank in op.ranks))

    steps = tuple(Step(tuple(concatenate.from_iterable(map(played, step.ops))), step.label) for step in s.steps)
    return replace(s, steps=steps, root=ranks[s.root])


def _with_chunks(s: Schedule, chunks: int) -> Schedule:
    """Cut every chunk of a schedule into chunks / s.chunks parts."""
    factor = chunks // s.chunks
    if factor == 1:
        return s

    def finer(op: Op) -> Op:
        runs = tuple(range(run.start * factor, run.stop * factor) for run in op.runs)
        return replace(op, chunks=runs) if isinstance(op, Move) else replace(op, chunks=runs[0])

    return replace(s, chunks=chunks, steps=tuple(Step(tuple(map(finer, step.ops)), step.label) for step in s.steps))
