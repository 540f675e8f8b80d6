"""The third interpreter of a schedule: execute it, as far as it concerns this rank.

`project` cuts out what one rank does in each step (a value, kept per schedule); `execute` does it on a flat buffer through a
transport. Chunk c of a buffer of `numel` elements is [c * numel // chunks, (c+1) * numel // chunks): Moves need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from phalanx.comm.transports import Message, Transport
from phalanx.schedule import Collective, Move, Scale, Schedule

REDUCERS: dict[str, Callable[..., object]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True, slots=True)
class Receipt:
    """One message this rank receives: added, or written, at once (`direct`) or after its sends have left the slot."""

    peer: int
    chunks: range
    reduce: bool
    direct: bool


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank does in one step."""

    sends: tuple[tuple[int, range], ...] = ()
    receipts: tuple[Receipt, ...] = ()
    scales: tuple[tuple[range, Fraction], ...] = ()
    collective: Collective | None = None


def project(schedule: Schedule, rank: int) -> tuple[Part, ...]:
    """The schedule as `rank` sees it; steps that do not concern it are left out. Messages of a pair keep the schedule's order."""
    parts = []
    for step in schedule.steps:
        sends = tuple((op.dst, op.chunks) for op in step.ops if isinstance(op, Move) and op.src == rank)
        part = Part(
            sends=sends,
            receipts=tuple(
                Receipt(op.src, op.chunks, op.reduce, not op.reduce and not _overlaps(op.chunks, sends))
                for op in step.ops
                if isinstance(op, Move) and op.dst == rank
            ),
            scales=tuple((op.chunks, op.factor) for op in step.ops if isinstance(op, Scale) and rank in op.ranks),
            collective=next((op for op in step.ops if isinstance(op, Collective) and rank in op.group), None),
        )
        if part != Part():
            parts.append(part)
    return tuple(parts)


def _overlaps(chunks: range, sends: Sequence[tuple[int, range]]) -> bool:
    return any(chunks.start < other.stop and other.start < chunks.stop for _, other in sends)


def execute(
    parts: Sequence[Part],
    chunks: int,
    flat: torch.Tensor,
    *,
    op: str,
    me: int,
    transport: Transport,
    ranks: Sequence[int],
    tag: int,
    scratch: Callable[[int, torch.Tensor], torch.Tensor],
    got_on: Callable[[], None],
) -> None:
    """Run the `parts` of rank `me` in place on `flat`. `ranks[i]` is the transport's number of the schedule's rank i."""
    bounds = [c * flat.numel() // chunks for c in range(chunks + 1)]
    reduce = REDUCERS[op]

    def view(slots: range) -> torch.Tensor:
        return flat[bounds[slots.start] : bounds[slots.stop]]

    for part in parts:
        # what may not be written yet is received next to the buffer
        staged = [view(receipt.chunks) for receipt in part.receipts]
        room = scratch(sum(x.numel() for x, r in zip(staged, part.receipts, strict=True) if not r.direct), flat)
        landing = []
        at = 0
        for target, receipt in zip(staged, part.receipts, strict=True):
            if receipt.direct:
                landing.append(target)
            else:
                landing.append(room[at : at + target.numel()])
                at += target.numel()
        transport.exchange(
            [Message(ranks[peer], view(slots)) for peer, slots in part.sends],
            [Message(ranks[receipt.peer], x) for receipt, x in zip(part.receipts, landing, strict=True)],
            tag,
        )
        if part.collective is not None:  # after the sends, which may read what it overwrites
            transport.collective(part.collective, view(part.collective.chunks), op, ranks)
        for target, receipt, x in zip(staged, part.receipts, landing, strict=True):
            if receipt.reduce:
                # the lower rank's first on both sides of an exchange: max(0.0, -0.0) and NaN + NaN are one of the two
                reduce(*((x, target) if receipt.peer < me else (target, x)), out=target)
            elif not receipt.direct:
                target.copy_(x)
        for slots, factor in part.scales:
            view(slots).mul_(float(factor))
        got_on()
