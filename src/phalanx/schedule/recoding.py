"""Check which chunks are encoded where: every op of a schedule that encodes must find its chunks in the right form."""

from __future__ import annotations

from operator import attrgetter
from typing import NoReturn

from .describe import describe
from .interpret import Buffers, boundaries
from .ops import Collective, Move, Op, Recode, Schedule, ScheduleError

MOST = 2  # how often a contribution may be encoded: before the sum, and as part of it


def check_forms(s: Schedule) -> None:
    """Raise `ScheduleError` if an op needs full precision and finds a code, or vice versa."""
    if not s.coded:
        for number, step in enumerate(s.steps, start=1):
            moves = [op for op in step.ops if isinstance(op, Move)]
            for move in filter(attrgetter("coded"), moves):
                _fail(s, number, move, "it carries a code, but no step encodes anything")
        return
    state = Buffers(s.chunks, [False] * s.world)  # whether each slot is held encoded
    for number, step in enumerate(s.steps, start=1):
        state.refine(boundaries(step))
        for op in step.ops:
            _check_op(s, number, op, state)
        for op in step.ops:
            atoms = state.atoms(op.runs)
            if isinstance(op, Recode) or (isinstance(op, Move) and not op.reduce):
                for rank in op.ranks if isinstance(op, Recode) else (op.dst,):
                    for i in atoms:
                        state.rows[rank][i] = op.coded
    for rank, row in enumerate(state.rows):
        for chunk, coded in zip(state.starts, row, strict=True):
            if coded:
                raise ScheduleError(f"{s.name}: chunk {chunk} of rank {rank} ends encoded; decode it in the last step")


def _check_op(s: Schedule, number: int, op: Op, state: Buffers) -> None:
    """Check that the slots `op` reads and writes have the form that it needs."""
    atoms = state.atoms(op.runs)

    def held(rank: int, coded: bool) -> bool:
        row = state.rows[rank]
        return all(row[i] == coded for i in atoms)

    if isinstance(op, Move):
        if op.coded and op.factor != 1:
            _fail(s, number, op, "a code is not multiplied; scale what it was made of")
        if not held(op.src, op.coded):
            _fail(s, number, op, f"rank {op.src} does not hold these chunks {'encoded' if op.coded else 'in full precision'}")
        if op.reduce and not held(op.dst, coded=False):
            _fail(s, number, op, f"rank {op.dst} cannot add to a code; decode it first")
    elif isinstance(op, Recode):
        for rank in op.ranks:
            if not held(rank, not op.coded):
                _fail(s, number, op, f"rank {rank} holds some of these chunks {'encoded' if op.coded else 'decoded'} already")
    else:
        for rank in op.group if isinstance(op, Collective) else op.ranks:
            if not held(rank, coded=False):
                _fail(s, number, op, f"rank {rank} holds some of these chunks encoded; decode them first")


def _fail(s: Schedule, number: int, op: Op, fact: str) -> NoReturn:
    raise ScheduleError(f"{s.name}: {fact} (step {number}: {describe(op)})")
