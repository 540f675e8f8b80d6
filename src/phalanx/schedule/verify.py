"""The checker: runs a schedule on symbols instead of tensors, and compares what every slot ends as with the claim.

One interpreter, two kinds of value. A formal sum {origin: weight} with exact fractions says everything, and is used for small
worlds. A fingerprint, one random integer per origin modulo a prime, is a homomorphic image of it: a wrong schedule passes with a
probability of about 2^-60, and thousands of ranks take seconds. Chunks never mix, so when a fingerprint is wrong the guilty chunk
alone is run again with formal sums, to explain.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from .describe import describe
from .formal_sum import JUNK, FormalSum
from .interpret import Buffers, interpret
from .ops import Collective, Goal, Move, Op, Schedule, ScheduleError, Step
from .recoding import check_recoding
from .wellformed import check

EXACT_UP_TO = 64  # ranks; above it formal sums become slow and fingerprints take over

# The largest safe prime below 2^60. Safe, (PRIME - 1) / 2 being prime too, so that no short product of small factors is 1 again:
# modulo 2^61 - 1, sixty-one doublings would pass for none.
PRIME = 2**60 - 3677


def verify(s: Schedule, *, goal: Goal | None = None) -> None:
    """Prove that every rank ends with what the schedule claims.

    Up to 64 ranks the proof is exact. Above, it uses fingerprints: a wrong schedule passes with a probability of about 2**-60.
    Of a schedule that encodes, it also proves that no contribution is encoded more than twice, and that all ranks end with the
    same bits.

    Args:
        s: The schedule to check.
        goal: Check this claim instead of the schedule's own.

    Raises:
        ScheduleError: If the result is wrong, or an op makes no sense. The message names the rank, the chunk, what it holds and
            the step that went wrong.

    Example:
        >>> phalanx.schedule.verify(phalanx.torus(2, 3))
    """
    if goal is not None:
        s = replace(s, goal=goal)
    check(s)
    check_recoding(s)
    if s.world <= EXACT_UP_TO:
        _verify_exactly(s)
    else:
        _verify_by_fingerprints(s)


def _verify_exactly(s: Schedule) -> None:
    final = _formal(s)
    if s.goal == "mixing":
        for atom, chunk in enumerate(final.starts):
            _check_doubly_stochastic(s, chunk, [row[atom] for row in final.rows])
        return
    wanted = _wanted(s)
    right: list[FormalSum] = []  # the last row found right; most others hold the very same objects, which compare fast
    for rank, row in enumerate(final.rows):
        if row != right:
            for chunk, value in zip(final.starts, row, strict=True):
                if value != wanted:
                    raise _wrong_end(s, rank, chunk, value)
            right = row


def _verify_by_fingerprints(s: Schedule) -> None:
    rng = random.Random(0)  # the same prints every time: a failure can be repeated
    prints = [rng.randrange(1, PRIME) for _ in range(s.world)]

    def scale(value: int, factor: Fraction) -> int:
        if factor.denominator % PRIME == 0:
            raise ScheduleError(f"{s.name}: the factor {factor} cannot be followed modulo {PRIME}; choose another")
        return value * factor.numerator * pow(factor.denominator, -1, PRIME) % PRIME

    def junk() -> int:
        return rng.randrange(1, PRIME)

    if s.goal == "mixing":  # no weight is ever negative, so what is left to show is that rows and columns add up to 1
        _check_all(s, interpret(s, [1] * s.world, scale, junk), 1)
        final = interpret(s, prints, scale, junk)
        for atom, chunk in enumerate(final.starts):
            if (sum(row[atom] for row in final.rows) - sum(prints)) % PRIME:
                raise _explain(s, 0, chunk)
        return
    total = sum(prints)
    wanted = {"sum": total, "mean": scale(total, Fraction(1, s.world)), "copy": prints[s.root]}[s.goal]
    _check_all(s, interpret(s, prints, scale, junk), wanted)


def _check_all(s: Schedule, final: Buffers[int], wanted: int) -> None:
    right: list[int] = []  # the last row found right
    for rank, row in enumerate(final.rows):
        if row != right:
            for chunk, value in zip(final.starts, row, strict=True):
                if (value - wanted) % PRIME:
                    raise _explain(s, rank, chunk)
            right = row


def _check_doubly_stochastic(s: Schedule, chunk: int, column: list[FormalSum]) -> None:
    received: dict[int, int | Fraction] = defaultdict(int)
    for rank, value in enumerate(column):
        if JUNK in value.weights or sum(value.weights.values()) != 1:
            raise _wrong_end(s, rank, chunk, value)
        for origin, weight in value.weights.items():
            received[origin] += weight
    for origin in range(s.world):
        if received[origin] != 1:
            raise ScheduleError(
                f"{s.name}: the weights of x{origin} in chunk {chunk} add up to {received[origin]} over the ranks, wanted 1"
            )


def _formal(s: Schedule) -> Buffers[FormalSum]:
    return interpret(s, [FormalSum({rank: 1}) for rank in range(s.world)], FormalSum.times, lambda: FormalSum({JUNK: 1}))


def _wanted(s: Schedule) -> FormalSum:
    if s.goal == "copy":
        return FormalSum({s.root: 1})
    return FormalSum(dict.fromkeys(range(s.world), 1 if s.goal == "sum" else Fraction(1, s.world)))


def _explain(s: Schedule, rank: int, chunk: int) -> ScheduleError:
    """The error that formal sums give for the one chunk which a fingerprint has found guilty."""
    if s.goal == "mixing":
        try:
            _check_doubly_stochastic(s, chunk, [row[0] for row in _formal(_only(s, chunk)).rows])
        except ScheduleError as error:
            return error
    return _wrong_end(s, rank, chunk, _formal(_past(_only(s, chunk), rank)).rows[rank][0])


def _only(s: Schedule, chunk: int) -> Schedule:
    """What `s` does to `chunk`, as a schedule of one chunk."""

    def alone(op: Op) -> Op:
        if isinstance(op, Collective) and op.kind in ("reduce_scatter", "all_gather"):
            # for one part, these are a reduce to, or a broadcast from, the part's owner
            owner = (chunk - op.chunks.start) * len(op.group) // len(op.chunks)
            group = (op.group[owner], *op.group[:owner], *op.group[owner + 1 :])
            return Collective("reduce" if op.kind == "reduce_scatter" else "broadcast", group, range(1))
        return replace(op, chunks=range(1))

    steps = (Step(tuple(alone(op) for op in step.ops if chunk in op.chunks), step.label) for step in s.steps)
    return replace(s, chunks=1, steps=tuple(steps))


def _past(s: Schedule, rank: int) -> Schedule:
    """The ops of `s`, which has one chunk, on which the end of `rank` depends: formal sums of all ranks would fill the memory."""
    needed = {rank}
    steps: list[Step] = []
    for step in reversed(s.steps):
        ops = tuple(op for op in step.ops if not needed.isdisjoint(_written(op)))
        needed -= {op.dst for op in ops if isinstance(op, Move) and not op.reduce}
        needed.update(*((op.src,) if isinstance(op, Move) else _written(op) for op in ops))
        steps.append(Step(ops, step.label))
    return replace(s, steps=tuple(reversed(steps)))


def _wrong_end(s: Schedule, rank: int, chunk: int, value: FormalSum) -> ScheduleError:
    wanted = "weights that add up to 1" if s.goal == "mixing" else str(_wanted(s))
    culprit = _last_writer(s, rank, chunk)
    return ScheduleError(f"{s.name}: chunk {chunk} of rank {rank} ends as {value}, wanted {wanted} ({culprit})")


def _last_writer(s: Schedule, rank: int, chunk: int) -> str:
    for number, step in reversed(list(enumerate(s.steps, start=1))):
        for op in reversed(step.ops):
            if chunk in op.chunks and rank in _written(op):
                return f"step {number}: {describe(op)}"
    return "no step writes it"


def _written(op: Op) -> Sequence[int]:
    """The ranks whose slots `op` writes."""
    return (op.dst,) if isinstance(op, Move) else op.group if isinstance(op, Collective) else op.ranks
