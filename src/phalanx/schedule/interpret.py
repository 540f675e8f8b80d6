"""The checker's interpreter: computes what every slot holds after a schedule, as an expression over the ranks' inputs.

Speed comes from *atoms*: adjacent chunks that all ops so far treated the same are one entry of a rank's list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise, repeat
from operator import attrgetter, getitem, setitem
from typing import cast

from .expressions import Expressions
from .fingerprints import Fingerprints
from .ops import ONE, Collective, Move, Recode, Schedule, Step

Terms = Expressions | Fingerprints

# steps may have a million moves: these avoid a Python call per move
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
        """Cut atoms so that one begins or ends at each of `boundaries`."""
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


def interpret(s: Schedule, terms: Terms, inputs: Iterable[int] | None = None, steps: Iterable[Step] | None = None) -> Buffers:
    """Run the well-formed `s`; rank r starts with its input in every slot. Adds the results to `terms`.

    Only `Expressions` handle operations other than `Move` and `Scale`. Their inputs are the ranks. `steps` replace those of `s`.
    """
    state = Buffers(s.chunks, range(s.world) if inputs is None else inputs)
    for step in s.steps if steps is None else steps:
        if set(map(type, step.ops)) == {Move}:
            _run_moves(state, cast("tuple[Move, ...]", step.ops), terms)
        elif step.ops:
            _run_mixed(state, step, terms)
    return state


def _run_moves(state: Buffers, moves: tuple[Move, ...], terms: Terms) -> None:
    """All moves read, then all write. One-atom moves, the bulk of a lowered schedule, need no slices."""
    chunks = cast("list[range]", list(map(_chunks, moves)))
    if set(map(type, chunks)) != {range}:
        _run_scattered(state, moves, terms)
        return
    factors = cast("list[Fraction]", list(map(_factor, moves)))
    plain = set(map(id, factors)) == {id(ONE)}
    starts, stops = list(map(_start, chunks)), list(map(_stop, chunks))
    state.refine({*starts, *stops})
    rows, atom = state.rows, state.atom
    begins, ends = list(map(atom.__getitem__, starts)), list(map(atom.__getitem__, stops))
    if sum(ends) - sum(begins) == len(moves):  # every range holds at least one atom, so each holds exactly one
        targets = cast("list[int]", list(map(_dst, moves)))
        values = list(map(getitem, map(rows.__getitem__, map(_src, moves)), begins))
        if not plain:
            values = terms.scale_each(values, factors)
        adds = set(map(_reduce, moves))
        if len(adds) == 1 and len(set(targets)) == len(moves):  # a ring, a torus: one message for each rank, all of one kind
            written = list(map(rows.__getitem__, targets))
            if all(adds):
                values = terms.add_all(list(map(getitem, written, begins)), values)
            deque(map(setitem, written, begins, values), maxlen=0)
            return
        for dst, reduce, i, value in zip(targets, map(_reduce, moves), begins, values, strict=True):
            row = rows[dst]
            row[i] = terms.add(row[i], value) if reduce else value
    elif not plain:
        _run_scattered(state, moves, terms)
    else:
        slices = [rows[m.src][i:j] for m, i, j in zip(moves, begins, ends, strict=True)]
        for m, i, j, part in zip(moves, begins, ends, slices, strict=True):
            row = rows[m.dst]
            row[i:j] = map(terms.add, row[i:j], part) if m.reduce else part


def _run_scattered(state: Buffers, moves: tuple[Move, ...], terms: Terms) -> None:
    """Like `_run_moves`, for messages with several runs or a factor."""
    distinct = {id(m.chunks): m.runs for m in moves}  # by identity: the moves of a step often share their chunks
    state.refine({edge for runs in distinct.values() for run in runs for edge in (run.start, run.stop)})
    places = {key: state.atoms(runs) for key, runs in distinct.items()}
    rows = state.rows
    values = [[rows[m.src][i] for i in places[id(m.chunks)]] for m in moves]
    for m, part in zip(moves, values, strict=True):
        row, at = rows[m.dst], places[id(m.chunks)]
        if m.factor is not ONE:
            part = terms.scale_all(part, m.factor)
        if m.reduce:
            part = [terms.add(row[i], value) for i, value in zip(at, part, strict=True)]
        for i, value in zip(at, part, strict=True):
            row[i] = value


def _run_mixed(state: Buffers, step: Step, terms: Terms) -> None:
    """All ops read, then the moves write, then the others, which share no written slot with the moves."""
    state.refine(boundaries(step))
    rows, atom = state.rows, state.atom
    moves = tuple(op for op in step.ops if isinstance(op, Move))
    writes: list[tuple[int, int, list[int]]] = []  # rank, first atom, values
    single: list[tuple[list[list[int]], int, list[int]]] = []  # the rows of several ranks, an atom, a value for each
    for op in step.ops:
        if isinstance(op, Move):
            continue
        i, j = atom[op.chunks.start], atom[op.chunks.stop]
        if isinstance(op, Collective):
            held = [rows[rank][i:j] for rank in op.group]
            writes += _collective_writes(op, held, i, state, cast(Expressions, terms))
        elif isinstance(op, Recode):
            if op.coded:  # decoding computes nothing new: the code represents the same numbers
                encode = cast(Expressions, terms).encode
                writes += [(rank, i, [encode(value) for value in rows[rank][i:j]]) for rank in op.ranks]
        else:
            own = [rows[rank] for rank in op.ranks]
            if j - i == 1:
                single.append((own, i, terms.scale_all(list(map(getitem, own, repeat(i))), op.factor)))
            else:
                writes += [(rank, i, terms.scale_all(row[i:j], op.factor)) for rank, row in zip(op.ranks, own, strict=True)]
    if moves:
        _run_moves(state, moves, terms)
    for rank, i, values in writes:
        rows[rank][i : i + len(values)] = values
    for own, i, values in single:
        deque(map(setitem, own, repeat(i), values), maxlen=0)


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
    """What `op` writes on its ranks, which held `held` in the atoms from `first` on."""
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
