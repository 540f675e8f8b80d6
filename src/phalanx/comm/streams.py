"""Orders the caller's CUDA stream and the communication stream. Nothing to do on the CPU.

On a GPU a call returns when its work is queued. `StreamOrder` makes the communication stream wait for what the caller queued
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

_streams: dict[torch.device, torch.cuda.Stream] = {}  # one per device, so that communications keep their order there too
_lock = threading.Lock()


def current_device() -> torch.device | None:
    """Return the GPU of the calling thread, or None if this process has not used one. Does not create a context."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of this device for all communication. Made once, because torch hands out only 32 different streams."""
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        return _streams[device]


class StreamOrder:
    """The order of one operation on `tensors`. The caller creates it, and the thread that queues the work enters it.

    An operation without input tensors, such as recv, names the `device` on which its results may appear.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = (), device: torch.device | None = None) -> None:
        self._tensors = [x for x in tensors if x.is_cuda]
        self.device = self._tensors[0].device if self._tensors else device
        self._after: torch.cuda.Event | None = None
        if self.device is not None:
            self._stream = communication_stream(self.device)
            self._before = torch.cuda.current_stream(self.device).record_event()

    def claim_thread(self) -> None:
        """Make the GPU of this operation the current device of our thread. Every thread starts on device 0.

        There it would create a context, in every process of the host.
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
            self._tensors.clear()  # the allocator now knows that the stream uses them

    def join(self, result: Any = None) -> None:
        """Make what the calling thread queues from now on run after the communication.

        The result may be new memory of the communication stream. The allocator must not reuse it for the next communication while
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
        """Return whether the device has reached this operation, without waiting."""
        return self.device is None or self._before.query()

    def done(self) -> bool:
        """Return whether the device has finished it, without waiting."""
        return self._after is None or self._after.query()

    def complete(self, future: torch.futures.Future[Any], result: Any) -> None:
        """Complete a future of this device. Its readers wait for the communication on the device, and not on the host."""
        with torch.cuda.stream(self._stream):
            future.set_result(result)


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors_in(part)


class HostCopy:
    """An asynchronous copy of a tensor to the host. A CPU tensor is used as it is.

    The copy runs after what its stream has queued. It is in pinned memory: `into`, if given, is reused, so read the copy in time.
    """

    def __init__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._host, self._copied = x, None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True) if into is None else into
            self._host.copy_(x, non_blocking=True)
            self._copied = torch.cuda.current_stream(x.device).record_event()

    @property
    def arrived(self) -> bool:
        """Whether you can read it without waiting."""
        return self._copied is None or self._copied.query()

    def tolist(self) -> list[Any]:
        """Return its values. Waits if the copy is still pending."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        values: list[Any] = self._host.tolist()
        return values


class Writers:
    """The streams on which the gradients of each group were computed: a model may use side streams.

    Autograd orders them before `backward()` returns, but a group that is sent earlier has to wait for them itself.
    """

    def __init__(self) -> None:
        self._streams: dict[int, set[torch.cuda.Stream]] = {}

    def note(self, x: torch.Tensor, group: object) -> None:
        """Note that the current stream has written a part of `group`, on the device of `x`."""
        if x.is_cuda:
            self._streams.setdefault(id(group), set()).add(torch.cuda.current_stream(x.device))

    def wait(self, group: object) -> None:
        """Make the current stream wait for all that have written to `group`."""
        streams = self._streams.pop(id(group), set())
        for stream in streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)

    def forget(self) -> None:
        """Forget all streams, because autograd has ordered them."""
        self._streams.clear()
