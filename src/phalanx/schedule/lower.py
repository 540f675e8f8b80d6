"""Lowering: replace every `Collective` by the `Move`s of a ring or, for reduce and broadcast, of a chain.

A group of g ranks takes g-1 steps, and 2(g-1) for an all_reduce. Collectives of one step are on disjoint groups and advance
together: the t-th moves of all of them form one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, repeat, zip_longest

from .ops import Collective, Move, Op, Schedule, ScheduleError, Step


def lower(s: Schedule, *, keep: Callable[[Collective], bool] | None = None) -> Schedule:
    """Turn every `Collective` into the `Move`s of a ring or a chain.

    Args:
        s: The schedule. One that is already lowered is returned unchanged.
        keep: Keeps a collective if `keep(collective)` is true. A backend may have a faster way for some groups,
            such as shared memory for the ranks of one host.

    Returns:
        The same algorithm with only `Move` and `Scale` left, apart from what `keep` selects.

    Raises:
        ScheduleError: If the chunks of a reduce_scatter or all_gather do not divide over its ranks.

    Example:
        >>> s = phalanx.schedule.lower(phalanx.ring(4))
        >>> s.lowered, len(s.steps)
        (True, 6)
    """
    if s.lowered:
        return s
    return replace(s, steps=tuple(lower_steps(s, keep)))


def lower_steps(s: Schedule, keep: Callable[[Collective], bool] | None = None) -> Iterator[Step]:
    """The steps of `lower(s)`, one by one: a million moves take less time if only those of one step are in memory."""
    cut = _Cutter(s.name)
    return chain.from_iterable(_lower_step(step, cut, keep) for step in s.steps)


def plain_moves(s: Schedule, where: str) -> list[list[Move]]:
    """The messages of `lower(s)`, step by step, for a system that only sums: ScheduleError if they do more."""
    if s.goal != "sum":
        raise ScheduleError(f"{s.name} computes a {s.goal}; {where}'s allreduce is a sum")
    steps = lower(s).steps
    moves = [[op for op in step.ops if isinstance(op, Move) and op.factor == 1 and not op.coded] for step in steps]
    if sum(map(len, moves)) < sum(len(step.ops) for step in steps):
        raise ScheduleError(f"{s.name} scales or encodes, which {where} cannot do")
    return moves


def _lower_step(step: Step, cut: _Cutter, keep: Callable[[Collective], bool] | None) -> Iterator[Step]:
    collectives = [op for op in step.ops if isinstance(op, Collective) and not (keep and keep(op))]
    if not collectives:
        yield step
        return
    kept = {id(op) for op in collectives}
    plain = [op for op in step.ops if id(op) not in kept]
    count = max(_count(c) for c in collectives)
    rounds: Iterator[tuple[Op, ...]] = map(
        tuple, map(chain.from_iterable, zip_longest(*(_rounds(c, cut) for c in collectives), fillvalue=()))
    )
    # the other ops of the step read the state before it, so they run in the first round; they must not write what the
    # collectives touch, so the later rounds are not affected
    if plain:
        count, rounds = max(count, 1), chain([(*plain, *next(rounds, ()))], rounds)
    for t, ops in enumerate(rounds, start=1):
        yield Step(ops, f"{step.label} {t}/{count}".lstrip() if count > 1 else step.label)


def _count(c: Collective) -> int:
    """How many rounds `_rounds` yields."""
    return (2 if c.kind == "all_reduce" else 1) * (len(c.group) - 1)


def _rounds(c: Collective, cut: _Cutter) -> Iterator[Iterable[Op]]:
    """Yield the moves of one collective, round by round."""
    group, size = c.group, len(c.group)
    following = group[1:] + group[:1]
    if c.kind in ("all_reduce", "reduce_scatter"):
        parts = cut(c)
        for t in range(size - 1):  # rank i sends part i-t-1; the last part it receives is its own
            turn = size - t - 1
            yield _around(group, following, parts[turn:] + parts[:turn], reduce=True)
    if c.kind in ("all_reduce", "all_gather"):
        parts = cut(c)
        for t in range(size - 1):  # rank i sends part i-t: first its own, then what it has just received
            turn = (size - t) % size
            yield _around(group, following, parts[turn:] + parts[:turn], reduce=False)
    if c.kind == "reduce":
        for i in reversed(range(1, size)):
            yield (Move(group[i], group[i - 1], c.chunks, reduce=True),)
    if c.kind == "broadcast":
        for i in range(1, size):
            yield (Move(group[i - 1], group[i], c.chunks),)


def _around(senders: tuple[int, ...], receivers: tuple[int, ...], parts: tuple[range, ...], *, reduce: bool) -> Iterable[Op]:
    """One round of a ring. A rank whose part is empty has nothing to send."""
    if all(parts):
        return map(Move, senders, receivers, parts, repeat(reduce))
    return [Move(src, dst, part, reduce) for src, dst, part in zip(senders, receivers, parts, strict=True) if part]


class _Cutter:
    """Cuts the chunks of a collective into one part per rank. Equal parts share one object: there may be millions.

    The parts of an all_reduce have no owner, so their lengths may differ by one, or be zero.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: dict[tuple[range, int], tuple[range, ...]] = {}

    def __call__(self, c: Collective) -> tuple[range, ...]:
        size, count = len(c.group), len(c.chunks)
        if count % size and c.kind != "all_reduce":
            raise ScheduleError(
                f"{self.name}: {c.kind} of {count} chunks by {size} ranks cannot be cut into equal parts;"
                f" give the schedule a multiple of {size} chunks there"
            )
        if (c.chunks, size) not in self.parts:
            self.parts[c.chunks, size] = tuple(c.chunks[i * count // size : (i + 1) * count // size] for i in range(size))
        return self.parts[c.chunks, size]
