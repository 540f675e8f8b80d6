"""The interpreter that the checker runs: a schedule on any values that add, scale, and may be junk.

Speed comes from *atoms*: adjacent chunks that all ops so far treated alike are one entry of a rank's list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any, Generic, Protocol, TypeVar, cast

from .ops import Collective, Move, Recode, Schedule, Step


class _Adds(Protocol):
    def __add__(self, other: Any, /) -> Any: ...


V = TypeVar("V", bound=_Adds)


class Buffers(Generic[V]):
    """What every slot holds: rows[rank][atom], where atom i is the run of chunks that begins at starts[i]."""

    def __init__(self, chunks: int, origins: list[V]) -> None:
        self.chunks = chunks
        self.starts = [0]
        self.atom = {0: 0, chunks: 1}  # chunk boundary -> index of the atom that begins there
        self.rows = [[value] for value in origins]

    def refine(self, boundaries: set[int]) -> None:
        """Cut atoms until every one of `boundaries` is one."""
        fresh = boundaries - self.atom.keys()
        if not fresh:
            return
        cuts = [0] * len(self.starts)
        for boundary in fresh:
            cuts[bisect_right(self.starts, boundary) - 1] += 1
        self.starts = sorted([*self.starts, *fresh])
        self.atom = {boundary: i for i, boundary in enumerate([*self.starts, self.chunks])}
        for row in self.rows:
            finer: list[V] = []
            for value, more in zip(row, cuts, strict=True):
                finer += [value] * (1 + more)
            row[:] = finer


def interpret(s: Schedule, origins: list[V], scale: Callable[[V, Fraction], V], junk: Callable[[], V]) -> Buffers[V]:
    """Run the well-formed `s` from rank r holding origins[r] in every slot."""
    state = Buffers(s.chunks, origins)
    for step in s.steps:
        run_step(state, step, scale, junk, lambda value, coded: value)
    return state


def run_step(
    state: Buffers[V],
    step: Step,
    scale: Callable[[V, Fraction], V],
    junk: Callable[[], V],
    recode: Callable[[V, bool], V],
) -> None:
    """Run one step in place. `recode(value, coded)` is what encoding or decoding makes of a value."""
    if set(map(type, step.ops)) == {Move}:
        _run_moves(state, cast("tuple[Move, ...]", step.ops))
    elif step.ops:
        _run_mixed(state, step, scale, junk, recode)


def _run_moves(state: Buffers[V], moves: tuple[Move, ...]) -> None:
    """All read, then all write; one-atom moves, the bulk of a lowered schedule, without slices."""
    starts, stops = [m.chunks.start for m in moves], [m.chunks.stop for m in moves]
    state.refine({*starts, *stops})
    rows, atom = state.rows, state.atom
    begins, ends = [atom[start] for start in starts], [atom[stop] for stop in stops]
    if sum(ends) - sum(begins) == len(moves):  # every range holds at least one atom, so each holds exactly one
        values = [rows[m.src][i] for m, i in zip(moves, begins, strict=True)]
        for m, i, value in zip(moves, begins, values, strict=True):
            row = rows[m.dst]
            row[i] = row[i] + value if m.reduce else value
    else:
        slices = [rows[m.src][i:j] for m, i, j in zip(moves, begins, ends, strict=True)]
        for m, i, j, part in zip(moves, begins, ends, slices, strict=True):
            row = rows[m.dst]
            row[i:j] = map(add, row[i:j], part) if m.reduce else part


def _run_mixed(
    state: Buffers[V],
    step: Step,
    scale: Callable[[V, Fraction], V],
    junk: Callable[[], V],
    recode: Callable[[V, bool], V],
) -> None:
    """All ops read, then the moves write, then the others, which share no written slot with the moves."""
    state.refine(boundaries(step))
    rows, atom = state.rows, state.atom
    moves = tuple(op for op in step.ops if isinstance(op, Move))
    writes: list[tuple[int, int, list[V]]] = []  # rank, first atom, values
    for op in step.ops:
        i, j = atom[op.chunks.start], atom[op.chunks.stop]
        if isinstance(op, Collective):
            writes += _collective_writes(op, [rows[rank][i:j] for rank in op.group], i, state, junk)
        elif isinstance(op, Recode):
            writes += [(rank, i, [recode(value, op.coded) for value in rows[rank][i:j]]) for rank in op.ranks]
        elif not isinstance(op, Move):
            writes += [(rank, i, [scale(value, op.factor) for value in rows[rank][i:j]]) for rank in op.ranks]
    if moves:
        _run_moves(state, moves)
    for rank, i, values in writes:
        rows[rank][i : i + len(values)] = values


def boundaries(step: Step) -> set[int]:
    """The chunks at which the ops of a step begin and end, parts of collectives included."""
    found: set[int] = set()
    for op in step.ops:
        found.update((op.chunks.start, op.chunks.stop))
        if isinstance(op, Collective) and op.kind in ("reduce_scatter", "all_gather"):
            found.update(op.chunks[:: len(op.chunks) // len(op.group)])
    return found


def _collective_writes(
    op: Collective, held: list[list[V]], first: int, state: Buffers[V], junk: Callable[[], V]
) -> Iterable[tuple[int, int, list[V]]]:
    """What `op` leaves in its ranks, which held `held` in the atoms from `first` on."""
    group, width = op.group, len(held[0])
    if op.kind == "broadcast":
        return [(rank, first, held[0]) for rank in group]
    if op.kind == "all_gather":
        bounds = _part_bounds(op, first, state)
        gathered = [value for row, (i, j) in zip(held, bounds, strict=True) for value in row[i:j]]
        return [(rank, first, gathered) for rank in group]
    total = reduce(lambda left, right: list(map(add, left, right)), held)
    if op.kind == "all_reduce":
        return [(rank, first, total) for rank in group]
    kept = [(0, width), *[(0, 0)] * (len(group) - 1)] if op.kind == "reduce" else _part_bounds(op, first, state)
    return [
        (rank, first, [*(junk() for _ in range(i)), *total[i:j], *(junk() for _ in range(j, width))])
        for rank, (i, j) in zip(group, kept, strict=True)
    ]


def _part_bounds(op: Collective, first: int, state: Buffers[V]) -> list[tuple[int, int]]:
    """Where part i of `op` begins and ends, in atoms counted from `first`."""
    length = len(op.chunks) // len(op.group)
    edges = [state.atom[chunk] - first for chunk in range(op.chunks.start, op.chunks.stop + 1, length)]
    return list(pairwise(edges))
