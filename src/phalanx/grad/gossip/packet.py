"""What travels in one gossip exchange: tensors of all kinds, packed into one message, and what is made of the one that comes.

Packed rather than kept there: were parameters views of one flat buffer, a copy of ResNet-50 with its momentum would take 34 and
not 40 ms (docs/gossip.md), and everything that holds or replaces a parameter's memory would have to know.

    x    a tensor of this rank, now            sent    what it was when the message left
    received    the partner's, of the same step

    drifted tensors (parameters, optimizer state)     x + (received - sent) / 2
    averaged tensors (batch norm statistics)          x / 2 + received / 2

The first rule keeps the whole of what this rank did while the message was under way, and because every message is received once,
the mean of all ranks is kept: also where the message was rounded to 16 bits. The second cannot make a variance negative.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phalanx._torch_private import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub_
from phalanx.comm.communicator import Communicator
from phalanx.grad.wire import carries

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
WORD = torch.int32  # a message is counted, and summed with zeros, in these
UNIT = 8  # bytes of the widest type: a message, and every part of it, is a multiple of it


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in the message, in elements of `wire` from the beginning of the message."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    wire: torch.dtype
    start: int


@dataclass(frozen=True, slots=True)
class PacketLayout:
    """Where everything is; the same on all ranks, or their messages would not be understood."""

    slots: tuple[Slot, ...]
    segments: tuple[tuple[torch.dtype, int, int], ...]  # (type, begin, end) of each run of elements
    nbytes: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


def lay_out(tensors: Sequence[torch.Tensor], wire: torch.dtype | None, *, parts: int = 1) -> PacketLayout:
    """One after the other without gaps, wide types first, so that each is aligned; the whole can be cut into `parts`."""
    kinds = [wire if wire is not None and carries(x) else x.dtype for x in tensors]
    starts: dict[int, int] = {}
    segments = []
    at = 0
    for kind in sorted(set(kinds), key=lambda kind: (-kind.itemsize, str(kind))):
        begin = at // kind.itemsize
        for i, x in enumerate(tensors):
            if kinds[i] == kind:
                starts[i] = at // kind.itemsize
                at += x.numel() * kind.itemsize
        segments.append((kind, begin, at // kind.itemsize))
    unit = parts * UNIT
    slots = tuple(Slot(tuple(x.shape), _dense_stride(x), x.dtype, kinds[i], starts[i]) for i, x in enumerate(tensors))
    return PacketLayout(slots, tuple(segments), -(-at // unit) * unit)


def _dense_stride(x: torch.Tensor) -> tuple[int, ...]:
    """Its own layout where that has no gaps (channels_last stays so, and is copied in one run), else rows."""
    kept = torch.empty_like(x, device="meta").stride()
    return tuple(x.stride()) if kept == x.stride() else tuple(torch.empty(x.shape, device="meta").stride())


class Packet:
    """A message: flat memory, and a view of it for every tensor."""

    def __init__(self, layout: PacketLayout, device: torch.device, allocate: Allocate | None = None) -> None:
        self.layout = layout
        count = layout.nbytes // WORD.itemsize
        self.words = allocate(count, WORD, device) if allocate else torch.empty(count, dtype=WORD, device=device)
        self.words.zero_()  # what fills it up is sent, too
        whole = {slot.wire: self.words.view(slot.wire) for slot in layout.slots}
        self.views = [
            whole[slot.wire].as_strided(slot.shape, slot.stride, whole[slot.wire].storage_offset() + slot.start)
            for slot in layout.slots
        ]

    def pack(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            foreach_copy_(self.views, list(tensors))

    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            foreach_copy_(list(tensors), self.views)


def average_together(tensors: Sequence[torch.Tensor], comm: Communicator) -> None:
    """Make each tensor its exact mean over the ranks of `comm`, bit by bit the same on all. All ranks call it."""
    if not tensors or comm.size == 1:
        return
    packet = Packet(lay_out(tensors, None), tensors[0].device, comm.buffer)
    packet.pack(tensors)
    for dtype, begin, end in packet.layout.segments:
        comm.all_reduce(packet.words.view(dtype)[begin:end], op="mean")
    packet.unpack(tensors)


def halves(tensors: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Make each the mean of itself and what was received. Bit by bit the same on both sides of a pair."""
    if tensors:
        foreach_mul_(list(tensors), 0.5)
        foreach_add_(list(tensors), list(received), alpha=0.5)


def drift(tensors: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Move each half the way from what was sent to what was received; what happened since is kept. `received` is used up."""
    if not tensors:
        return
    if all(x.dtype == r.dtype for x, r in zip(tensors, received)):
        foreach_sub_(list(received), list(sent))
        foreach_add_(list(tensors), list(received), alpha=0.5)
        return
    for x, s, r in zip(tensors, sent, received):  # 16 bits were on the wire: the difference is made in full precision
        x.add_(r.to(x.dtype).sub_(s), alpha=0.5)


def real(x: torch.Tensor) -> torch.Tensor:
    """A complex tensor as the numbers that it is made of; any other as it is."""
    return torch.view_as_real(x) if x.is_complex() else x
