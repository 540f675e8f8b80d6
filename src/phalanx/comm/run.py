"""The third interpreter of a schedule: execute it, as far as it concerns this rank.

`project` cuts out what one rank does in each step (a value, kept per schedule); `execute` does it on a flat buffer through a
transport. Chunk c of a buffer of `numel` elements is [c * numel // chunks, (c+1) * numel // chunks): Moves need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from phalanx.comm.transports import Message, Transport
from phalanx.schedule import Collective, Move, Scale, Schedule

LANES, LANE_BYTES = 4, 512 << 10  # pieces of a buffer that take turns on the network, and the least size of one

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


@dataclass(frozen=True, slots=True)
class Form:
    """A schedule as one rank runs it, and how buffers are cut for it: the same on all ranks, whatever their parts."""

    schedule: Schedule  # kept so that its id stays its own
    parts: tuple[Part, ...]
    moves: bool  # whether messages are left
    cut: bool  # whether library calls cut buffers into equal parts

    @staticmethod
    def of(schedule: Schedule, lowered: Schedule, rank: int, *, calls: bool) -> Form:
        """`lowered` is `schedule` with only the collectives left that are library calls, if there are any (`calls`)."""
        cut = calls and any(isinstance(op, Collective) and op.kind in ("reduce_scatter", "all_gather") for op in schedule.ops())
        return Form(schedule, project(lowered, rank), any(isinstance(op, Move) for op in lowered.ops()), cut)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The buffer in a few pieces, so that one travels while another is added up; small ones would only add latency."""
        count = min(LANES, flat.nbytes // LANE_BYTES) if flat.is_cpu and self.moves else 1
        if count < 2 or (self.cut and flat.numel() % (self.schedule.chunks * count)):
            return [flat]
        return list(flat.tensor_split(count))


def _overlaps(chunks: range, sends: Sequence[tuple[int, range]]) -> bool:
    return any(chunks.start < other.stop and other.start < chunks.stop for _, other in sends)


def execute(
    parts: Sequence[Part],
    chunks: int,
    flats: Sequence[torch.Tensor],
    *,
    op: str,
    me: int,
    transport: Transport,
    ranks: Sequence[int],
    tag: int,
    scratch: Callable[[int, torch.Tensor, int], torch.Tensor],
    got_on: Callable[[], None],
) -> None:
    """Run the `parts` of rank `me` in place on `flats`. `ranks[i]` is the transport's number of the schedule's rank i.

    The flats are pieces of one buffer, each of which goes through the whole schedule. They take turns: while one piece is added
    up, the messages of the others keep the network busy.
    """
    # a tag of its own for every piece: their messages do not wait in one queue
    lanes = [_Lane(chunks, flat, op, me, transport, ranks, tag ^ i, scratch, i) for i, flat in enumerate(flats)]
    for part in parts:
        for lane in lanes:
            lane.finish()
            lane.start(part)
            got_on()
    for lane in lanes:
        lane.finish()


class _Lane:
    """One piece of the buffer on its way through the schedule."""

    def __init__(
        self,
        chunks: int,
        flat: torch.Tensor,
        op: str,
        me: int,
        transport: Transport,
        ranks: Sequence[int],
        tag: int,
        scratch: Callable[[int, torch.Tensor, int], torch.Tensor],
        number: int,
    ) -> None:
        self.flat, self.op, self.me, self.ranks = flat, op, me, ranks
        self.transport, self.tag, self.scratch, self.number = transport, tag, scratch, number
        self.bounds = [c * flat.numel() // chunks for c in range(chunks + 1)]
        self.part: Part | None = None
        self.messages: Any = None
        self.landing: list[torch.Tensor] = []

    def view(self, slots: range) -> torch.Tensor:
        return self.flat[self.bounds[slots.start] : self.bounds[slots.stop]]

    def start(self, part: Part) -> None:
        """Post the messages of `part`. What may not be written yet is received next to the buffer."""
        self.part = part
        targets = [self.view(receipt.chunks) for receipt in part.receipts]
        room = self.scratch(sum(x.numel() for x, r in zip(targets, part.receipts) if not r.direct), self.flat, self.number)
        self.landing, at = [], 0
        for target, receipt in zip(targets, part.receipts):
            if receipt.direct:
                self.landing.append(target)
            else:
                self.landing.append(room[at : at + target.numel()])
                at += target.numel()
        self.messages = self.transport.post(
            [Message(self.ranks[peer], self.view(slots)) for peer, slots in part.sends],
            [Message(self.ranks[receipt.peer], x) for receipt, x in zip(part.receipts, self.landing)],
            self.tag,
        )

    def finish(self) -> None:
        """Wait for the messages of the part that was started, and do the rest of it."""
        part, self.part = self.part, None
        if part is None:
            return
        self.transport.wait(self.messages)
        if part.collective is not None:  # after the sends, which may read what it overwrites
            self.transport.collective(part.collective, self.view(part.collective.chunks), self.op, self.ranks)
        for receipt, x in zip(part.receipts, self.landing):
            target = self.view(receipt.chunks)
            if receipt.reduce:
                # the lower rank's first on both sides of an exchange: max(0.0, -0.0) and NaN + NaN are one of the two
                REDUCERS[self.op](*((x, target) if receipt.peer < self.me else (target, x)), out=target)
            elif not receipt.direct:
                target.copy_(x)
        for slots, factor in part.scales:
            self.view(slots).mul_(float(factor))
