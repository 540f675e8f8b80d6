"""What one rank does in each step of a schedule, as values: what it sends, what it gets, and what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from phalanx.schedule import Chunks, Collective, Move, Recode, Scale, Schedule
from phalanx.schedule.ops import ONE


@dataclass(frozen=True, slots=True)
class Receipt:
    """One message this rank receives: added, or written, at once (`direct`) or after its sends have left the slot."""

    peer: int
    chunks: Chunks
    reduce: bool
    direct: bool
    factor: Fraction = ONE  # of what arrives
    coded: bool = False


@dataclass(frozen=True, slots=True)
class Sending:
    """One message this rank sends."""

    peer: int
    chunks: Chunks
    coded: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank does in one step."""

    sends: tuple[Sending, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    scales: tuple[tuple[range, Fraction], ...] = ()
    recodes: tuple[tuple[range, bool], ...] = ()
    collective: Collective | None = None
    before: tuple[Part, ...] = ()  # steps that need nobody else

    @property
    def alone(self) -> bool:
        """Whether it needs no other rank."""
        return not (self.sends or self.receipts or self.collective)


def project(schedule: Schedule, rank: int) -> tuple[Part, ...]:
    """The schedule as `rank` sees it; steps that do not concern it are left out. Messages of a pair keep the schedule's order."""
    parts = []
    for step in schedule.steps:
        sends = tuple(Sending(op.dst, op.chunks, op.coded) for op in step.ops if isinstance(op, Move) and op.src == rank)
        part = Part(
            sends=sends,
            receipts=tuple(
                Receipt(op.src, op.chunks, op.reduce, not op.reduce and _can_land(op.chunks, sends), op.factor, op.coded)
                for op in step.ops
                if isinstance(op, Move) and op.dst == rank
            ),
            scales=tuple((op.chunks, op.factor) for op in step.ops if isinstance(op, Scale) and rank in op.ranks),
            recodes=tuple((op.chunks, op.coded) for op in step.ops if isinstance(op, Recode) and rank in op.ranks),
            collective=next((op for op in step.ops if isinstance(op, Collective) and rank in op.group), None),
        )
        if part != Part():
            parts.append(part)
    return tuple(parts)


def joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """With steps that need nobody else as a beginning of the next one: a piece is encoded and leaves at once, and does not wait
    until all other pieces have arrived."""
    found: list[Part] = []
    own: tuple[Part, ...] = ()
    for part in parts:
        if part.alone:
            own = (*own, part)
        else:
            found.append(replace(part, before=own))
            own = ()
    return (*found, *own)


def _can_land(chunks: Chunks, sends: Sequence[Sending]) -> bool:
    """Whether a message can be received straight into its place: one range, of which nothing is being sent."""
    if not isinstance(chunks, range):
        return False
    # several runs are sent from a copy
    runs = [send.chunks for send in sends if isinstance(send.chunks, range)]
    return not any(chunks.start < run.stop and run.start < chunks.stop for run in runs)
