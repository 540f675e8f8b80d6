"""Order between the caller's CUDA stream and the communication stream; nothing to do on the CPU.

On a GPU a call returns when its work is queued. `StreamOrder` makes the communication stream wait for what the caller has queued
before the call. At `join()` it makes the caller's stream wait for the communication. The host never waits for the device.

    caller's stream          ... backward | record before            join: wait after | step ...
    communication stream                    wait before | all-reduce | record after
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}  # one per device: communications keep their order on it too
_lock = threading.Lock()


def current_device() -> torch.device | None:
    """The GPU of the calling thread; None if this process has not used one. Does not create a context."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this device on which all communication is queued. Made once: torch hands out 32, and then the same again."""
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        return _streams[device]


class StreamOrder:
    """The order of one operation on `tensors`: made by the caller, entered by the thread that queues the work.

    An operation without tensors of its own, such as recv, names the `device` on which its results may appear.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = (), device: torch.device | None = None) -> None:
        self._tensors = [x for x in tensors if x.is_cuda]
        self.device = self._tensors[0].device if self._tensors else device
        self._after: torch.cuda.Event | None = None
        if self.device is not None:
            self._stream = communication_stream(self.device)
            self._before = torch.cuda.current_stream(self.device).record_event()

    def claim_thread(self) -> None:
        """Make the GPU of this operation the current device of a thread of ours, which begins on device 0 like every thread.

        It would create a context there, in every process of the host.
        """
        if self.device is not None:
            torch.cuda.set_device(self.device)

    def __enter__(self) -> None:
        if self.device is not None:
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()
            self._stream.wait_event(self._before)
            for x in self._tensors:
                x.record_stream(self._stream)  # the allocator must not reuse it while the stream reads it

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self.device is not None:
            self._after = self._stream.record_event()
            self._context.__exit__(kind, error, where)
            self._tensors.clear()  # the allocator knows that the stream uses them

    def join(self, result: Any = None) -> None:
        """What the calling thread queues from now on runs after the communication.

        The result may be new memory of the communication stream. The allocator must not give it to the next communication while
        the caller's stream still reads it.
        """
        if self._after is None:
            return
        caller = torch.cuda.current_stream(self.device)
        caller.wait_event(self._after)
        for x in _tensors_in(result):
            if x.is_cuda:
                x.record_stream(caller)

    def reached(self) -> bool:
        """Whether the device has got as far as this operation. Returns at once."""
        return self.device is None or self._before.query()

    def done(self) -> bool:
        """Whether the device is done with it. Returns at once."""
        return self._after is None or self._after.query()

    def complete(self, future: torch.futures.Future[Any], result: Any) -> None:
        """Complete a future of this device. What reads it waits for the communication there, and not on the host."""
        with torch.cuda.stream(self._stream):
            future.set_result(result)


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors_in(part)


class HostCopy:
    """A tensor on its way to the host, behind what its stream has queued; a tensor of the CPU is there already.

    The copy is in pinned memory. `into` is such memory that is used again: read the copy before it is overwritten.
    """

    def __init__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._host, self._come = x, None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True) if into is None else into
            self._host.copy_(x, non_blocking=True)
            self._come = torch.cuda.current_stream(x.device).record_event()

    @property
    def arrived(self) -> bool:
        """Whether reading it waits for nothing."""
        return self._come is None or self._come.query()

    def tolist(self) -> list[Any]:
        """Its values. Waits if they are still on their way."""
        if self._come is not None and not self._come.query():
            self._come.synchronize()
        values: list[Any] = self._host.tolist()
        return values


class Writers:
    """The streams on which the gradients of each group were made: a model may compute, and then differentiate, on side streams.

    Autograd orders them before `backward()` returns, but a group that leaves earlier has to wait for them by itself.
    """

    def __init__(self) -> None:
        self._streams: dict[int, set[torch.cuda.Stream]] = {}

    def note(self, x: torch.Tensor, group: object) -> None:
        """The current stream has written a part of `group`, on the device of `x`."""
        if x.is_cuda:
            self._streams.setdefault(id(group), set()).add(torch.cuda.current_stream(x.device))

    def wait(self, group: object) -> None:
        """The current stream waits for all that have written to `group`."""
        streams = self._streams.pop(id(group), set())
        for stream in streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)

    def forget(self) -> None:
        """Autograd has ordered all of them."""
        self._streams.clear()
