"""The checker: runs a schedule on symbols instead of tensors, and compares the final slots with the claim.

The interpreter makes expressions, which record every addition and its order. Up to 64 ranks, each is evaluated as a formal sum
{origin: weight} with exact fractions. Above, each is evaluated as a fingerprint, with one random integer per origin modulo a
secret prime: a wrong schedule passes with a probability of about 2^-59, and thousands of ranks take seconds. If a fingerprint is
wrong, only its slot is evaluated as a formal sum, for the error message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd

from .describe import describe
from .expressions import Expressions
from .fingerprints import BOTH, PRIME, SECOND, Fingerprints, random_inputs, with_sums
from .formal_sum import JUNK, FormalSum
from .interpret import Buffers, interpret
from .lower import lower, lower_steps
from .ops import Collective, Goal, Move, Op, Schedule, ScheduleError, Step
from .recoding import MOST, check_forms
from .wellformed import check, checked

EXACT_UP_TO = 64  # ranks; above it formal sums are too slow, so fingerprints are used


def verify(s: Schedule, *, goal: Goal | None = None, bitwise: bool = False) -> None:
    """Prove that every rank ends with what the schedule claims.

    Up to 64 ranks the proof is exact. Above, it uses fingerprints: each input is a random number modulo a random prime, which the
    process draws once and keeps secret, so a file cannot be made to pass. A wrong weight of b bits goes unnoticed with a
    probability of about b * 2**-59.

    For a schedule that encodes, it also proves that no contribution is encoded more than twice, and that all ranks end with
    equal bits.

    Args:
        s: The schedule to check.
        goal: Check this claim instead of the schedule's own.
        bitwise: Also prove that all ranks end with equal bits for any input. They do if every rank's result comes from the
            same additions in the same order. Replicas of a model need that to stay equal, so `create_communicator` asks for it.

    Raises:
        ScheduleError: If the result is wrong, or an op is invalid. The message names the rank, the chunk, its contents and
            the step that went wrong.

    Example:
        >>> phalanx.schedule.verify(phalanx.torus(2, 3))
        >>> phalanx.schedule.verify(phalanx.torus(2, 3), bitwise=True)
    """
    if goal is not None:
        s = replace(s, goal=goal)
    check(s)
    check_forms(s)
    if s.world > EXACT_UP_TO and s.lowered and not (s.coded or bitwise) and _fingerprints_agree(s):
        return
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


def verify_lowered(s: Schedule) -> tuple[int, int]:
    """Prove `lower(s)`, and count its steps and ops. Only the moves of one step at a time are in memory, if they are right."""
    counts = []

    def counted(steps: Iterable[Step]) -> Iterator[Step]:
        for step in steps:
            counts.append(len(step.ops))
            yield step

    if s.world <= EXACT_UP_TO or s.coded or any(op.coded for op in s.ops() if isinstance(op, Move)):
        agree = False
    else:
        agree = _fingerprints_agree(s, checked(s, counted(lower_steps(s))))
    if not agree:  # or too small to be worth it
        lowered = lower(s)
        verify(lowered)
        counts = [len(step.ops) for step in lowered.steps]
    return len(counts), sum(counts)


@dataclass(frozen=True, slots=True)
class _Proof:
    """What a schedule leaves in every slot, and how that compares with its claim."""

    s: Schedule
    terms: Expressions
    final: Buffers

    def check_ends(self) -> None:
        """Check that every slot of every rank matches the goal."""
        first = self.final.rows[0]
        values = set(first).union(
            *(row for row in self.final.rows if row != first)
        )  # usually no row differs, and comparing is faster
        wrong = values - self._right(values)
        for rank, row in enumerate(self.final.rows if wrong else []):
            for chunk, value in zip(self.final.starts, row, strict=True):
                if value in wrong:
                    raise self._wrong_end(rank, chunk, value)

    def _right(self, values: set[int]) -> set[int]:
        """The `values` that match the goal."""
        s = self.s
        if s.world <= EXACT_UP_TO:
            wanted = _wanted(s)
            return {value for value, found in self._formal(values).items() if found == wanted}
        inputs = self._random_inputs()
        goal, found = _goal_print(s, inputs), self._prints(inputs)
        return {value for value in values if found[value] == goal} - self.terms.spoiled()

    def check_mixing(self) -> None:
        """Check that rows and columns add up to 1. Weights are never negative."""
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
        """Check that no input was encoded too often: every encoding rounds it again."""
        times = self.terms.encodings()
        for rank, row in enumerate(self.final.rows):
            for chunk, value in zip(self.final.starts, row, strict=True):
                if times[value] > MOST:
                    raise ScheduleError(
                        f"{self.s.name}: chunk {chunk} of rank {rank} has a contribution that was encoded {times[value]} times;"
                        f" every time rounds it again, so at most {MOST} are allowed"
                    )

    def check_equal(self) -> None:
        """Check that all ranks hold the same expression."""
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
        return list(random_inputs(self.s.world + 1))  # the last is junk

    def _prints(self, inputs: list[int]) -> list[int]:
        return self.terms.prints(inputs, PRIME, lambda factor: _scale(self.s, 1, factor))

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


def _fingerprints_agree(s: Schedule, steps: Iterable[Step] | None = None) -> bool:
    """Whether a schedule without library calls and codes meets its goal. If not, expressions can explain why.

    `steps` replace those of `s`."""
    mixing = s.goal == "mixing"
    modulus, numbers = BOTH if mixing else PRIME, random_inputs(s.world)
    prints = Fingerprints(modulus, lambda factor: _scale(s, 1, factor, modulus))
    rows = interpret(s, prints, with_sums(s.world) if mixing else numbers, steps).rows
    if mixing:
        total = sum(numbers)
        return all(
            {value % SECOND for value in column} == {1} and (sum(column) - total) % PRIME == 0
            for column in zip(*rows, strict=True)
        )
    first = rows[0]  # ranks mostly hold the same objects: comparing with them is faster than with other numbers
    return first == [_goal_print(s, numbers)] * len(first) and all(row == first for row in rows)


def _goal_print(s: Schedule, inputs: Sequence[int]) -> int:
    """The fingerprint of what every slot should hold."""
    total = sum(inputs[: s.world])
    return {"sum": total, "mean": _scale(s, total, Fraction(1, s.world)), "copy": inputs[s.root]}[s.goal] % PRIME


def _scale(s: Schedule, value: int, factor: Fraction, modulus: int = PRIME) -> int:
    if gcd(factor.denominator, modulus) > 1:
        raise ScheduleError(f"{s.name}: the factor {factor} cannot be followed modulo {modulus}; choose another")
    return value * factor.numerator * pow(factor.denominator, -1, modulus) % modulus


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
