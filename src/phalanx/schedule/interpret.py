"""The interpreter that the checker runs: what every slot holds after a schedule, as an expression over the ranks' inputs.

Speed comes from *atoms*: adjacent chunks that all ops so far treated alike are one entry of a rank's list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import pairwise
from operator import attrgetter
from typing import cast

from .expressions import Expressions
from .ops import ONE, Collective, Move, Recode, Schedule, Step

# for steps of a million moves: no function of Python's is called for each of them
_src, _dst, _chunks, _reduce, _factor = map(attrgetter, ("src", "dst", "chunks", "reduce", "factor"))
_start, _stop = attrgetter("start"), attrgetter("stop")


class Buffers:
    """What every slot holds: rows[rank][atom], where atom i is the run of chunks that begins at starts[i]."""

    def __init__(self, chunks: int, origins: Iterable[int]) -> None:
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
            finer: list[int] = []
            for value, more in zip(row, cuts, strict=True):
                finer += [value] * (1 + more)
            row[:] = finer

    def atoms(self, runs: tuple[range, ...]) -> list[int]:
        """The atoms of several runs, whose boundaries are boundaries of atoms."""
        atom = self.atom
        return [i for run in runs for i in range(atom[run.start], atom[run.stop])]


def interpret(s: Schedule, terms: Expressions) -> Buffers:
    """Run the well-formed `s` from rank r holding its input in every slot. `terms` gets to know what it makes."""
    state = Buffers(s.chunks, range(s.world))
    for step in s.steps:
        if set(map(type, step.ops)) == {Move}:
            _run_moves(state, cast("tuple[Move, ...]", step.ops), terms)
        elif step.ops:
            _run_mixed(state, step, terms)
    return state


def _run_moves(state: Buffers, moves: tuple[Move, ...], terms: Expressions) -> None:
    """All read, then all write; one-atom moves, the bulk of a lowered schedule, without slices."""
    chunks = cast("list[range]", list(map(_chunks, moves)))
    if set(map(type, chunks)) != {range} or set(map(id, map(_factor, moves))) != {id(ONE)}:
        _run_scattered(state, moves, terms)
        return
    add = terms.add
    starts, stops = list(map(_start, chunks)), list(map(_stop, chunks))
    state.refine({*starts, *stops})
    rows, atom = state.rows, state.atom
    begins, ends = list(map(atom.__getitem__, starts)), list(map(atom.__getitem__, stops))
    if sum(ends) - sum(begins) == len(moves):  # every range holds at least one atom, so each holds exactly one
        values = [rows[src][i] for src, i in zip(map(_src, moves), begins, strict=True)]
        for dst, adds, i, value in zip(map(_dst, moves), map(_reduce, moves), begins, values, strict=True):
            row = rows[dst]
            row[i] = add(row[i], value) if adds else value
    else:
        slices = [rows[m.src][i:j] for m, i, j in zip(moves, begins, ends, strict=True)]
        for m, i, j, part in zip(moves, begins, ends, slices, strict=True):
            row = rows[m.dst]
            row[i:j] = map(add, row[i:j], part) if m.reduce else part


def _run_scattered(state: Buffers, moves: tuple[Move, ...], terms: Expressions) -> None:
    """The same where a message may carry several runs, and be multiplied."""
    distinct = {id(m.chunks): m.runs for m in moves}  # by identity: the moves of a step often share their chunks
    state.refine({edge for runs in distinct.values() for run in runs for edge in (run.start, run.stop)})
    places = {key: state.atoms(runs) for key, runs in distinct.items()}
    rows = state.rows
    values = [[rows[m.src][i] for i in places[id(m.chunks)]] for m in moves]
    scales: dict[int, Callable[[int], int]] = {}  # by identity: the moves of a step share their factors
    for m, part in zip(moves, values, strict=True):
        row, at = rows[m.dst], places[id(m.chunks)]
        if m.factor is not ONE:
            if id(m.factor) not in scales:
                scales[id(m.factor)] = terms.scaling(m.factor)
            part = list(map(scales[id(m.factor)], part))
        if m.reduce:
            part = [terms.add(row[i], value) for i, value in zip(at, part, strict=True)]
        for i, value in zip(at, part, strict=True):
            row[i] = value


def _run_mixed(state: Buffers, step: Step, terms: Expressions) -> None:
    """All ops read, then the moves write, then the others, which share no written slot with the moves."""
    state.refine(boundaries(step))
    rows, atom = state.rows, state.atom
    moves = tuple(op for op in step.ops if isinstance(op, Move))
    writes: list[tuple[int, int, list[int]]] = []  # rank, first atom, values
    for op in step.ops:
        if isinstance(op, Move):
            continue
        i, j = atom[op.chunks.start], atom[op.chunks.stop]
        if isinstance(op, Collective):
            writes += _collective_writes(op, [rows[rank][i:j] for rank in op.group], i, state, terms)
        elif isinstance(op, Recode):
            if op.coded:  # decoding computes nothing new: the code stands for the same numbers
                writes += [(rank, i, [terms.encode(value) for value in rows[rank][i:j]]) for rank in op.ranks]
        else:
            scale = terms.scaling(op.factor)
            writes += [(rank, i, [scale(value) for value in rows[rank][i:j]]) for rank in op.ranks]
    if moves:
        _run_moves(state, moves, terms)
    for rank, i, values in writes:
        rows[rank][i : i + len(values)] = values


def boundaries(step: Step) -> set[int]:
    """The chunks at which the ops of a step begin and end, parts of collectives included."""
    found: set[int] = set()
    for op in step.ops:
        for run in op.runs:
            found.update((run.start, run.stop))
        if isinstance(op, Collective) and op.kind in ("reduce_scatter", "all_gather"):
            found.update(op.chunks[:: len(op.chunks) // len(op.group)])
    return found


def _collective_writes(
    op: Collective, held: list[list[int]], first: int, state: Buffers, terms: Expressions
) -> Iterable[tuple[int, int, list[int]]]:
    """What `op` leaves in its ranks, which held `held` in the atoms from `first` on."""
    group, width = op.group, len(held[0])
    if op.kind == "broadcast":
        return [(rank, first, held[0]) for rank in group]
    if op.kind == "all_gather":
        bounds = _part_bounds(op, first, state)
        gathered = [value for row, (i, j) in zip(held, bounds, strict=True) for value in row[i:j]]
        return [(rank, first, gathered) for rank in group]
    total = held[0] if len(group) == 1 else [terms.call(inputs) for inputs in zip(*held, strict=True)]
    if op.kind == "all_reduce":
        return [(rank, first, total) for rank in group]
    kept = [(0, width), *[(0, 0)] * (len(group) - 1)] if op.kind == "reduce" else _part_bounds(op, first, state)
    junk = terms.junk
    terms.leaves_junk = terms.leaves_junk or len(group) > 1
    return [(rank, first, [*[junk] * i, *total[i:j], *[junk] * (width - j)]) for rank, (i, j) in zip(group, kept, strict=True)]


def _part_bounds(op: Collective, first: int, state: Buffers) -> list[tuple[int, int]]:
    """Where part i of `op` begins and ends, in atoms counted from `first`."""
    length = len(op.chunks) // len(op.group)
    edges = [state.atom[chunk] - first for chunk in range(op.chunks.start, op.chunks.stop + 1, length)]
    return list(pairwise(edges))
