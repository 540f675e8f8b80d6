"""Order between the caller's CUDA stream and the communication stream; nothing to do on the CPU.

On a GPU "finished" means "queued". `StreamOrder` makes the communication stream wait for what the caller has queued before the
call. At `join()` it makes the caller's stream wait for the communication. The host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}  # one per device: communications keep their order on it too


class StreamOrder:
    """The order of one operation on `tensors`: made by the caller, entered by the issuing thread."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = [x for x in tensors if x.is_cuda]
        self._after: torch.cuda.Event | None = None
        if self._tensors:
            device = self._tensors[0].device
            self._stream = _streams.setdefault(device, torch.cuda.Stream(device))
            self._before = torch.cuda.current_stream(device).record_event()
            self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        if self._tensors:
            self._context.__enter__()
            self._stream.wait_event(self._before)
            for x in self._tensors:
                x.record_stream(self._stream)  # the allocator must not reuse it while the stream reads it

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._tensors:
            self._after = self._stream.record_event()
            self._context.__exit__(kind, error, where)

    def join(self) -> None:
        """What the calling thread queues from now on runs after the communication."""
        if self._after is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._after)

    def done(self) -> bool:
        return self._after is None or self._after.query()
