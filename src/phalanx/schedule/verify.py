"""The checker: runs a schedule on symbols instead of tensors, and compares what every slot ends as with the claim.

The interpreter makes expressions, which know every addition and its order. Up to 64 ranks each is worked out as a formal sum
{origin: weight} with exact fractions. Above, as a fingerprint, one random integer per origin modulo a prime: a wrong schedule
passes with a probability of about 2^-60, and thousands of ranks take seconds. If a fingerprint is wrong, its slot alone is worked
out as a formal sum, to explain.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from .describe import describe
from .expressions import Expressions
from .formal_sum import JUNK, FormalSum
from .interpret import Buffers, interpret
from .ops import Collective, Goal, Move, Op, Schedule, ScheduleError
from .recoding import MOST, check_forms
from .wellformed import check

EXACT_UP_TO = 64  # ranks; above it formal sums become slow and fingerprints take over

# The largest safe prime below 2^60. Safe, (PRIME - 1) / 2 being prime too, so that no short product of small factors is 1 again:
# modulo 2^61 - 1, sixty-one doublings would pass for none.
PRIME = 2**60 - 3677


def verify(s: Schedule, *, goal: Goal | None = None, bitwise: bool = False) -> None:
    """Prove that every rank ends with what the schedule claims.

    Up to 64 ranks the proof is exact. Above, it uses fingerprints: a wrong schedule passes with a probability of about 2**-60.

    Of a schedule that encodes, it also proves that no contribution is encoded more than twice, and that all ranks end with
    equal bits.

    Args:
        s: The schedule to check.
        goal: Check this claim instead of the schedule's own.
        bitwise: Also prove that all ranks end with equal bits, whatever the inputs. They do if every rank's result comes from the
            same additions in the same order. Replicas of a model need that to stay equal, so `create_communicator` asks for it.

    Raises:
        ScheduleError: If the result is wrong, or an op makes no sense. The message names the rank, the chunk, what it holds and
            the step that went wrong.

    Example:
        >>> phalanx.schedule.verify(phalanx.torus(2, 3))
        >>> phalanx.schedule.verify(phalanx.torus(2, 3), bitwise=True)
    """
    if goal is not None:
        s = replace(s, goal=goal)
    check(s)
    check_forms(s)
    terms = Expressions(s.world)
    proof = _Proof(s, terms, interpret(s, terms))
    if s.goal == "mixing":
        proof.check_mixing()
    else:
        proof.check_ends()
    if s.coded:
        proof.check_roundings()
    if bitwise or (s.coded and s.goal != "mixing"):
        proof.check_equal()


@dataclass(frozen=True, slots=True)
class _Proof:
    """What a schedule leaves in every slot, and how that compares with its claim."""

    s: Schedule
    terms: Expressions
    final: Buffers

    def check_ends(self) -> None:
        """Every slot of every rank is what the goal says."""
        values = set().union(*self.final.rows)
        wrong = values - self._right(values)
        for rank, row in enumerate(self.final.rows if wrong else []):
            for chunk, value in zip(self.final.starts, row, strict=True):
                if value in wrong:
                    raise self._wrong_end(rank, chunk, value)

    def _right(self, values: set[int]) -> set[int]:
        """Those of `values` that are what the goal says."""
        s = self.s
        if s.world <= EXACT_UP_TO:
            wanted = _wanted(s)
            return {value for value, found in self._formal(values).items() if found == wanted}
        inputs = self._random_inputs()
        total = sum(inputs[: s.world])
        goal = {"sum": total, "mean": _scale(s, total, Fraction(1, s.world)), "copy": inputs[s.root]}[s.goal] % PRIME
        found = self._prints(inputs)
        return {value for value in values if found[value] == goal} - self.terms.spoiled()

    def check_mixing(self) -> None:
        """Rows and columns add up to 1. No weight is ever negative."""
        columns = {chunk: [row[atom] for row in self.final.rows] for atom, chunk in enumerate(self.final.starts)}
        if self.s.world <= EXACT_UP_TO:
            for chunk, column in columns.items():
                self._check_doubly_stochastic(chunk, column)
            return
        inputs = self._random_inputs()
        total, found, ones = sum(inputs[: self.s.world]), self._prints(inputs), self._prints([1] * len(inputs))
        wrong = self.terms.spoiled() | {value for value, held in enumerate(ones) if held != 1}
        for chunk, column in columns.items():
            if not wrong.isdisjoint(column):
                rank = next(rank for rank, value in enumerate(column) if value in wrong)
                raise self._wrong_end(rank, chunk, column[rank])
            if (sum(found[value] for value in column) - total) % PRIME:
                self._check_doubly_stochastic(chunk, column)

    def check_roundings(self) -> None:
        """No input was encoded more often than needed: every time rounds it again."""
        times = self.terms.encodings()
        for rank, row in enumerate(self.final.rows):
            for chunk, value in zip(self.final.starts, row, strict=True):
                if times[value] > MOST:
                    raise ScheduleError(
                        f"{self.s.name}: chunk {chunk} of rank {rank} has a contribution that was encoded {times[value]} times;"
                        f" every time rounds it again, so at most {MOST} are allowed"
                    )

    def check_equal(self) -> None:
        """All ranks hold the same expression."""
        first, s, text = self.final.rows[0], self.s, self.terms.text
        for rank, row in enumerate(self.final.rows):
            for chunk, mine, other in zip(self.final.starts, first, row, strict=True) if row != first else ():
                if mine != other:
                    way_out = "" if s.lowered else "; or try lower(schedule), which has no library calls"
                    raise ScheduleError(
                        f"{s.name}: the ranks do not end with equal bits: chunk {chunk} is {text(mine)} on rank 0 and"
                        f" {text(other)} on rank {rank}, which may round differently ({_last_writer(s, rank, chunk)}). Let one"
                        f" rank add, and copy its sum to the others{way_out}"
                    )

    def _formal(self, values: Iterable[int]) -> dict[int, FormalSum]:
        junk = self.terms.junk
        return self.terms.evaluate(values, lambda i: FormalSum({JUNK if i == junk else i: 1}), FormalSum.__add__, FormalSum.times)

    def _random_inputs(self) -> list[int]:
        return list(_numbers(self.s.world + 1))  # the last is junk

    def _prints(self, inputs: list[int]) -> list[int]:
        whole: dict[int, int] = {}  # factors modulo PRIME, by identity: an op has one for all its ranks

        def scale(value: int, factor: Fraction) -> int:
            if id(factor) not in whole:
                whole[id(factor)] = _scale(self.s, 1, factor)
            return value * whole[id(factor)] % PRIME

        return self.terms.prints(inputs, PRIME, scale)

    def _check_doubly_stochastic(self, chunk: int, column: list[int]) -> None:
        received: dict[int, int | Fraction] = defaultdict(int)
        sums = self._formal(column)
        for rank, value in enumerate(column):
            weights = sums[value].weights
            if JUNK in weights or sum(weights.values()) != 1:
                raise self._wrong_end(rank, chunk, value)
            for origin, weight in weights.items():
                received[origin] += weight
        for origin in range(self.s.world):
            if received[origin] != 1:
                raise ScheduleError(
                    f"{self.s.name}: the weights of x{origin} in chunk {chunk} add up to {received[origin]} over the ranks,"
                    " wanted 1"
                )

    def _wrong_end(self, rank: int, chunk: int, value: int) -> ScheduleError:
        wanted = "weights that add up to 1" if self.s.goal == "mixing" else str(_wanted(self.s))
        ends, culprit = self._formal([value])[value], _last_writer(self.s, rank, chunk)
        return ScheduleError(f"{self.s.name}: chunk {chunk} of rank {rank} ends as {ends}, wanted {wanted} ({culprit})")


@lru_cache(maxsize=1)
def _numbers(count: int) -> list[int]:
    rng = random.Random(0)  # the same every time: a failure can be repeated
    return [rng.randrange(1, PRIME) for _ in range(count)]


def _scale(s: Schedule, value: int, factor: Fraction) -> int:
    if factor.denominator % PRIME == 0:
        raise ScheduleError(f"{s.name}: the factor {factor} cannot be followed modulo {PRIME}; choose another")
    return value * factor.numerator * pow(factor.denominator, -1, PRIME) % PRIME


def _wanted(s: Schedule) -> FormalSum:
    if s.goal == "copy":
        return FormalSum({s.root: 1})
    return FormalSum(dict.fromkeys(range(s.world), 1 if s.goal == "sum" else Fraction(1, s.world)))


def _last_writer(s: Schedule, rank: int, chunk: int) -> str:
    for number, step in reversed(list(enumerate(s.steps, start=1))):
        for op in reversed(step.ops):
            if rank in _written(op) and any(chunk in run for run in op.runs):
                return f"step {number}: {describe(op)}"
    return "no step writes it"


def _written(op: Op) -> Sequence[int]:
    """The ranks whose slots `op` writes."""
    return (op.dst,) if isinstance(op, Move) else op.group if isinstance(op, Collective) else op.ranks
