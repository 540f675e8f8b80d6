"""A device as one process sees it: streams of kernels that have not run yet, and events between them.

    stream 7   [matmul] [record a] [relu]                  runs from the left, at moments that the seed picks
    stream 9   [wait a] [all_reduce #3, rank 0 of 2]       its head is not ready before `record a` has run
                         `--------------------------- and this one not before rank 1's is a head, too

`Simulation.step` runs one ready head of one stream. Nothing runs at the moment it is called, unless the seed says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulated_cuda.memory import Block, Memory
from tests.simulated_cuda.order import Access, Clock, Stack, UnorderedAccessError, merge, stack

if TYPE_CHECKING:
    from tests.simulated_cuda.simulation import Process

Touch = tuple[Block, int, int, bool]  # a kernel touches bytes [low, high) of a block, and whether it writes


class Kernel:
    """Work in a queue."""

    __slots__ = ("name", "run", "stack")

    def __init__(self, name: str, run: Callable[[], object], where: Stack = ()) -> None:
        self.name, self.run, self.stack = name, run, where

    def ready(self) -> bool:
        return True

    def finish(self) -> bool:
        """Do it; returns whether the stream may continue."""
        self.run()
        return True

    def waits_for(self) -> str:
        return "its turn"


class Marker:
    """One recording of an event: done when the stream gets there."""

    __slots__ = ("clock", "done", "name", "stream", "time")

    def __init__(self, stream: Stream, clock: Clock) -> None:
        self.stream, self.clock, self.done, self.time = stream, clock, False, 0.0
        self.name = "record"

    def ready(self) -> bool:
        return True

    def finish(self) -> bool:
        self.done, self.time = True, self.stream.device.simulation.conductor.now
        return True

    def waits_for(self) -> str:
        return "its turn"


class Wait:
    """The stream continues when the marker is done."""

    __slots__ = ("marker", "name")

    def __init__(self, marker: Marker) -> None:
        self.marker, self.name = marker, "wait"

    def ready(self) -> bool:
        return self.marker.done

    def finish(self) -> bool:
        return True

    def waits_for(self) -> str:
        return f"an event of {self.marker.stream}"


class Stream:
    """A queue of work that runs in order."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.id = device, name, next(device.simulation.ids)
        self.queue: deque[Any] = deque()
        self.clock: Clock = {}
        self.number = 0
        self._seen = 0  # how much of what the host knows is in the clock
        self.label = f"{device.process} {device} {len(device.streams)}"  # the same in every replay
        device.streams.append(self)

    def __repr__(self) -> str:
        return f"{self.device.process}'s {self.name} stream {self.id} on {self.device}"

    def push(self, entry: Any, touches: Sequence[Touch] = ()) -> None:
        """Enqueue, note what it touches, and let the seed decide whether the device moves."""
        self.number += 1
        self.clock[self.id] = self.number
        process = self.device.process
        if self._seen != process.seen:
            merge(self.clock, process.clock)
            self._seen = process.seen
        for block, low, high, writes in touches:
            new = Access(low, high, writes, self.id, self.number, entry.name, entry.stack)
            old = block.history.add(new, self.clock)
            if old is not None:
                self.device.simulation.complain(
                    UnorderedAccessError(
                        f"{self.device.process}: nothing orders two accesses to {block}\n{old.text()}\n  and then\n{new.text()}"
                    )
                )
        self.queue.append(entry)
        self.device.simulation.pushed(self)

    def record(self) -> Marker:
        """Done when all that is queued now has run."""
        self.device.touch()
        marker = Marker(self, {})
        self.push(marker)
        marker.clock = dict(self.clock)
        return marker

    def wait(self, marker: Marker | None) -> None:
        """What is queued from now on runs after the marker."""
        if marker is not None:
            merge(self.clock, marker.clock)
            if not marker.done:
                self.push(Wait(marker))

    def launch(self, name: str, run: Callable[[], object], touches: Sequence[Touch]) -> None:
        """Enqueue a kernel."""
        self.device.touch()
        self.device.memory.reclaim()
        self.push(Kernel(name, run, stack(2)), touches)


class Device:
    """A GPU, as one process sees it."""

    def __init__(self, process: Process, index: int) -> None:
        self.process, self.index, self.simulation = process, index, process.simulation
        self.streams: list[Stream] = []
        self.default = Stream(self, "default")
        self.memory = Memory(self)
        self.nccl: list[Any] = []  # NCCL's kernels that are not over, in the order of the calls
        self.random = [process.seed, 0]  # seed and offset of the device's generator

    def __repr__(self) -> str:
        return f"cuda:{self.index}"

    def touch(self) -> None:
        """Whatever uses a device creates a context there."""
        self.process.contexts.add(self.index)

    def markers(self) -> list[Marker]:
        """One on every stream."""
        return [stream.record() for stream in list(self.streams)]
