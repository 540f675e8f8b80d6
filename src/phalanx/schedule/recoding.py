"""The proof for schedules that encode: who holds what in which form, how often a contribution is rounded, whose bits are equal.

Sums are proved by `verify` as if encoding changed nothing. Here every value is a term: a number that stands for how it was
computed, down to the order of additions. Equal terms are equal bits, because encoding is a function and a + b = b + a.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import NoReturn

from .describe import describe
from .interpret import Buffers, boundaries, run_step
from .ops import Collective, Move, Op, Recode, Schedule, ScheduleError

MOST = 2  # times that a contribution may be encoded: on its way to a sum, and with it


@dataclass(frozen=True, slots=True)
class Term:
    """What a slot holds: how it was computed, how often some contribution to it was encoded, and whether it is encoded now."""

    bits: int
    times: int = 0
    coded: bool = False

    def __add__(self, other: Term) -> Term:
        return Term(hash(("add", min(self.bits, other.bits), max(self.bits, other.bits))), max(self.times, other.times))

    def times_(self, factor: Fraction) -> Term:
        return Term(hash(("scale", self.bits, factor)), self.times)

    def recoded(self, coded: bool) -> Term:
        """Decoding computes nothing new: the code stands for the same numbers."""
        return Term(hash(("encode", self.bits)), self.times + 1, coded=True) if coded else Term(self.bits, self.times)


def check_recoding(s: Schedule) -> None:
    """Raise `ScheduleError` where `s` uses codes wrongly, rounds a contribution more than twice, or ranks end with other bits."""
    if not s.coded:
        _check_uncoded(s)
        return
    fresh = count()
    state = Buffers(s.chunks, [Term(hash(("input", rank))) for rank in range(s.world)])
    for number, step in enumerate(s.steps, start=1):
        state.refine(boundaries(step))
        for op in step.ops:
            _check_op(s, number, op, state)
        run_step(state, step, Term.times_, lambda: Term(hash(("junk", next(fresh)))), Term.recoded)
    for rank, row in enumerate(state.rows):
        for chunk, value, first in zip(state.starts, row, state.rows[0], strict=True):
            if value.coded:
                raise ScheduleError(f"{s.name}: chunk {chunk} of rank {rank} ends encoded; decode it in the last step")
            if value.times > MOST:
                raise ScheduleError(
                    f"{s.name}: chunk {chunk} of rank {rank} has a contribution that was encoded {value.times} times; every"
                    f" time rounds it again, so at most {MOST} are allowed"
                )
            if s.goal != "mixing" and value.bits != first.bits:
                raise ScheduleError(
                    f"{s.name}: chunk {chunk} of rank {rank} is computed in another way than that of rank 0, so their bits may"
                    " differ; encode a result once, and let all ranks decode the same code"
                )


def _check_uncoded(s: Schedule) -> None:
    for number, step in enumerate(s.steps, start=1):
        for op in step.ops:
            if isinstance(op, Move) and op.coded:
                _fail(s, number, op, "it carries a code, but no step encodes anything")


def _check_op(s: Schedule, number: int, op: Op, state: Buffers[Term]) -> None:
    """Whether the slots that `op` reads and writes are held in the form that it needs."""
    atoms = slice(state.atom[op.chunks.start], state.atom[op.chunks.stop])

    def held(rank: int, coded: bool) -> bool:
        return all(value.coded == coded for value in state.rows[rank][atoms])

    if isinstance(op, Move):
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
