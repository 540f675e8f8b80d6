"""The message of one gossip exchange: tensors of all kinds, packed into one buffer. mixing.py mixes them with a replica.

Tensors are copied into the message. If parameters were views of one flat buffer, a copy of ResNet-50 with its momentum would take
34 instead of 40 ms (docs/gossip.md), but everything that holds or replaces a parameter's memory would have to know about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip.mixing import copy_all
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
    """A message: flat memory, and a view of it for every tensor. With `filled`, the caller writes all views, so that nobody else
    has to clear them."""

    def __init__(
        self, layout: PacketLayout, device: torch.device, allocate: Allocate | None = None, *, filled: bool = False
    ) -> None:
        self.layout = layout
        count = layout.nbytes // WORD.itemsize
        self.words = allocate(count, WORD, device) if allocate else torch.empty(count, dtype=WORD, device=device)
        used = max((end * dtype.itemsize for dtype, _, end in layout.segments), default=0) if filled else 0
        self.words.view(torch.uint8)[used:] = 0  # the padding is sent, too
        whole = {slot.wire: self.words.view(slot.wire) for slot in layout.slots}
        self.views = [
            whole[slot.wire].as_strided(slot.shape, slot.stride, whole[slot.wire].storage_offset() + slot.start)
            for slot in layout.slots
        ]

    def pack(self, tensors: Sequence[torch.Tensor]) -> None:
        copy_all(self.views, tensors)

    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        copy_all(tensors, self.views)


def average_together(tensors: Sequence[torch.Tensor], comm: Communicator) -> None:
    """Make each tensor its exact mean over the ranks of `comm`, bit for bit the same on all. All ranks call it."""
    if tensors and comm.size > 1:
        comm.as_one(lambda: mean_packet(tensors, comm)).unpack(tensors)


def mean_packet(tensors: Sequence[torch.Tensor], comm: Communicator) -> Packet:
    """The exact means of the tensors, which stay as they are. All ranks call it."""
    packet = Packet(lay_out(tensors, None), tensors[0].device, comm.buffer)
    packet.pack(tensors)
    for dtype, begin, end in packet.layout.segments:
        comm.all_reduce(packet.words.view(dtype)[begin:end], op="mean")
    return packet


def real(x: torch.Tensor) -> torch.Tensor:
    """A complex tensor as the numbers that it is made of; any other as it is."""
    return torch.view_as_real(x) if x.is_complex() else x
