"""Device memory, as the caching allocator of torch hands it out.

A block belongs to the stream on which it was allocated. When its last tensor dies, a kernel on that stream fills it with NaN,
behind what is queued there, and the next allocation on that stream gets it: at once, whatever other streams still do with it.
`record_stream` delays both until those streams have passed the point at which the tensor died.

    x = torch.empty(4, device="cuda")      block 3 of stream 1
    with torch.cuda.stream(side): y = x + 1
    del x                                  stream 1: [poison block 3]     not ordered with the read on `side`: an error
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from tests.simulated_cuda.order import Clock, History, merge

if TYPE_CHECKING:
    from tests.simulated_cuda.device import Device, Stream

SMALLEST = 512  # bytes, as in torch
POISON = 0xFF  # NaN for every floating type, -1 for integers

_numbers = itertools.count(1)


class Block:
    """A piece of device memory in use; tensors and their views refer to it."""

    __slots__ = ("__weakref__", "history", "memory", "number", "recorded", "size", "stream")

    def __init__(self, stream: Stream, memory: torch.Tensor, history: History, size: int) -> None:
        self.stream, self.memory, self.history, self.size = stream, memory, history, size
        self.recorded: dict[Stream, None] = {}  # in order
        self.number = next(_numbers)

    def __repr__(self) -> str:
        return f"a block of {self.size} bytes"

    def __del__(self) -> None:
        self.stream.device.memory.freed.append((self.stream, self.memory, self.history, self.recorded))


class Memory:
    """The allocator of one device and process."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.freed: deque[Any] = deque()  # from __del__, which may run anywhere
        self._delayed: list[Any] = []  # until recorded streams have passed
        self._free: dict[tuple[int, int], list[tuple[torch.Tensor, History]]] = {}
        self.blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()  # by address
        self.reused = 0

    def allocate(self, size: int, stream: Stream) -> Block:
        """`size` bytes on `stream`, whatever they contain."""
        self._device.touch()
        self.reclaim()
        room = max(SMALLEST, 1 << (size - 1).bit_length()) if size else SMALLEST
        free = self._free.get((stream.id, room))
        if free:
            memory, history = free.pop()
            self.reused += 1
        else:
            memory, history = torch.full((room,), POISON, dtype=torch.uint8), History()
        block = Block(stream, memory, history, size)
        self.blocks[memory.data_ptr()] = block
        return block

    def reclaim(self) -> None:
        """Take back what has died."""
        while self.freed:
            stream, memory, history, recorded = self.freed.popleft()
            others = [other for other in recorded if other is not stream]
            if others:
                self._delayed.append((stream, memory, history, [other.record() for other in others]))
            else:
                self._reuse(stream, memory, history)
        if self._delayed:
            waiting, self._delayed = self._delayed, []
            for stream, memory, history, markers in waiting:
                if all(marker.done for marker in markers):
                    known: Clock = {}
                    for marker in markers:
                        merge(known, marker.clock)
                    history.forget(known)
                    self._reuse(stream, memory, history)
                else:
                    self._delayed.append((stream, memory, history, markers))

    def _reuse(self, stream: Stream, memory: torch.Tensor, history: History) -> None:
        from tests.simulated_cuda.device import Kernel

        self._free.setdefault((stream.id, memory.numel()), []).append((memory, history))
        if self._device.simulation.over:
            return
        freed = _Freed(memory, history)
        stream.push(Kernel("the allocator", lambda: memory.fill_(POISON)), [(freed, 0, memory.numel(), True)])  # type: ignore[list-item]


class _Freed:
    """A block without tensors."""

    def __init__(self, memory: torch.Tensor, history: History) -> None:
        self.memory, self.history = memory, history

    def __repr__(self) -> str:
        return "a block whose tensors are gone (wait for the other stream first, or record_stream)"
