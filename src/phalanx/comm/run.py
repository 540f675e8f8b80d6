"""The third interpreter of a schedule: execute it, as far as it concerns this rank.

`project` in parts.py cuts out what one rank does in each step (a value, kept per schedule); `execute` does it on a flat buffer
through a transport. Chunk c of a buffer of `numel` elements is [c * numel // chunks, (c+1) * numel // chunks): Moves need no
padding. A chunk that is encoded lies in a second buffer, of bytes, until it is decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.block_code import Coder
from phalanx.comm.parts import Part, Receipt, Sending, joined, project
from phalanx.comm.transports import Message, Transport
from phalanx.schedule import Collective, Move, Recode, Schedule

ALIGN = 64  # bytes; messages that land side by side begin on a cache line
LANES, LANE_BYTES = 4, 512 << 10  # pieces of a buffer that take turns on the network, and the least size of one

REDUCERS: dict[str, Callable[..., object]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True, slots=True)
class Form:
    """A schedule as one rank runs it, and how buffers are cut for it. The cuts are the same on all ranks."""

    schedule: Schedule  # kept so that its id stays its own
    parts: tuple[Part, ...]
    cut: bool  # whether library calls cut buffers into equal parts
    placed: bool  # whether an element's result depends on its chunk, as in a reduce-scatter
    lanes: int  # pieces of a buffer that can take turns, at most
    at_once: bool = False  # whether a collective takes the whole buffer, and not piece by piece

    @staticmethod
    def of(
        schedule: Schedule,
        lowered: Schedule,
        rank: int,
        *,
        calls: bool,
        on_a_host: Callable[[Collective], bool],
        scatters: bool = False,
    ) -> Form:
        """`lowered` is `schedule` with only the collectives left that are library calls, if there are any (`calls`).

        `on_a_host`: whether the ranks of a host do a collective in shared memory. `scatters`: a reduce-scatter. A `mixing` may
        mix each chunk in its own way; all other goals of `verify` are the same for all chunks.
        """
        collectives = [op for op in schedule.ops() if isinstance(op, Collective)]
        cut = calls and any(op.kind in ("reduce_scatter", "all_gather") for op in collectives)
        moves = any(isinstance(op, Move) for op in lowered.ops())
        placed = scatters or schedule.goal == "mixing"
        at_once = calls and schedule.coded and _can_meet_once(schedule, on_a_host)
        # where the place matters a piece is a part of each chunk, so neighbouring chunks of a piece are not one range of memory.
        # All ranks must decide alike: what is a call for the ranks of one host is messages for the others
        alike = not calls or all(len(op.group) == schedule.world for op in collectives)
        can = moves and (at_once or not placed or (alike and all(len(run) == 1 for op in lowered.ops() for run in op.runs)))
        return Form(schedule, joined(project(lowered, rank)), cut, placed or at_once, LANES if can else 1, at_once)

    def cuts(self, flat: torch.Tensor) -> list[Bounds]:
        """The buffer in a few pieces, so that one travels while another is added up; small pieces would only add latency.

        A piece goes through the whole schedule by itself. It is a part of the buffer or, where the place matters, a part of each
        chunk: scattering a part of the buffer by itself would end on the wrong ranks.
        """
        chunks, numel = self.schedule.chunks, flat.numel()
        count = min(self.lanes, flat.nbytes // LANE_BYTES) if flat.is_cpu else 1
        if count < 2 or (self.cut and numel % (chunks * count)):
            return [cut(0, numel, chunks)]
        if self.placed:
            return [[cut(*chunk, count)[lane] for chunk in cut(0, numel, chunks)] for lane in range(count)]
        return [cut(*piece, chunks) for piece in cut(0, numel, count)]


def _can_meet_once(schedule: Schedule, on_a_host: Callable[[Collective], bool]) -> bool:
    """Whether the ranks of a host can reduce the whole buffer at once although it is sent in pieces.

    Then they meet once, and not for each piece. Encoded messages are so short that the meetings would take as long. A piece is a
    part of each chunk, so two chunks of a piece are not one range of memory: what is sent or scaled must be one chunk.
    """
    whole, found = range(schedule.chunks), False
    for step in schedule.steps:
        kinds = {isinstance(op, Collective) for op in step.ops}
        if len(kinds) == 2:
            return False
        for op in step.ops:
            if isinstance(op, Collective):
                found = True
                if op.chunks != whole or not on_a_host(op):
                    return False
            elif not isinstance(op, Recode) and any(len(run) != 1 for run in op.runs):
                return False
    return found


Bounds = Sequence[tuple[int, int]]  # of each chunk: its first element in the buffer, and the one behind its last


def cut(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """The range in `parts` parts, as a schedule cuts a buffer."""
    bounds = [first + i * (last - first) // parts for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


Scratch = Callable[[int, torch.device, int], torch.Tensor]  # (bytes, where, number) -> as many bytes, kept by their number


def execute(
    parts: Sequence[Part],
    flat: torch.Tensor,
    cuts: Sequence[Bounds],
    *,
    op: str,
    me: int,
    transport: Transport,
    ranks: Sequence[int],
    tag: int,
    scratch: Scratch,
    got_on: Callable[[], None],
    coder: Coder | None = None,
    at_once: bool = False,
) -> None:
    """Run the `parts` of rank `me` in place on `flat`. `ranks[i]` is the transport's number of the schedule's rank i.

    The `cuts` are pieces of the buffer (`Form.cuts`), which take turns: while one piece is added up, the messages of the others
    keep the network busy. Collectives take the whole buffer if they are `at_once`. A `coder` is needed if the schedule encodes.
    """
    # a tag of its own for every piece: their messages do not wait in one queue
    pieces = [_Lane(bounds, flat, op, me, transport, ranks, tag ^ i, scratch, i, coder) for i, bounds in enumerate(cuts)]
    for part in parts:
        if at_once and part.collective is not None:
            for piece in pieces:
                piece.finish()
                piece.begin(part)
            transport.collective(part.collective, flat, op, ranks)
            for piece in pieces:
                piece.compute(part)
            got_on()
            continue
        for piece in pieces:
            piece.finish()
            piece.start(part)
            got_on()
    for piece in pieces:
        piece.finish()


class _Lane:
    """One piece of the buffer on its way through the schedule."""

    def __init__(
        self,
        bounds: Bounds,
        flat: torch.Tensor,
        op: str,
        me: int,
        transport: Transport,
        ranks: Sequence[int],
        tag: int,
        scratch: Scratch,
        number: int,
        coder: Coder | None,
    ) -> None:
        self.flat, self.op, self.me, self.ranks = flat, op, me, ranks
        self.transport, self.tag, self.scratch, self.number = transport, tag, scratch, number
        self.bounds = bounds
        self.part: Part | None = None
        self.messages: Any = None
        self.landing: list[torch.Tensor] = []
        self.coder = coder
        if coder is not None:  # where the code of each chunk begins
            lengths = (coder.code.nbytes(last - first) for first, last in bounds)
            self.places = list(itertools.accumulate(lengths, initial=0))
            self.codes = scratch(self.places[-1], flat.device, LANES + number)

    def view(self, slots: range, *, coded: bool = False) -> torch.Tensor:
        if not slots:
            return self.flat[:0]
        if coded:
            return self.codes[self.places[slots.start] : self.places[slots.stop]]
        return self.flat[self.bounds[slots[0]][0] : self.bounds[slots[-1]][1]]

    def views(self, message: Sending | Receipt) -> list[torch.Tensor]:
        chunks = message.chunks
        return [self.view(run, coded=message.coded) for run in ((chunks,) if isinstance(chunks, range) else chunks)]

    def begin(self, part: Part) -> None:
        """Do what comes before the messages of `part`, and needs no other rank."""
        for own in part.before:
            self.compute(own)

    def start(self, part: Part) -> None:
        """Post the messages of `part`. What may not be written yet, or is no single run, goes via the scratch."""
        self.begin(part)
        self.part = part
        beside = [r for r in part.receipts if not r.direct]
        packed = [send for send in part.sends if not isinstance(send.chunks, range)]
        aside: list[Sending | Receipt] = [*beside, *packed]
        lengths = [sum(view.nbytes for view in self.views(message)) for message in aside]
        places = list(itertools.accumulate((-(-length // ALIGN) * ALIGN for length in lengths), initial=0))
        room = self.scratch(places[-1], self.flat.device, self.number)
        rooms = iter([room[at : at + length] for at, length in zip(places, lengths)])
        self.landing = [self.views(r)[0] if r.direct else self.typed(next(rooms), r) for r in part.receipts]
        sends = [
            self.views(send)[0] if isinstance(send.chunks, range) else self.packed(send, self.typed(next(rooms), send))
            for send in part.sends
        ]
        self.messages = self.transport.post(
            [Message(self.ranks[send.peer], x) for send, x in zip(part.sends, sends)],
            [Message(self.ranks[receipt.peer], x) for receipt, x in zip(part.receipts, self.landing)],
            self.tag,
        )

    def typed(self, room: torch.Tensor, message: Sending | Receipt) -> torch.Tensor:
        return room if message.coded else room.view(self.flat.dtype)

    def packed(self, send: Sending, room: torch.Tensor) -> torch.Tensor:
        """Several runs one after the other, as one message."""
        views = self.views(send)
        for view, place in zip(views, room.split([view.numel() for view in views])):
            place.copy_(view)
        return room

    def finish(self) -> None:
        """Wait for the messages of the part that was started, and do the rest of it."""
        part, self.part = self.part, None
        if part is None:
            return
        self.transport.wait(self.messages)
        if part.collective is not None:  # after the sends, which may read what it overwrites
            self.transport.collective(part.collective, self.view(part.collective.chunks), self.op, self.ranks)
        encoded: dict[int, list[torch.Tensor]] = {}  # what is decoded and added to a chunk
        for receipt, x in zip(part.receipts, self.landing):
            if receipt.factor != 1:
                x.mul_(float(receipt.factor))
            if receipt.direct:
                continue
            if receipt.coded and receipt.reduce:
                self.collect(receipt, x, encoded)
                continue
            targets = self.views(receipt)
            for target, piece in zip(targets, x.split([target.numel() for target in targets])):
                if receipt.reduce:
                    # the lower rank's first on both sides of an exchange: max(0.0, -0.0) and NaN + NaN are one of the two
                    REDUCERS[self.op](*((piece, target) if receipt.peer < self.me else (target, piece)), out=target)
                else:
                    target.copy_(piece)
        if self.coder is not None:
            for slot, sources in encoded.items():  # in one pass over each chunk, however many ranks have sent it
                self.coder.add(sources, self.view(range(slot, slot + 1)))
        self.compute(part)

    def compute(self, part: Part) -> None:
        """What needs no other rank."""
        if self.coder is not None:
            for slots, coded in part.recodes:
                self.recode(self.coder, slots, coded)
        for slots, factor in part.scales:
            self.view(slots).mul_(float(factor))

    def collect(self, receipt: Receipt, x: torch.Tensor, encoded: dict[int, list[torch.Tensor]]) -> None:
        """The codes of a message, by the chunk that they are added to."""
        runs = (receipt.chunks,) if isinstance(receipt.chunks, range) else receipt.chunks
        slots = [slot for run in runs for slot in run]
        for slot, code in zip(slots, x.split([self.places[slot + 1] - self.places[slot] for slot in slots])):
            encoded.setdefault(slot, []).append(code)

    def recode(self, coder: Coder, slots: range, coded: bool) -> None:
        """Chunk by chunk: each begins with a block of its own."""
        for slot in slots:
            one = range(slot, slot + 1)
            if coded:
                coder.encode(self.view(one), self.view(one, coded=True), self.bounds[slot][0])
            else:
                coder.decode(self.view(one, coded=True), self.view(one))
